"""The configuration of the reproduction: `paper.toml`, or a changed copy of it, as frozen values.

Reading is strict: an unknown name, a policy that does not exist or a number out of range is an error of one line that
names its place.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import resources
from pathlib import Path

from carpool import policies
from carpool.errors import InputError
from carpool.fields import NotReadable, read_toml_text
from carpool.profile.interference import read_interference
from carpool.report.paper.fields import TomlTable
from carpool.sim import generate
from carpool.sim.run import Setup, cluster_nodes, parse_cluster
from carpool.units import parse_bytes

SHIPPED = "paper.toml"
TABLES = ("III", "IV")


@dataclass(frozen=True, slots=True)
class PolicyEntry:
    """One policy of the report. `paper` is the name of its row in the paper's tables."""

    name: str
    label: str
    spec: str
    paper: str


@dataclass(frozen=True, slots=True)
class WorkloadEntry:
    """One workload: its generator, and the file that is run as well if it exists."""

    name: str
    title: str
    generator: str
    file: str
    file_seeds: tuple[int, ...]
    why: str


@dataclass(frozen=True, slots=True)
class PhysicalConfig:
    """[physical]: the 30 jobs of Table II."""

    setup: Setup
    small_jobs: int
    small_gpus: tuple[int, ...]
    large_jobs: int
    large_gpus: tuple[int, ...]
    iterations: tuple[int, ...]
    policies: tuple[str, ...]
    measured: Path | None
    """File with the figures of a real experiment; see `measured.py`."""
    emulated: Path | None
    """File with the figures of these jobs on emulated GPUs; see `emulated.py`."""


@dataclass(frozen=True, slots=True)
class OverheadConfig:
    """[overhead]: decisions on growing clusters."""

    policy: str
    nodes: tuple[int, ...]
    jobs_per_node: int
    seeds: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BatchNormConfig:
    """[batchnorm]: runs in which the batches of models with BatchNorm are not split."""

    generator: str
    policy: str
    jobs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Figure1Config:
    """[figure1]: two jobs that share one GPU."""

    minutes: tuple[float, ...]
    overlap_after: float
    xi: float


@dataclass(frozen=True, slots=True)
class Figure6bConfig:
    """[figure6b]: constant slow-downs and measured tables."""

    jobs: tuple[int, ...]
    xi: tuple[float, ...]
    tables: tuple[str, ...]
    policies: tuple[str, ...]


Triple = tuple[float, float, float]
"""Values for all jobs, large jobs and small jobs."""


@dataclass(frozen=True)
class PaperNumbers:
    """Numbers that the paper prints. No other numbers of the report are typed."""

    physical: dict[str, tuple[float, float]]
    jct: dict[str, dict[str, Triple]]
    queue: dict[str, dict[str, Triple]]
    claims: dict[str, float]
    wise_xi: tuple[float, float]
    wise_gain: tuple[float, float]


@dataclass(frozen=True)
class PaperConfig:
    """The whole configuration."""

    setup: Setup
    hours: float
    seeds: tuple[int, ...]
    use_files: bool
    """Whether the real files are run as well, if they exist."""
    policies: tuple[PolicyEntry, ...]
    workloads: tuple[WorkloadEntry, ...]
    figure1: Figure1Config
    tables: dict[str, int]
    figure5: int
    figure6a: tuple[int, ...]
    figure6b: Figure6bConfig
    physical: PhysicalConfig
    overhead: OverheadConfig
    batchnorm: BatchNormConfig
    points: float
    equal: float
    paper: PaperNumbers
    text: str
    """Text of the file, for the report and the cache."""

    def policy(self, name: str) -> PolicyEntry:
        """Return the policy with this name."""
        return next(row for row in self.policies if row.name == name)

    @property
    def headline(self) -> WorkloadEntry:
        """Workload on which verdicts are given."""
        return self.workloads[0]


