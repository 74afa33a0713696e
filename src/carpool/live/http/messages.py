"""Requests and answers of the HTTP API as OpenAPI documents them.

The fields of a job come from `carpool.job_schema`: pydantic calls the same checks as every other edge, and only here.
The routes write answers as plain JSON; these models document them, and the tests compare the two.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema, create_model

from carpool.field_types import FieldType
from carpool.job_schema import FIELDS, PRIORITY, Edge, JobField, on

USER_NAME = r"^[a-z_][a-z0-9_.-]{0,31}$"
GROUP_NAME = r"^[a-z0-9_][a-z0-9_.-]{0,31}$"
NODE_NAME = r"^[a-z0-9][a-z0-9_.-]{0,62}$"
JOB_NAME = r"^[0-9]{1,18}$"
PATTERN_WORDS = {
    USER_NAME: "use up to 32 lower-case letters, digits, _, . and -, and begin with a letter or _",
    GROUP_NAME: "use up to 32 lower-case letters, digits, _, . and -, and begin with a letter, a digit or _",
    NODE_NAME: "use up to 63 lower-case letters, digits, _, . and -, and begin with a letter or a digit",
    JOB_NAME: "use the number of a job, such as 12",
}
"""What users read instead of a regular expression."""
UserName = Annotated[str, Field(pattern=USER_NAME, max_length=32)]
JobName = Annotated[str, Field(pattern=JOB_NAME, max_length=18)]
JobStatus = Literal[
    "pending", "starting", "running", "pausing", "paused", "resuming", "stopping", "finished", "failed", "cancelled"
]


class Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Answer(BaseModel):
    model_config = ConfigDict(extra="allow")


def annotation(kind: FieldType, optional: bool = False) -> Any:
    """Return a type that pydantic checks with the field's own reader."""
    check, schema = kind.check, kind.json_schema()
    if optional:
        schema = {"anyOf": [schema, {"type": "null"}]}

    def read(value: Any) -> Any:
        return None if optional and value is None else check(value)

    return Annotated[Any, PlainValidator(read), WithJsonSchema(schema)]


def job_request(among: Sequence[JobField] = FIELDS) -> type[Request]:
    """Return the model of a request that submits a job."""
    declared: dict[str, Any] = {}
    for one in on(Edge.REQUEST, among):
        kind = one.request_type or one.type
        optional = one.request_type is not None or (one.default is None and not one.required)
        default = ... if one.required else None if optional else one.default
        declared[one.name] = (annotation(kind, optional), Field(default, description=one.help))
        for old in one.old_names:
            note = f"Old name of `{one.name}`, still accepted."
            declared[old] = (annotation(kind, True), Field(None, description=note, deprecated=True))
    doc = "One job, or several with `array` or `sweep`."
    return create_model("JobRequest", __base__=Request, __doc__=doc, **declared)


if TYPE_CHECKING:  # the type checker cannot see a model that is made at run time
    Priority = int
    MaxPriority = int | None

    class JobRequest(Request): ...

else:
    Priority = annotation(PRIORITY)
    MaxPriority = annotation(PRIORITY, optional=True)
    JobRequest = job_request()


class JobsRequest(Request):
    jobs: Annotated[list[JobName], Field(min_length=1, max_length=10_000)]


class SignInRequest(Request):
    token: Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[!-~]+$")]


class WhatIfRequest(Request):
    policy: Annotated[str, Field(pattern=r"^[a-z0-9-]{1,40}$", max_length=40)]


Rows = Annotated[int, Field(ge=1, le=10_000)]


class KeysRequest(Request):
    """What a user typed, and how large the window is."""

    typist: Annotated[str, Field(pattern=r"^[0-9a-f]{8,64}$", max_length=64)]
    """Random name of the client."""
    number: Annotated[int, Field(ge=0, le=10**15)]
    """Number of this request, larger than that of the one before. One that was taken is not taken again."""
    data: Annotated[str, Field(max_length=65_536)] = ""
    """Bytes as base64."""
    rows: Rows | None = None
    columns: Rows | None = None
    ends: bool = False
    """Nothing more follows, for a command without a terminal."""


class CommandRequest(Request):
    """A command to run beside a worker; with rows and columns it gets a terminal."""

    command: Annotated[list[Annotated[str, Field(max_length=131_072)]], Field(min_length=1, max_length=10_000)]
    rows: Rows | None = None
    columns: Rows | None = None


class PriorityRequest(Request):
    priority: Priority


class LimitsRequest(Request):
    """What a user may hold at a time; null: no limit."""

    max_jobs: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    max_gpus: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    max_priority: MaxPriority = None


GroupName = Annotated[str, Field(pattern=GROUP_NAME, max_length=32)]


class MembershipRequest(Request):
    group: GroupName | None
    """null: the user is in no group."""


LimitSeconds = Annotated[float, Field(ge=1.0, le=1e12)]


class GroupRequest(Request):
    """What the operator says about a group; fields that are left out stay as they are."""

    weight: Annotated[float, Field(ge=1e-3, le=1e6)] = 1.0
    guarantee: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    cap: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    default_limit_s: LimitSeconds | None = None
    max_limit_s: LimitSeconds | None = None


GpuNames = Annotated[str, Field(max_length=1000)]
Moment = Annotated[float, Field(ge=0.0, le=1e11)]


class DrainRequest(Request):
    gpus: GpuNames
    """A node or its GPUs, such as node0, node0:1 or node0:1,node1."""
    at: Moment | None = None
    """When it begins, in seconds since 1970; null: now, and jobs that are there run to their ends."""


