"""`carpool paper`: run the simulations of the configuration, or find them in the cache, and write the report."""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from time import monotonic

import click

from carpool.errors import InputError
from carpool.files import results_in, write_json
from carpool.report import plots
from carpool.report.paper import config as configuration
from carpool.report.paper.assemble import PAGE, assemble
from carpool.report.paper.claim import Claim
from carpool.report.paper.config import PaperConfig
from carpool.report.paper.emulated import read_emulated
from carpool.report.paper.measured import read_measured
from carpool.report.paper.plan import PlannedRun, data_folder, plan
from carpool.report.paper.results import Results
from carpool.report.paper.runs import SIMULATES, RunProgress, code_digest, execute, named_files
from carpool.report.paper.verdicts import ClaimVerdict
from carpool.report.progress import waiting
from carpool.sim.sweep import CaseResult

CACHE = "cache"
STAMP = "complete.json"
"""File that says for which code and configuration the report was written."""
Advance = Callable[[RunProgress], None]


@click.command()
@click.option("--quick", is_flag=True, help="Run a part with few seeds, in less than a minute.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("out/paper"),
    show_default=True,
    help="Folder of the report; it also keeps the results of all runs for the next call.",
)
@click.option(
    "--config",
    "path",
    type=click.Path(path_type=Path),
    help="Your own configuration file. Its [physical] measured can name an experiment on your GPU: the CSV file that "
    "bench/physical.py --rows writes.",
)
@click.option("--workers", type=click.IntRange(1), help="Number of processes.  [default: one per core]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def paper(quick: bool, out: Path, path: Path | None, workers: int | None, as_json: bool) -> None:
    """Reproduce the SJF-BSBF paper as one HTML report.

    The report shows every table and figure of the paper's evaluation beside the paper's own numbers, and a verdict on
    each of its claims.
    """
    began = monotonic()
    config = configuration.load(path, quick)
    measured, emulated = read_measured(config), read_emulated(config)
    if not plots.available():
        raise InputError("the report needs matplotlib: pip install 'carpool[plots]'")
    stamp = _stamp(config, quick)
    found = _complete(out, stamp)
    runs = plan(config)
    if found is None:
        with results_in(out) as folder:
            outcomes = _run(config, runs, out / CACHE, workers, quiet=as_json)
            with waiting("writing the report", quiet=as_json):
                found = assemble(folder, Results(config, outcomes), measured, emulated, quick)
            written = sorted(file.name for file in folder.iterdir())
            write_json(folder / STAMP, {"stamp": stamp, "files": written, "claims": _plain(found)})
    if as_json:
        click.echo(json.dumps(_plain(found)))
        return
    _tell(found, out, len(runs), monotonic() - began)


def _run(
    config: PaperConfig, runs: Sequence[PlannedRun], cache: Path, workers: int | None, quiet: bool
) -> dict[PlannedRun, CaseResult]:
    kept = 0

    def note(standing: RunProgress) -> None:
        nonlocal kept
        kept = standing.runs
        advance(standing)

    try:
        with _bar(quiet) as advance:
            return execute(config, runs, cache, workers=workers, progress=note)
    except OSError as error:
        raise InputError(f"{cache}: cannot write there: {error.strerror}; choose another --out") from None
    except BaseException:
        if kept:
            print(f"{kept} of {len(runs)} runs are kept in {cache}; run the same command to continue", file=sys.stderr)
        raise


def _stamp(config: PaperConfig, quick: bool) -> str:
    """Return a digest of everything on which the report depends."""
    digest = sha256(f"{config.text}\0{quick}\0{code_digest(*SIMULATES, 'report')}".encode())
    texts = [*(row.spec for row in config.policies), config.setup.profile, config.setup.truth]
    texts += [config.physical.setup.truth, *config.figure6b.tables]
    files = [str(path) for path in named_files(*texts)]
    files += [str(path) for path in (config.physical.measured, config.physical.emulated) if path]
    folder = data_folder()
    if folder:
        files += [str(folder / name) for name in (*(row.file for row in config.workloads), "pollux/throughput.csv")]
    for name in files:
        digest.update(name.encode())
        if Path(name).is_file():
            digest.update(Path(name).read_bytes())
    return digest.hexdigest()


def _complete(out: Path, stamp: str) -> list[Claim] | None:
    """Return the claims of the existing report, if it is complete and nothing has changed since; otherwise None."""
    try:
        value = json.loads((out / STAMP).read_text("utf-8"))
        if value["stamp"] != stamp or not all((out / name).is_file() for name in value["files"]):
            return None
        return [Claim(**{**row, "verdict": ClaimVerdict(row["verdict"])}) for row in value["claims"]]
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _plain(claims: Sequence[Claim]) -> list[dict[str, str]]:
    return [{name: str(getattr(claim, name)) for name in Claim.__slots__} for claim in claims]


def _tell(claims: Sequence[Claim], out: Path, runs: int, seconds: float) -> None:
    counts = Counter(claim.verdict for claim in claims)
    verdicts = ", ".join(f"{counts[verdict]} {verdict}" for verdict in ClaimVerdict if counts[verdict])
    click.echo(f"{len(claims)} claims: {verdicts}")
    click.echo(f"{runs} runs, {seconds:.0f} s; open {out / PAGE}")


@contextmanager
def _bar(quiet: bool) -> Iterator[Advance]:
    """Show a progress bar on standard error. It counts jobs, because a run with more jobs takes longer."""
    if quiet or not sys.stderr.isatty():
        yield lambda standing: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = ("simulating", BarColumn(), TextColumn("{task.description}"), "time left", TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None)

        def show(standing: RunProgress) -> None:
            text = f"{standing.runs} of {standing.of_runs} runs,"
            progress.update(task, description=text, completed=standing.jobs, total=max(1, standing.of_jobs))

        yield show