def load(path: Path | None = None, quick: bool = False) -> PaperConfig:
    """Read the shipped configuration or the one at `path`; `quick` keeps the part that [quick] names."""
    file = str(path) if path else SHIPPED
    try:
        text = path.read_text("utf-8") if path else (resources.files(__package__) / SHIPPED).read_text("utf-8")
        values = read_toml_text(text)
    except FileNotFoundError:
        raise InputError(f"{file}: no such file; start from a copy of the shipped {SHIPPED}") from None
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}; give a TOML file") from None
    except UnicodeDecodeError:
        raise InputError(f"{file}: is not a text file in UTF-8; give a TOML file") from None
    except NotReadable as error:
        raise InputError(f"{file}: is not TOML: {error}; fix it") from None
    top = TomlTable(values, file)
    config = _config(top, text)
    quick_part = _quick(top.child("quick"), config)
    top.done()
    return quick_part if quick else config


def _config(top: TomlTable, text: str) -> PaperConfig:
    rows = tuple(_policy(table) for table in top.children("policies"))
    names = [row.name for row in rows]
    for needed in ("tiresias", "tiresias-16", "sjf", "fifo", "pollux", "sjf-ffs", "sjf-bsbf"):
        if needed not in names:
            top.fail("policies", f"none is named {needed!r}, which the paper compares; add it")
    setup, hours = _world(top.child("world"))
    verdict, tables = top.child("verdict"), top.child("tables").child("jobs")
    figure5, figure6a = top.child("figure5"), top.child("figure6a")
    config = PaperConfig(
        setup=setup,
        hours=hours,
        seeds=top.seeds("seeds"),
        use_files=True,
        policies=rows,
        workloads=tuple(_workload(table) for table in top.children("workloads")),
        figure1=_two_jobs(top.child("figure1")),
        tables={name: tables.count(name) for name in TABLES},
        figure5=figure5.count("jobs"),
        figure6a=figure6a.counts("jobs"),
        figure6b=_injected(top.child("figure6b"), names),
        physical=_physical(top.child("physical"), setup, names),
        overhead=_overhead(top.child("overhead"), names),
        batchnorm=_batchnorm(top.child("batchnorm"), names),
        points=verdict.number("points", 0, 100),
        equal=verdict.number("equal", 0, 100),
        paper=_paper(top.child("paper"), {row.paper for row in rows}),
        text=text,
    )
    for table in (verdict, tables, figure5, figure6a):
        table.done()
    return config


def _quick(table: TomlTable, config: PaperConfig) -> PaperConfig:
    part = replace(
        config,
        seeds=table.seeds("seeds"),
        use_files=table.flag("files", True),
        figure6a=table.counts("figure6a"),
        overhead=replace(config.overhead, nodes=table.counts("overhead_nodes"), seeds=table.seeds("seeds")[:1]),
    )
    table.done()
    return part


def _world(table: TomlTable) -> tuple[Setup, float]:
    setup = Setup(
        cluster=_cluster(table),
        profile=table.text("profile"),
        truth=table.checked("interference", read_interference),
        memory_limit=table.flag("memory_limit", True),
        ignore_placement=not table.flag("placement", True),
    )
    cluster_nodes(setup)
    hours = table.number("hours", 0.1, 1e4)
    table.done()
    return setup, hours


def _cluster(table: TomlTable) -> str:
    text = table.text("cluster").replace("×", "x")
    parse_cluster(text)  # nodes of one size only: tables and figures show them as such
    return text


def _policy(table: TomlTable) -> PolicyEntry:
    table.checked("spec", policies.make)
    row = PolicyEntry(*(table.text(key) for key in ("name", "label", "spec", "paper")))
    table.done()
    return row


def _workload(table: TomlTable) -> WorkloadEntry:
    name, title, generator, file = (table.text(key) for key in ("name", "title", "generator", "file"))
    row = WorkloadEntry(name, title, generator, file, table.seeds("file_seeds"), table.text("why"))
    table.among("generator", [row.generator], generate.GENERATORS)
    table.done()
    return row


def _two_jobs(table: TomlTable) -> Figure1Config:
    found = Figure1Config(
        table.positive_numbers("minutes", 2), table.number("overlap_after", 0), table.number("xi", 1, 100)
    )
    if min(found.minutes) <= 0 or found.overlap_after >= found.minutes[0]:
        table.fail("overlap_after", "the second job must join while the first runs; give less than its minutes")
    table.done()
    return found