class ReservationRequest(Request):
    gpus: GpuNames
    """Nodes or GPUs, such as node0,node1:0-3, or a number of GPUs, of which the service chooses the best."""
    group: GroupName
    start: Moment
    end: Moment


class FairShareRequest(Request):
    strength: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    half_life_s: Annotated[float, Field(ge=1.0, le=1e10)] = 86_400.0


class UserRequest(LimitsRequest):
    name: UserName
    group: GroupName | None = None
    uid: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None


class NodeRequest(Request):
    name: Annotated[str, Field(pattern=NODE_NAME, max_length=63)]


class NodeChange(Request):
    state: Literal["open", "drained", "lost"]


class LeftCheckpoint(Request):
    why: Annotated[str, Field(min_length=1, max_length=500)]


class ErrorAnswer(Answer):
    error: str
    """One sentence that says what is wrong and what to do."""


class TypedAnswer(Answer):
    taken: bool
    """Whether there was room for what was typed; false: send it again later."""


class HealthAnswer(Answer):
    status: Literal["ok"]


class SubmitAnswer(Answer):
    job: str
    """Id of the first job."""
    jobs: list[str]


class JobRow(Answer):
    job: str
    name: str
    user: str
    status: JobStatus
    gpus: int
    submitted: float
    started: float | None
    finished: float | None
    exit_code: int | None


class JobPage(Answer):
    jobs: list[JobRow]
    next: str | None
    """Value of `before` for the next page; null: this is the last page."""


class JobStatusAnswer(Answer):
    job: str
    status: JobStatus


class WaitAnswer(JobStatusAnswer):
    name: str
    exit_code: int | None
    reason: str


class ExplainAnswer(Answer):
    job: str
    status: JobStatus
    sentences: list[str]


class CodeSnapshotAnswer(Answer):
    snapshot: str
    """Value of the field `snapshot` of the request that submits the job."""


class UserAnswer(Answer):
    name: str
    role: Literal["admin", "user"]
    uid: int | None
    max_jobs: int | None
    max_gpus: int | None
    revoked: bool


class GroupAnswer(Answer):
    name: str
    weight: float
    guarantee: int
    cap: int | None
    default_limit_s: float | None
    """Time limit of jobs that name none; null: the maximum, or none."""
    max_limit_s: float | None
    users: list[str]
    jobs: int
    gpus: int
    used_gpu_s: float | None
    """Decayed GPU-seconds; null where neither shares nor guarantees nor caps count."""
    of_share: float | None
    """Its usage relative to its share among the groups that have jobs; null: it has none, or shares do not count."""


class ClosureAnswer(Answer):
    name: str
    kind: str
    on: list[str]
    group: str | None
    start: float
    end: float | None
    begun: bool
    jobs: list[str]


class ClosureList(Answer):
    closures: list[ClosureAnswer]


class FairShareAnswer(Answer):
    strength: float
    half_life_s: float


class GroupList(Answer):
    groups: list[GroupAnswer]
    fair_share: FairShareAnswer


class UsageRow(Answer):
    """GPU-seconds that some jobs used, and how many of them ended. It also has the keys that the request asked for."""

    held_gpu_s: float
    """Their parts of the GPUs that they held."""
    computed_gpu_s: float
    shared_gpu_s: float
    paused_gpu_s: float
    lost_gpu_s: float
    saved_gpu_s: float | None
    """null: jobs shared, and none of them was measured alone."""
    judged_gpu_s: float
    """Held while sharing, as far as `saved_gpu_s` counts it."""
    unjudged_gpu_s: float
    """Held while sharing, where no time alone was measured."""
    jobs: int
    failed: int


class UsageGpus(Answer):
    """GPU-seconds of the cluster: what existed is what jobs held, what was idle and what was closed."""

    existed_gpu_s: float
    idle_gpu_s: float
    closed_gpu_s: float
    away_gpu_s: float
    """GPUs of nodes that had been part of the cluster before and were not; no part of what existed."""


class UsageAnswer(Answer):
    by: list[Literal["user", "group", "project", "day"]]
    since: str | None
    until: str | None
    counted_since: float
    """When counting began."""
    now: float
    rows: list[UsageRow]
    total: UsageRow
    gpus: UsageGpus


class UserList(Answer):
    users: list[UserAnswer]


class NewUserAnswer(UserAnswer):
    token: str
    """The user's token. It cannot be shown again: only its hash is kept."""
    warning: str
    """Why jobs of this user could not run; empty: nothing is known to be wrong."""


class MeAnswer(Answer):
    name: str
    admin: bool


class ServiceInfo(Answer):
    version: str
    policy: str
    policy_failure: str
    """How the policy failed lately, and what decides instead; empty: it did not."""
    journal_problem: str
    """Why the journal cannot be written, so that jobs and changes are refused; empty: it can."""
    jobs_per_gpu: int
    as_root: bool
    started: float


class RefusedChange(Answer):
    job: str
    error: str


class ChangesAnswer(Answer):
    jobs: list[JobStatusAnswer]
    refused: list[RefusedChange]


class PrunedAnswer(Answer):
    job: str
    bytes: int
    """Size of the files that were removed."""


class HistoryPage(Answer):
    jobs: list[dict[str, Any]]
    next: str | None


class WorkloadAnswer(Answer):
    jobs: list[dict[str, Any]]


class PolicyRow(Answer):
    name: str
    summary: str


class PolicyList(Answer):
    policies: list[PolicyRow]
