"""The one definition of a job's fields.

The options of `carpool submit`, the HTTP request, the stored spec, YAML and TOML job files and the columns of workload
files are all derived from the class `Spec` below: one attribute is one field. To add a field, add one line there; to
let the scheduler use it, add an attribute of the same name to `core.model.Job`. The module imports neither click nor
pydantic, so that the simulator and the live service share it.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from enum import Flag, auto
from functools import lru_cache
from typing import Any

from carpool.errors import InputError, nearest
from carpool.field_types import (
    JOB_ID,
    AbsolutePath,
    ArrayIndexes,
    ByteSize,
    CommandLine,
    Duration,
    FieldError,
    FieldType,
    JobIds,
    Label,
    RealNumber,
    Variables,
    WholeNumber,
    YesNo,
    shown,
)
from carpool.notices import NoticeTargets
from carpool.sweeps import SweepValues

MAX_NUMBER = 10**12
"""Largest number of a field: sums of larger times lose their milliseconds."""
PRIORITY = WholeNumber(-(10**6), 10**6)
"""Range of priorities, also of the highest one that an administrator allows a user."""

LIMIT = Duration(1.0, MAX_NUMBER)
"""Range of time limits."""
GROUP_FIELDS: dict[str, FieldType] = {
    "weight": RealNumber(1e-3, 1e6),
    "guarantee": WholeNumber(0, 10**6),
    "cap": WholeNumber(0, 10**6),
    "default_limit_s": LIMIT,
    "max_limit_s": LIMIT,
}
"""What an operator says about a group of users: the fields of `core.model.UserGroup`."""


class Edge(Flag):
    """The places where a job is written down."""

    OPTION = auto()
    """An option of `carpool submit`."""
    FILE = auto()
    """A field of a YAML or TOML job file."""
    REQUEST = auto()
    """A field of the JSON request that submits a job."""
    STORED = auto()
    """A field of the spec that the live service keeps, as JSON."""
    COLUMN = auto()
    """A column of a workload file (CSV); each is an attribute of `core.model.Job`."""


LIVE = Edge.OPTION | Edge.FILE | Edge.REQUEST | Edge.STORED
EVERYWHERE = LIVE | Edge.COLUMN


@dataclass(frozen=True, slots=True, eq=False)
class JobField:
    """One field: its type, its default, and its name on every edge."""

    name: str
    """Name in JSON and in CSV."""
    type: FieldType
    help: str
    edges: Edge = EVERYWHERE
    default: Any = None
    required: bool = False
    """Whether a request must have it."""
    column_required: bool = False
    """Whether a workload file must have it."""
    attribute: str = ""
    """Attribute of `core.model.Job`, where it differs from the name."""
    old_names: tuple[str, ...] = ()
    """Names in JSON that release 0.1 used; they are still read."""
    old_short_names: tuple[str, ...] = ()
    """Names on the command line and in job files that release 0.1 used; they are still read."""
    negated: str = ""
    """Option that says no, for a flag whose default is neither yes nor no."""
    request_type: FieldType | None = None
    """Type in a request, where that differs."""
    default_text: str = ""
    """The default in words, where the value does not explain itself."""

    @property
    def short_name(self) -> str:
        """Name in job files and, with dashes, on the command line: there a value carries its own unit."""
        return self.name.removesuffix("_s")

    @property
    def option(self) -> str:
        return _option(self.short_name)

    @property
    def options(self) -> tuple[str, ...]:
        """All spellings of the option, the present one first."""
        return (self.option, *(_option(name) for name in self.old_short_names))

    @property
    def shown_default(self) -> str:
        """The default for help texts; empty: none worth a word."""
        if self.default_text:
            return self.default_text
        if isinstance(self.default, bool):
            return "true" if self.default else ""
        return f"{self.default:g}" if isinstance(self.default, int | float) else ""


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def job_field(kind: FieldType, help: str, *, default: Any = None, default_factory: Any = None, **more: Any) -> Any:
    """Declare an attribute of `Spec`. `more` are attributes of `JobField`."""
    described = {"type": kind, "help": help, "default": default, **more}
    if default_factory is not None:
        return field(default_factory=default_factory, metadata={"job": described})
    return field(default=MISSING if more.get("required") else default, metadata={"job": described})


@dataclass(frozen=True, slots=True)
class Spec:
    """What a user says about one job; None: not said. Durations are seconds, sizes are bytes."""

    command: tuple[str, ...] = job_field(
        CommandLine(), "Program and its arguments.", required=True, edges=LIVE ^ Edge.OPTION
    )
    directory: str = job_field(
        AbsolutePath(),
        "Working directory of the command.",
        required=True,
        edges=LIVE,
        default_text="the current one; in a job file, that of the file",
    )
    job: str = job_field(Label(), "Id of the job.", default="", edges=Edge.COLUMN, column_required=True, attribute="id")
    submitted_s: float = job_field(
        RealNumber(0.0, MAX_NUMBER),
        "Time of submission, in seconds after the start of the workload.",
        default=0.0,
        edges=Edge.COLUMN,
        column_required=True,
        attribute="submitted",
    )
    name: str = job_field(Label(), "Name that the queue shows.", default="", edges=LIVE)
    model: str | None = job_field(
        Label(), "Name of the training in the profile; see `carpool profiles`.", column_required=True
    )
    gpus: int = job_field(
        WholeNumber(1, 10**6), "Number of GPUs; one worker process runs on each.", default=1, column_required=True
    )
    batch: int = job_field(
        WholeNumber(1, MAX_NUMBER),
        "Samples per GPU per iteration.",
        default=1,
        column_required=True,
        old_short_names=("batch_size",),
    )
    iterations: int | None = job_field(
        WholeNumber(1, MAX_NUMBER), "Full-batch iterations of the whole job.", column_required=True
    )
    duration_s: float | None = job_field(
        Duration(1e-6, MAX_NUMBER),
        "Run time of the whole job alone, such as 45m or 2h; measurements replace it.",
        old_names=("time_s",),
        old_short_names=("time",),
    )
    limit_s: float | None = job_field(
        LIMIT,
        "Longest time that the job may compute, such as 6h; then it saves and ends. Pauses do not count.",
        default_text="that of the group",
    )
    requeue: bool = job_field(
        YesNo(), "At its limit, go back into the queue and go on from the checkpoint.", default=False
    )
    user: str = job_field(Label(), "User that the job belongs to.", default="", edges=Edge.COLUMN)
    group: str = job_field(Label(), "Group whose share of the cluster the job uses.", default="", edges=Edge.COLUMN)
    project: str = job_field(Label(), "Project that `carpool usage` counts the job for.", default="")
    can_shrink: bool | None = job_field(
        YesNo(),
        "Allow the scheduler to split the batch into micro-batches.",
        negated="--no-shrink",
        default_text="as the training library finds; in a workload file: true",
    )
    can_pause: bool = job_field(
        YesNo(),
        "Allow the scheduler to pause the job, which then keeps its memory; its owner always may.",
        default=True,
        negated="--no-pause",
    )
    exclusive: bool = job_field(YesNo(), "Never share a GPU.", default=False)
    max_slowdown: float | None = job_field(
        RealNumber(1.0, MAX_NUMBER), "Share a GPU only if iterations take at most this many times as long."
    )
    priority: int = job_field(PRIORITY, "Priority; jobs with a higher one start first.", default=0)
    after: tuple[str, ...] = job_field(
        JobIds(), "Start only after these jobs have finished successfully, such as 3 or 3,5.", default=()
    )
    retries: int = job_field(
        WholeNumber(0, MAX_NUMBER), "Number of times to start the job again after a failure.", default=0
    )
    elastic: bool = job_field(
        YesNo(),
        "Allow the scheduler to choose the number of GPUs and the batch.",
        default=False,
        edges=Edge.COLUMN,
    )
    can_checkpoint: bool = job_field(
        YesNo(),
        "Allow the scheduler to suspend the job and resume it later.",
        default=True,
        negated="--no-checkpoint",
    )
    env: Mapping[str, str] = job_field(
        Variables(), "Environment variable for the workers.", default_factory=dict, edges=LIVE
    )
    cpus: int | None = job_field(WholeNumber(1, 4096), "CPU cores for each worker.", edges=LIVE)
    memory: int | None = job_field(ByteSize(2**20, 2**50), "Main memory for each worker, such as 16GiB.", edges=LIVE)
    grace_s: float = job_field(
        Duration(0.0, 86_400.0),
        "Time that a stopped worker has to save before it is killed.",
        default=30.0,
        edges=LIVE,
        default_text="30s",
    )
    snapshot: bool = job_field(
        YesNo(),
        "Freeze the working directory: run a copy of it as it is now.",
        default=False,
        edges=LIVE,
        request_type=Label(32, "[0-9a-f]{32}", "the name that POST /v1/snapshots answered with"),
    )
    watch: bool = job_field(
        YesNo(),
        "Count the iterations of a PyTorch script that does not use the training library.",
        default=True,
        edges=LIVE,
        negated="--no-watch",
    )
    terminal: bool = job_field(
        YesNo(),
        "Give the command a terminal, which `carpool attach` reaches: one process that has all GPUs.",
        default=False,
        edges=LIVE,
    )
    idle_s: float | None = job_field(
        Duration(1.0, 30 * 86_400.0),
        "Time without a key or output after which a job with a terminal ends.",
        edges=LIVE,
        default_text="30m",
    )
    notify: Mapping[str, tuple[str, ...]] | None = job_field(
        NoticeTargets(),
        "Send a notice at start, end, failure, limit or slowdown:1.5 to a URL, slack:URL, ntfy:URL or mailto:ADDRESS.",
        edges=LIVE,
    )
    array: str | None = job_field(
        ArrayIndexes(),
        "Submit one job for each index of 0-9 or 1,4,7-8; CARPOOL_ARRAY_INDEX tells a job its own.",
        edges=LIVE ^ Edge.STORED,
    )
    sweep: Mapping[str, tuple[str, ...]] | None = job_field(
        SweepValues(),
        "Submit one job for each combination of values; {NAME} in the command stands for the value.",
        edges=LIVE ^ Edge.STORED,
    )
    array_index: int | None = job_field(WholeNumber(0, 10**9), "Index of the job in its array.", edges=Edge.STORED)
    array_job: str | None = job_field(JOB_ID, "Id of the first job of the array.", edges=Edge.STORED)

    def plain(self) -> dict[str, Any]:
        """Return the spec as the service stores it; fields without a value are left out."""
        stored = ((one, getattr(self, one.name)) for one in FIELDS if Edge.STORED in one.edges)
        return {one.name: one.type.to_json(value) for one, value in stored if value is not None}

    def to_json(self) -> str:
        return json.dumps(self.plain(), separators=(",", ":"), sort_keys=True)

    def for_job(self) -> dict[str, Any]:
        """Return the attributes of `core.model.Job` that a user states when submitting to a service."""
        return {one.attribute or one.name: getattr(self, one.name) for one in SUBMITTED_COLUMNS}


def fields_of(spec: type[Spec]) -> tuple[JobField, ...]:
    """Return the fields that a class declares with `job_field`."""
    return tuple(JobField(one.name, **one.metadata["job"]) for one in fields(spec))


FIELDS = fields_of(Spec)
COLUMNS = tuple(one for one in FIELDS if Edge.COLUMN in one.edges)
SUBMITTED_COLUMNS = tuple(one for one in COLUMNS if Edge.STORED in one.edges)


def on(edge: Edge, among: Iterable[JobField] = FIELDS) -> list[JobField]:
    """Return the fields that exist on an edge."""
    return [one for one in among if edge in one.edges]


def read(
    data: Any, edge: Edge, place: str = "", among: tuple[JobField, ...] = FIELDS, *, required: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the checked values of a mapping by field name. Fields that are null count as not given.

    Raises `InputError` that names the place, the field, the problem and the remedy.
    """
    start = f"{place}: " if place else ""
    if not isinstance(data, Mapping):
        raise InputError(f"{start}must hold the fields of a job, such as `command: python train.py`")
    known = names(edge, among)
    values: dict[str, Any] = {}
    for key, value in data.items():
        one = known.get(key)
        if one is None:
            raise InputError(f"{start}{shown(key)}: no such field; {nearest(str(key), known)}")
        if value is None:
            continue
        if one.name in values:
            raise InputError(f"{start}{key}: {one.name} is given twice, under two names; remove one")
        try:
            values[one.name] = one.type.from_file(value) if edge is Edge.FILE else one.type.check(value)
        except FieldError as error:
            raise InputError(f"{start}{key}: {error}") from None
    for name in required:
        if name not in values:
            raise InputError(f"{start}{name}: is missing; give {next(f for f in among if f.name == name).type.wanted}")
    return values


