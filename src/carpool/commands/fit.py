"""`carpool fit`: fit a profile to measurements."""

from collections.abc import Mapping
from typing import Any

import click

from carpool.commands.profiles import show
from carpool.profile.schema import dumps, save


@click.command()
@click.option(
    "--throughput", multiple=True, metavar="FILE", help="Iteration times: CSV table or JSON of a measurement."
)
@click.option("--efficiency", multiple=True, metavar="CSV", help="Progress and iterations of each epoch and batch.")
@click.option(
    "--most-per-gpu",
    multiple=True,
    metavar="TASK=N",
    help="Maximum samples of a micro-batch per GPU.  [default: that of the rows]",
)
@click.option("--most-gpus", multiple=True, metavar="TASK=N", help="Largest number of GPUs when a task is scaled.")
@click.option(
    "--memory", multiple=True, metavar="JSON", help="Measurement file whose rows of single jobs contain the memory."
)
@click.option(
    "--activation-scale",
    default=2.0,
    show_default=True,
    help="Factor on the memory per sample (2 for 32-bit values measured with 16 bits).",
)
@click.option("--context-gib", default=0.7, show_default=True, help="Memory of the CUDA context, added to each job.")
@click.option(
    "--pairs", multiple=True, metavar="FILE", help="Slow-downs: CSV matrix (row slowed down by column) or JSON."
)
@click.option(
    "--mechanism", multiple=True, help="mps, time-slicing or unknown; once for all --pairs, or once for each."
)
@click.option("--name", required=True, help="Name of the profile.")
@click.option("--description", default="", help="Origin of the numbers.")
@click.option("--gpu", help="Name of the GPU model.")
@click.option("--gpu-memory", metavar="SIZE", help="GPU memory that jobs can use, such as 15GiB.")
@click.option("--gpus-per-node", type=click.IntRange(min=1), help="Number of GPUs in one machine.")
@click.option("--driver", help="Driver version.")
@click.option(
    "--batch-norm", multiple=True, metavar="TASK", help="Task with BatchNorm, whose training accumulation changes."
)
@click.option("--noise", help="Text on how well repeated measurements agree.")
@click.option("--note", multiple=True, help="Remark to keep in the file.")
@click.option("--out", metavar="FILE", help="Write the profile here.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def fit(out: str | None, as_json: bool, **options: Any) -> None:
    """Fit a profile to measurements.

    The profile has the iteration times, memory and slow-downs of tasks.
    """
    from carpool.profile.build import FitRequest, build

    _check_scales(options)
    profile = build(FitRequest(**options))
    if out is not None:
        save(profile, out)
    if as_json:
        click.echo(dumps(profile), nl=False)
        return
    show(profile)
    if out is not None:
        click.echo(f"wrote {out}")


def _check_scales(options: Mapping[str, Any]) -> None:
    from math import isfinite

    from carpool.profile.fields import ProfileError

    for option, least in (("activation_scale", "above 0"), ("context_gib", "0 or more")):
        value = options[option]
        if not isfinite(value) or value < 0 or (value == 0 and option == "activation_scale"):
            raise ProfileError(f"--{option.replace('_', '-')} {value}: give a finite number, {least}")
