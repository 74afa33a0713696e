"""`carpool fit`: fit a profile to measurements."""

from collections.abc import Mapping
from typing import Any

import click

from carpool.commands.profiles import show
from carpool.profile.schema import dumps, save


@click.command()
@click.option("--throughput", multiple=True, metavar="FILE", help="Timed rows: CSV table, or a measurement's JSON.")
@click.option("--efficiency", multiple=True, metavar="CSV", help="Progress and iterations of each epoch and batch.")
@click.option("--most-per-gpu", multiple=True, metavar="TASK=N", help="Limit of a micro-step; otherwise the rows' own.")
@click.option("--most-gpus", multiple=True, metavar="TASK=N", help="Limit of a task's GPUs when it is scaled.")
@click.option("--memory", multiple=True, metavar="JSON", help="Measurement file whose solo rows tell memory.")
@click.option(
    "--activation-scale", default=2.0, show_default=True, help="Times the memory per sample (2: 16 to 32 bits)."
)
@click.option("--context-gib", default=0.7, show_default=True, help="Memory of the CUDA context, added to each job.")
@click.option("--pairs", multiple=True, metavar="FILE", help="Slow-downs: CSV matrix (row slowed by column) or JSON.")
@click.option("--mechanism", multiple=True, help="mps, time-slicing or unknown; once, or once for each --pairs.")
@click.option("--name", required=True, help="Name of the profile.")
@click.option("--description", default="", help="Where the numbers come from.")
@click.option("--gpu", help="Name of the card.")
@click.option("--gpu-memory", metavar="SIZE", help="What jobs can use of it, e.g. 15GiB.")
@click.option("--gpus-per-node", type=click.IntRange(min=1), help="GPUs in one machine.")
@click.option("--driver", help="Driver version.")
@click.option("--batch-norm", multiple=True, metavar="TASK", help="A task with BatchNorm, which accumulation changes.")
@click.option("--noise", help="How well repeated measurements agree.")
@click.option("--note", multiple=True, help="A remark to keep in the file.")
@click.option("--out", metavar="FILE", help="Write the profile here.")
@click.option("--json", "as_json", is_flag=True, help="Print the profile as JSON.")
def fit(out: str | None, as_json: bool, **options: Any) -> None:
    """Fit tasks, memory and slow-downs from measurements, and write them as a profile."""
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