def request_of(data: Any, place: str = "", among: tuple[JobField, ...] = FIELDS) -> dict[str, Any]:
    """Return the JSON request for the fields of a job as a file has them. `place` is what an error names."""
    values = read(data, Edge.FILE, place, among)
    return {one.name: one.type.to_json(values[one.name]) for one in among if one.name in values}


@lru_cache(maxsize=32)
def names(edge: Edge, among: tuple[JobField, ...] = FIELDS) -> Mapping[str, JobField]:
    """Return the fields of an edge by every name under which it reads them. Kept, because every job is read by it."""
    known: dict[str, JobField] = {}
    for one in on(edge, among):
        short = (one.short_name, *one.old_short_names) if edge is Edge.FILE else ()
        known.update(dict.fromkeys((*short, one.name, *one.old_names), one))
    return known


def field_table(among: Iterable[JobField] = FIELDS) -> str:
    """Return a Markdown table of all fields and what they are called on each edge, for the reference pages.

    Options of the command line have the names of job files, with dashes.
    """
    lines = ["| job file, option | JSON | CSV column | value | meaning |", "| --- | --- | --- | --- | --- |"]
    for one in among:
        if one.edges is Edge.STORED:
            continue
        default = "required" if one.required and not one.default_text else one.shown_default
        cells = [
            f"`{one.short_name}`" if (Edge.FILE | Edge.OPTION) & one.edges else "",
            f"`{one.name}`" if Edge.REQUEST in one.edges else "",
            f"`{one.name}`" if Edge.COLUMN in one.edges else "",
            one.type.wanted
            + (f" ({default})" if default == "required" else f"; default: {default}" if default else ""),
            one.help,
        ]
        lines.append(f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |")
    return "\n".join(lines) + "\n"
