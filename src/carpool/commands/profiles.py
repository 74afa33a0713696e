"""`carpool profiles`: list, show and merge profiles, as tables or JSON.

`merge.py` and `schema.py` in `carpool.profile` do the work. Rich and matplotlib load on first use, so that other
commands start quickly.
"""

import json
from typing import Any

import click

from carpool.profile.matrix import matrix
from carpool.profile.schema import Profile, ProfileError, dumps, load, save, shipped

GIB = 2**30


class ProfileGroup(click.Group):
    """`carpool profiles h200` shows h200."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        known = args[0] in self.commands or args[0].startswith("-")
        return super().resolve_command(ctx, args if known else ["show", *args])


@click.group(cls=ProfileGroup, invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@click.pass_context
def profiles(context: click.Context, as_json: bool) -> None:
    """List, show and merge profiles.

    A profile has fitted iteration times and memory of tasks, and measured slow-downs. Several ship with Carpool.
    """
    if context.invoked_subcommand is None:
        _list(as_json)


@profiles.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def list_command(as_json: bool) -> None:
    """List the shipped profiles."""
    _list(as_json)


@profiles.command("show")
@click.argument("name")
@click.option("--plots", metavar="FOLDER", help="Draw the fits and the slow-downs there.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def show_command(name: str, plots: str | None, as_json: bool) -> None:
    """Show one profile: a shipped NAME or a path."""
    profile = load(name)
    if as_json:
        click.echo(dumps(profile), nl=False)
    else:
        show(profile)
    if plots is not None:
        for picture in _draw(profile, plots):
            click.echo(f"drew {picture}", err=as_json)


@profiles.command("merge", short_help="Make one profile of several of the same GPU.")
@click.argument("names", nargs=-1, metavar="A B...")
@click.option("--out", required=True, metavar="FILE", help="Write the profile here.")
@click.option("--name", help="Name of the profile.  [default: that of A]")
@click.option("--description", help="What it is about.  [default: that of A]")
@click.option("--note", multiple=True, help="A further remark to keep in the file.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def merge_command(
    names: tuple[str, ...], out: str, name: str | None, description: str | None, note: tuple[str, ...], as_json: bool
) -> None:
    """Merge several profiles of the same GPU into one.

    They may come from two machines. A, B and so on are shipped names or paths. Each keeps its raw points as a series of
    its own, and everything is fitted anew: times alone are the mean over all series, slow-downs are relative to the
    same job alone in their own.
    """
    from carpool.profile.merge import NamedProfile, merge, unchecked

    inputs = [NamedProfile(called, load(called)) for called in names]
    found = merge(inputs, name, description, note)
    save(found, out)
    click.echo(unchecked(inputs), err=True)
    if as_json:
        click.echo(dumps(found), nl=False)
        return
    show(found)
    click.echo(f"\nwrote {out}; {len(found.raw)} measurements in {len({done.series for done in found.raw})} series")


def _draw(profile: Profile, folder: str) -> list[str]:
    from carpool.files import results_in
    from carpool.report import profile_plots

    if not (profile.tasks or profile.pairs):
        raise ProfileError(f"{profile.name}: neither tasks nor pairs, so there is nothing to draw")
    with results_in(folder) as aside:
        if profile.tasks:
            profile_plots.fits(aside / f"{profile.name}_fit.png", profile)
        if profile.pairs:
            profile_plots.slowdowns(aside / f"{profile.name}_xi.png", profile)
        names = sorted(path.name for path in aside.iterdir())
    return [f"{folder}/{name}" for name in names]


def _list(as_json: bool) -> None:
    known = [load(name) for name in shipped()]
    if as_json:
        summaries = [
            {
                "name": profile.name,
                "description": profile.description,
                "gpu": profile.gpu.name if profile.gpu else None,
                "tasks": sorted(profile.tasks),
                "pairs": len(profile.pairs),
                "groups": len(profile.groups),
                "mechanisms": profile.pair_mechanisms(),
            }
            for profile in known
        ]
        click.echo(json.dumps(summaries, ensure_ascii=False, indent=1))
        return
    rows = [
        (p.name, p.gpu.name if p.gpu else "–", len(p.tasks), len(p.pairs), ", ".join(p.pair_mechanisms()) or "–")
        for p in known
    ]
    _print("Profiles", ("name", "GPU", "tasks", "pairs", "mechanisms"), rows)


def show(profile: Profile) -> None:
    gpu = profile.gpu
    memory = f", {gpu.memory_bytes / GIB:.1f} GiB" if gpu and gpu.memory_bytes else ""
    click.echo(f"{profile.name}: {gpu.name + memory if gpu else 'no GPU named'}")
    for line in filter(None, (profile.description, profile.noise)):
        click.echo(line)
    if profile.tasks:
        _constants(profile)
        _errors(profile)
    if any(task.scaling for task in profile.tasks.values()):
        _scaling(profile)
    if any(task.memory for task in profile.tasks.values()):
        _memory(profile)
    for mechanism in profile.pair_mechanisms():
        _slowdowns(profile, mechanism)
    if profile.groups:
        _groups(profile)
    if profile.kappa:
        rows = [(m, f"{k.kappa:.2f}", f"{100 * k.median_error:.1f} %", k.pairs) for m, k in profile.kappa.items()]
        _print("ξ = 1 + κ·u_a·u_b for pairs that were not measured", ("mechanism", "κ", "median error", "pairs"), rows)
    if profile.notes:
        click.echo("")
    for note in profile.notes:
        click.echo(f"note: {note}")


def _constants(profile: Profile) -> None:
    rows = [
        (
            name,
            f"{t.alpha_s:.3g}",
            f"{t.beta_s:.3g}",
            *(f"{x:.3g}" for x in (t.intra.base_s, t.intra.per_gpu_s, t.inter.base_s, t.inter.per_gpu_s)),
            f"{t.delta:.3g}",
            f"{t.knee:.3g}" if t.knee else "–",
        )
        for name, t in profile.tasks.items()
    ]
    heads = ("task", "α", "β", "A node", "B node", "A nodes", "B nodes", "δ", "knee")
    _print("Iteration time (s); all-reduce of n GPUs: A + B·(n−2), in one node or across nodes", heads, rows)


def _errors(profile: Profile) -> None:
    def percent(value: float | None) -> str:
        return "–" if value is None else f"{100 * value:.1f} %"

    rows = [
        (
            name,
            *map(percent, (e.median, e.p90, e.held_out_median)),
            *map(percent, (e.median_one_gpu, e.median_one_node, e.median_several_nodes)),
            e.points,
        )
        for name, task in profile.tasks.items()
        if (e := task.error) is not None
    ]
    heads = ("task", "median", "p90", "held out", "one GPU", "one node", "several nodes", "points")
    _print("Error of the fit (medians by placement)", heads, rows)


def _scaling(profile: Profile) -> None:
    rows = []
    for name, task in profile.tasks.items():
        if (s := task.scaling) is None:
            continue
        e = task.scaling_error
        worth = [f"{100 * s.efficiency(phase.noise, s.max_batch):.0f}" for phase in (s.phases[0], s.phases[-1])]
        off = f"{100 * e.median:.1f} / {100 * e.p90:.1f}" if e else "–"
        limits = (f"{s.initial_batch:,}–{s.max_batch:,}", f"{s.min_sub_batch:,}–{s.max_sub_batch:,}", s.max_gpus or "–")
        rows.append((name, *limits, len(s.phases), " → ".join(worth), off))
    heads = ("task", "batch", "micro-batch", "max GPUs", "phases", "efficiency %", "error, points")
    _print("Scaling: limits, and efficiency of the largest batch in the first and in the last phase", heads, rows)


def _memory(profile: Profile) -> None:
    rows = []
    for name, task in profile.tasks.items():
        if (m := task.memory) is None:
            continue
        room = profile.gpu.memory_bytes if profile.gpu else None
        fits = room is not None and m.bytes_per_sample > 0
        largest = f"{max(0, int((room - m.static_bytes) / m.bytes_per_sample)):,}" if fits and room else "–"
        rows.append((name, f"{m.static_bytes / GIB:.2f}", f"{m.bytes_per_sample / 2**20:.4g}", largest))
    _print("Memory", ("task", "static GiB", "MiB per sample", "largest batch alone"), rows)


def _slowdowns(profile: Profile, mechanism: str) -> None:
    """Print a matrix of slow-downs. Columns have the numbers of the rows, because their names would not fit."""
    found = matrix(profile, mechanism)
    heads = [str(number) for number, _ in enumerate(found.labels, 1)]
    rows = [
        (f"{head:>2} {label}", *("–" if xi is None else f"{xi:.2f}" for xi in cells))
        for head, label, cells in zip(heads, found.labels, found.rows, strict=True)
    ]
    _print(f"ξ, row slowed down by column, {mechanism}", ("", *heads), rows)


def _groups(profile: Profile) -> None:
    rows = [
        (group.mechanism, ", ".join(f"{j.task} {j.batch}" for j in group.jobs), ", ".join(f"{x:.2f}" for x in group.xi))
        for group in profile.groups
    ]
    _print("Three jobs or more on one GPU", ("mechanism", "jobs", "ξ"), rows)


def _print(title: str, heads: tuple[str, ...], rows: list[Any]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from carpool.report.console import new_console, print_table

    table = Table(box=SIMPLE_HEAD, show_edge=False)
    for i, head in enumerate(heads):
        table.add_column(head, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*map(str, row))
    click.echo(f"\n{title}")  # not as the table's title, which Rich would wrap to the table's width
    print_table(new_console(), table)
