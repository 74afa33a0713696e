"""Table II's live form: the paper's 30 jobs through the live service on emulated GPUs, and simulated.

`bench/emulated.py --rows` writes the file, and the configuration names it.
"""

from dataclasses import dataclass

from carpool.errors import InputError, nearest
from carpool.report.paper.cells import ReportTable, TableCell, deviation, paper, plain, show
from carpool.report.paper.config import PaperConfig
from carpool.report.paper.measured import judged
from carpool.report.paper.measured_rows import MeasuredRow, read_rows

FIGURES = ("makespan_s", "mean_jct_s")
COLUMNS = (
    "policy",
    "ground",
    *(f"{world}_{figure}" for figure in FIGURES for world in ("live", "simulated")),
    "suspended",
)
LABELS = {
    "fifo": "FIFO",
    "sjf": "SJF",
    "tiresias": "Tiresias",
    "pollux": "Pollux",
    "sjf-ffs": "SJF-FFS",
    "sjf-bsbf": "SJF-BSBF",
    "carpool": "Carpool",
}
GROUNDS = {
    "agents": "agents on one machine",
    "slurm": "four nodes of a Slurm cluster",
    "ray": "four nodes of a Ray cluster",
}
REMEDY = "give the CSV file that bench/emulated.py --rows writes"


@dataclass(frozen=True, slots=True)
class EmulatedRun:
    """One policy, in seconds of the emulated GPU: live and simulated values of each figure."""

    policy: str
    ground: str
    figures: tuple[tuple[float, float], ...]
    suspended: int
    """Attempts that were suspended."""


@dataclass(frozen=True)
class EmulatedExperiment:
    """The runs of all policies, read from a file."""

    file: str
    runs: tuple[EmulatedRun, ...]

    @property
    def where(self) -> str:
        return " and ".join(dict.fromkeys(GROUNDS[run.ground] for run in self.runs))


def read_emulated(config: PaperConfig) -> EmulatedExperiment | None:
    """Read the experiment that the configuration names; None if it names none."""
    path = config.physical.emulated
    if path is None:
        return None
    lines: dict[tuple[str, str], int] = {}
    runs = []
    for row in read_rows(path, COLUMNS, REMEDY):
        run = _run(row)
        first = lines.setdefault((run.policy, run.ground), row.line)
        if first != row.line:
            raise InputError(f"{row.where}: policy: the same run as in line {first}; remove one")
        runs.append(run)
    return EmulatedExperiment(path.name, tuple(runs))


def _run(row: MeasuredRow) -> EmulatedRun:
    policy, ground = row.values["policy"] or "", row.values["ground"] or ""
    for column, text, known in (("policy", policy, LABELS), ("ground", ground, GROUNDS)):
        if text not in known:
            raise InputError(f"{row.where}: {column}: {text!r} is not one of the experiment's: {nearest(text, known)}")
    figures = tuple((row.seconds(f"live_{figure}"), row.seconds(f"simulated_{figure}")) for figure in FIGURES)
    return EmulatedRun(policy, ground, figures, row.count("suspended", 0))


def sheet(found: EmulatedExperiment, config: PaperConfig, bar: float) -> ReportTable:
    """Return the table of all runs. Deviations are coloured by `bar`, the paper's limit in per cent."""
    printed, base = config.paper.physical, config.paper.physical["fifo"]
    fifo = {run.ground: run for run in found.runs if run.policy == "fifo"}
    rows, lines = [], []
    for run in found.runs:
        cells: list[TableCell] = [plain(LABELS[run.policy])]
        line: list[object] = [run.policy, run.ground]
        for number, (live, simulated) in enumerate(run.figures):
            off = deviation(simulated, live)
            first = fifo.get(run.ground)
            relative = live / first.figures[number][0] if first else None
            theirs = printed[run.policy][number] / base[number] if run.policy in printed else None
            cells += [plain(show(live, 0)), judged(show(simulated, 0), off, bar)]
            cells += [paper(theirs), plain("–" if relative is None else show(relative, 2))]
            line += [live, simulated, f"{off:.6g}", theirs or "", relative or ""]
        rows.append((*cells, plain(run.suspended)))
        lines.append((*line, run.suspended))
    columns = ("live, s", "simulated, s", "paper ÷ FIFO", "live ÷ FIFO")
    names = ("live_s", "simulated_s", "deviation_%", "paper_of_fifo", "live_of_fifo")
    return ReportTable(
        name="tableII-live",
        title=f"The same jobs live, on {found.where}",
        groups=(("", 1), ("makespan", 4), ("mean completion time", 4), ("", 1)),
        header=("policy", *columns, *columns, "suspended"),
        rows=tuple(rows),
        csv_header=(
            "policy",
            "ground",
            *(f"{what}_{name}" for what in ("makespan", "jct") for name in names),
            "suspended",
        ),
        csv_rows=tuple(lines),
        note="Live: one run on the real clock. Simulated: the same jobs at the times at which they were submitted; the "
        "simulator knows how long each attempt took to start and to end. The small line is the deviation from the live "
        f"value: blue up to the paper's {bar:g} %, ochre up to {2 * bar:g} %, red beyond.",
    )
