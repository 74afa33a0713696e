"""`carpool emulate`: one worker of a job on emulated GPUs, for `carpool submit … -- carpool emulate`."""

import sys

import click


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS]")
def emulate(words: tuple[str, ...]) -> None:
    """Play a training on emulated GPUs.

    It iterates by the clock, as the model of the job does on the GPU that `carpool serve --emulate` emulates.
    """
    from carpool.emulate.worker import main

    sys.exit(main(words))