def _injected(table: TomlTable, names: list[str]) -> Figure6bConfig:
    found = Figure6bConfig(
        table.counts("jobs"),
        table.positive_numbers("xi"),
        table.texts("tables"),
        table.among("policies", table.texts("policies"), names),
    )
    if min(found.xi) < 1:
        table.fail("xi", f"{min(found.xi):g} must be at least 1")
    for text in found.tables:
        try:
            read_interference(text)
        except InputError as error:
            table.fail("tables", str(error))
    table.done()
    return found


def _physical(table: TomlTable, world: Setup, names: list[str]) -> PhysicalConfig:
    setup = replace(
        world,
        cluster=_cluster(table),
        truth=table.checked("interference", read_interference),
        gpu_memory=parse_bytes(table.checked("gpu_memory", parse_bytes)),
        memory_limit=True,
        ignore_placement=False,
    )
    found = PhysicalConfig(
        setup,
        table.count("small_jobs"),
        table.counts("small_gpus"),
        table.count("large_jobs"),
        table.counts("large_gpus"),
        table.counts("iterations", 1, 10**9),
        table.among("policies", table.texts("policies"), names),
        _measured(table.text("measured")) if table.has("measured") else None,
        _measured(table.text("emulated")) if table.has("emulated") else None,
    )
    gpus = sum(len(node.gpus) for node in cluster_nodes(setup))
    if max(found.small_gpus + found.large_gpus) > gpus:
        table.fail("large_gpus", f"the cluster {setup.cluster} has only {gpus} GPUs")
    if len(found.iterations) != 2 or found.iterations[0] > found.iterations[1]:
        table.fail("iterations", "give two numbers, the smallest and the largest")
    table.done()
    return found


def _measured(name: str) -> Path:
    """Return the path of a measured file; a name without a folder is a file that ships with Carpool, if it exists."""
    shipped = Path(__file__).parent / name
    return shipped if Path(name).name == name and shipped.is_file() else Path(name)


def _overhead(table: TomlTable, names: list[str]) -> OverheadConfig:
    found = OverheadConfig(
        table.among("policy", [table.text("policy")], names)[0],
        table.counts("nodes", 4, 4096),
        table.count("jobs_per_node", 1, 1000),
        table.seeds("seeds"),
    )
    table.done()
    return found


def _batchnorm(table: TomlTable, names: list[str]) -> BatchNormConfig:
    found = BatchNormConfig(
        table.among("generator", [table.text("generator")], generate.GENERATORS)[0],
        table.among("policy", [table.text("policy")], names)[0],
        table.counts("jobs"),
    )
    table.done()
    return found


def _paper(table: TomlTable, rows: set[str]) -> PaperNumbers:
    def triples(name: str) -> dict[str, dict[str, Triple]]:
        group = table.child(name)
        found = {key: group.rows(key, lambda child, row: child.positive_numbers(row, 3)) for key in TABLES}
        group.done()
        for key, printed in found.items():
            group.among(key, list(printed), sorted(rows))
        return found

    claims = table.child("claims")
    pair: Callable[[str], tuple[float, ...]] = partial(claims.positive_numbers, length=2)
    (low_xi, high_xi), (low_gain, high_gain) = pair("wise_xi"), pair("wise_gain")
    numbers = PaperNumbers(
        physical=table.rows("physical", lambda child, row: child.positive_numbers(row, 2)),
        jct=triples("jct"),
        queue=triples("queue"),
        claims={key: claims.number(key, 0) for key in CLAIMED},
        wise_xi=(low_xi, high_xi),
        wise_gain=(low_gain, high_gain),
    )
    claims.done()
    table.done()
    return numbers


CLAIMED = (
    "tiresias_physical", "tiresias_simulated", "ffs_physical", "bert_queue_physical",
    "within_hours", "within_share", "others_share", "under_500_share", "shortest_share", "shortest_pollux",
    "pollux_times_480", "ffs_jct_480", "ffs_queue_480", "equal_xi", "overhead_s", "largest_xi", "fidelity",
)  # fmt: skip
"""Names of the numbers in [paper.claims], without the ranges."""
