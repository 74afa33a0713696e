"""A physical experiment: figures of real runs, and what the simulator gives for the same jobs on the same GPU.

`bench/physical.py --rows` writes the file, and the configuration names it.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from carpool.errors import InputError, nearest
from carpool.report.paper.cells import ReportTable, TableCell, deviation, plain, show, signed
from carpool.report.paper.config import PaperConfig
from carpool.report.paper.measured_rows import MeasuredRow, read_rows

FIGURES = ("makespan_s", "mean_jct_s", "mean_queue_s")
WORLDS = ("measured", "simulated", "predicted")
PARTS = (*WORLDS, "spread")
CASE_COLUMNS = ("policy", "mechanism", "jobs_per_gpu", "runs")
BUSY_COLUMNS = ("measured_gpu_busy", "simulated_gpu_busy")
COLUMNS = (*CASE_COLUMNS, *(f"{part}_{figure}" for figure in FIGURES for part in PARTS), *BUSY_COLUMNS)
LABELS = {"fifo": "FIFO", "sjf": "SJF", "sjf-ffs": "SJF-FFS", "sjf-bsbf": "SJF-BSBF", "carpool": "Carpool"}
LOGICAL = "logical"
MECHANISMS = {"mps": "MPS", "time-slicing": "time-slicing", LOGICAL: "logical slots"}
REMEDY = "give the CSV file that bench/physical.py --rows writes"


@dataclass(frozen=True, slots=True)
class FigureComparison:
    """One figure, measured and simulated, in seconds."""

    measured: float
    simulated: float
    """Value from a simulation with the time that each process took to start in this run."""
    predicted: float
    """Value from a simulation without data of this run, which draws start times from those of other runs."""
    spread: float
    """Standard deviation of the simulated value over draws of the jobs' speeds."""

    @property
    def off(self) -> float | None:
        """Deviation of the simulated from the measured value, in per cent of the measured one."""
        return deviation(self.simulated, self.measured) if self.measured else None

    @property
    def predicted_off(self) -> float | None:
        """Deviation of the predicted from the measured value, in per cent of the measured one."""
        return deviation(self.predicted, self.measured) if self.measured else None


@dataclass(frozen=True, slots=True)
class MeasuredCase:
    """One policy and one way of sharing, as means over its runs."""

    policy: str
    mechanism: str
    jobs_per_gpu: int
    runs: int
    makespan: FigureComparison
    jct: FigureComparison
    queue: FigureComparison
    gpu_busy: float | None
    """Share of time in which the GPU was busy, by the driver's counter; None if it was not recorded."""
    simulated_gpu_busy: float

    @property
    def family(self) -> str:
        """The policy without its threshold."""
        return re.sub(r"^tiresias-.*", "tiresias", self.policy)

    @property
    def label(self) -> str:
        return LABELS.get(self.policy) or f"Tiresias, {self.policy.removeprefix('tiresias-')} GPU-s"

    @property
    def sharing(self) -> str:
        return "none" if self.jobs_per_gpu == 1 else MECHANISMS[self.mechanism]


@dataclass(frozen=True)
class PhysicalExperiment:
    """All cases of an experiment, read from a file."""

    file: str
    shipped: bool
    """Whether the file ships with Carpool."""
    cases: tuple[MeasuredCase, ...]

    @property
    def where(self) -> str:
        return "logical slots" if any(case.mechanism == LOGICAL for case in self.cases) else "one GPU"


def read_measured(config: PaperConfig) -> PhysicalExperiment | None:
    """Read the experiment that the configuration names; None if it names none."""
    path = config.physical.measured
    if path is None:
        return None
    lines: dict[tuple[str, str, int], int] = {}
    cases = []
    for row in read_rows(path, COLUMNS, REMEDY):
        case = _case(row)
        first = lines.setdefault((case.policy, case.mechanism, case.jobs_per_gpu), row.line)
        if first != row.line:
            raise InputError(f"{row.where}: policy: the same case as in line {first}; remove one")
        cases.append(case)
    return PhysicalExperiment(path.name, path.parent == Path(__file__).parent, tuple(cases))


