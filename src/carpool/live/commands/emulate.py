"""`carpool emulate`: one worker of a job on emulated GPUs, for `carpool submit … -- carpool emulate`."""

import sys

import click


@click.command()
@click.option("--model", help="Task of the profile.  [default: --model of the job]")
@click.option("--batch", type=int, help="Samples per GPU per iteration.  [default: --batch of the job]")
@click.option("--iterations", type=int, help="Iterations in all.  [default: --iterations of the job]")
@click.option("--startup", type=float, metavar="SECONDS", help="Additional time to start up.")
def emulate(**given: str | float | None) -> None:
    """Emulate a training on emulated GPUs.

    It iterates by the clock, as the model of the job does on the GPU that `carpool serve --emulate` emulates.
    """
    from carpool.emulate.worker import main

    sys.exit(main([f"--{name}={value}" for name, value in given.items() if value is not None]))
