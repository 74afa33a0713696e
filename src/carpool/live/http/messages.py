"""Requests and answers of the HTTP API as OpenAPI documents them.

The fields of a job come from `carpool.job_schema`: pydantic calls the same checks as every other edge, and only here.
The routes write answers as plain JSON; these models document them, and the tests compare the two.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema, create_model

from carpool.field_types import FieldType
from carpool.job_schema import FIELDS, PRIORITY, Edge, JobField, on

UserName = Annotated[str, Field(pattern=r"^[a-z_][a-z0-9_.-]{0,31}$", max_length=32)]
JobName = Annotated[str, Field(pattern=r"^[0-9]{1,18}$", max_length=18)]
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


class PriorityRequest(Request):
    priority: Priority


class LimitsRequest(Request):
    """What a user may hold at a time; null: no limit."""

    max_jobs: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    max_gpus: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    max_priority: MaxPriority = None


class UserRequest(LimitsRequest):
    name: UserName
    uid: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None


NODE_NAME = r"^[a-z0-9][a-z0-9_.-]{0,62}$"


class NodeRequest(Request):
    name: Annotated[str, Field(pattern=NODE_NAME, max_length=63)]


class NodeChange(Request):
    state: Literal["open", "drained", "lost"]


class ErrorAnswer(Answer):
    error: str
    """One sentence that says what is wrong and what to do."""


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