def _case(row: MeasuredRow) -> MeasuredCase:
    policy, mechanism = (row.values[column] or "" for column in ("policy", "mechanism"))
    if policy not in LABELS and not re.fullmatch(r"tiresias-\d+(\.\d+)?", policy):
        hint = nearest(policy, [*LABELS, "tiresias-SECONDS"])
        raise InputError(f"{row.where}: policy: {policy!r} is not one of the experiment's: {hint}")
    if mechanism not in MECHANISMS:
        hint = nearest(mechanism, MECHANISMS)
        raise InputError(f"{row.where}: mechanism: {mechanism!r} is not a way of sharing a GPU: {hint}")
    makespan, jct, queue = (_compared(row, figure) for figure in FIGURES)
    counted = row.share("measured_gpu_busy") if row.values["measured_gpu_busy"] else None
    busy = counted, row.share("simulated_gpu_busy")
    return MeasuredCase(policy, mechanism, row.count("jobs_per_gpu"), row.count("runs"), makespan, jct, queue, *busy)


def _compared(row: MeasuredRow, figure: str) -> FigureComparison:
    """Read a figure. Queuing times and spreads may be 0; all others are above 0."""
    columns = [f"{part}_{figure}" for part in PARTS]
    zero = [column.startswith("spread") or column.endswith("queue_s") for column in columns]
    return FigureComparison(*map(row.seconds, columns, zero))


def sheet(found: PhysicalExperiment, bar: float) -> ReportTable:
    """Return the table of all cases. Deviations are coloured by `bar`, the paper's limit in per cent."""
    runs = sum(case.runs for case in found.cases)
    return ReportTable(
        name="measured",
        title=f"Measured on {found.where}, and simulated: {len(found.cases)} cases, {runs} runs",
        groups=(("", 3), ("makespan, s", 3), ("mean completion time, s", 3), ("mean queuing time, s", 2), ("", 1)),
        header=("policy", "sharing", "runs", *WORLDS * 2, *WORLDS[:2], "GPU busy"),
        rows=tuple(_cells(case, bar) for case in found.cases),
        csv_header=(
            *CASE_COLUMNS,
            *(f"{part}_{figure}" for figure in FIGURES for part in (*PARTS, "deviation_%", "predicted_deviation_%")),
            *BUSY_COLUMNS,
        ),
        csv_rows=tuple(_line(case) for case in found.cases),
        note="Measured: the mean of the runs. Simulated: the simulator knows how long each process took to start in "
        "this run; mean ± standard deviation over draws of the jobs' speeds. Predicted: the simulator knows nothing of "
        "the run and draws start times from other runs. The small line is the deviation from the measured value: blue "
        f"up to the paper's {bar:g} %, ochre up to {2 * bar:g} %, red beyond. GPU busy: the driver's counter, and the "
        "share of time in which kernels of a job run according to the profile.",
    )


def _cells(case: MeasuredCase, bar: float) -> tuple[TableCell, ...]:
    limit = f", up to {case.jobs_per_gpu}" if case.jobs_per_gpu > 1 else ""
    cells = [plain(case.label), plain(case.sharing + limit), plain(case.runs)]
    for figure in (case.makespan, case.jct):
        cells += [plain(show(figure.measured, 1)), _simulated(figure, bar), _predicted(figure, bar)]
    cells += [plain(show(case.queue.measured, 1)), _simulated(case.queue, bar)]
    counted = "–" if case.gpu_busy is None else f"{100 * case.gpu_busy:.0f}"
    return (*cells, plain(f"{counted} / {100 * case.simulated_gpu_busy:.0f} %"))


def _simulated(figure: FigureComparison, bar: float) -> TableCell:
    return judged(f"{show(figure.simulated, 1)} ± {show(figure.spread, 1)}", figure.off, bar)


def _predicted(figure: FigureComparison, bar: float) -> TableCell:
    return judged(show(figure.predicted, 1), figure.predicted_off, bar)


def judged(text: str, off: float | None, bar: float) -> TableCell:
    """Return a cell with a simulated figure, coloured by how far it is from the measured one."""
    if off is None:
        return TableCell(text)
    return TableCell(text, signed(off, 1), "close" if abs(off) <= bar else "off" if abs(off) <= 2 * bar else "far")


def _line(case: MeasuredCase) -> tuple[object, ...]:
    figures: list[object] = []
    for figure in (case.makespan, case.jct, case.queue):
        figures += [figure.measured, figure.simulated, figure.predicted, figure.spread]
        figures += ["" if off is None else f"{off:.6g}" for off in (figure.off, figure.predicted_off)]
    busy = "" if case.gpu_busy is None else case.gpu_busy
    return (case.policy, case.mechanism, case.jobs_per_gpu, case.runs, *figures, busy, case.simulated_gpu_busy)
