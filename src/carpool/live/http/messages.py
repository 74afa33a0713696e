"""The words of the HTTP API as OpenAPI shows them: what a request may hold and what an answer looks like.

Requests are checked here for type, range and unknown fields, then by `spec.parse`, which has the last word. Answers are
written as plain JSON by the routes; these models document them and let the tests compare the two.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from carpool.live import spec

Word = Annotated[str, Field(max_length=200)]
JobId = Annotated[str, Field(pattern=r"^[0-9]{1,18}$", max_length=18)]
UserName = Annotated[str, Field(pattern=r"^[a-z_][a-z0-9_.-]{0,31}$", max_length=32)]
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=200)]
Text = Annotated[str, Field(max_length=spec.MOST_TEXT)]
State = Literal["pending", "starting", "running", "stopping", "finished", "failed", "cancelled"]


class Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Answer(BaseModel):
    model_config = ConfigDict(extra="allow")


class JobRequest(Request):
    """One job, or with `array` several that differ in their index."""

    command: Annotated[list[Text], Field(min_length=1, max_length=spec.MOST_WORDS)]
    directory: Annotated[str, Field(pattern=r"^/", max_length=4096)]
    gpus: Annotated[int, Field(ge=1, le=spec.MOST_GPUS)] = 1
    batch: Annotated[int, Field(ge=1, le=spec.MOST_BATCH)] = 1
    iterations: Annotated[int, Field(ge=1, le=spec.MOST_ITERATIONS)] | None = None
    model: Word | None = None
    name: Word = ""
    env: dict[Variable, Text] = {}
    time_s: Annotated[float, Field(ge=0.001, le=spec.MOST_SECONDS, allow_inf_nan=False)] | None = None
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    exclusive: bool = False
    max_slowdown: Annotated[float, Field(ge=1, le=1000, allow_inf_nan=False)] | None = None
    after: Annotated[list[JobId], Field(max_length=1000)] = []
    retries: Annotated[int, Field(ge=0, le=1000)] = 0
    can_shrink: bool | None = None
    cpus: Annotated[int, Field(ge=1, le=4096)] | None = None
    memory: Annotated[int, Field(ge=2**20, le=2**50)] | None = None
    grace_s: Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False)] = 30.0
    array: Annotated[str, Field(max_length=1000)] | None = None
    """Indexes such as 0-9 or 1,4,7-8."""
    snapshot: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$", max_length=32)] | None = None
    """The name that `POST /v1/snapshots` gave an uploaded directory."""


class PriorityRequest(Request):
    priority: Annotated[int, Field(ge=-1000, le=1000)]


class LimitsRequest(Request):
    """None: no limit."""

    max_jobs: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    max_gpus: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    max_priority: Annotated[int, Field(ge=-1000, le=1000)] | None = None


class UserRequest(LimitsRequest):
    name: UserName
    uid: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None


class Problem(Answer):
    error: str
    """One sentence: what is wrong, and what to do."""


class Health(Answer):
    status: Literal["ok"]


class Submitted(Answer):
    job: str
    """The first one."""
    jobs: list[str]


class JobRow(Answer):
    job: str
    name: str
    user: str
    state: State
    gpus: int
    submitted: float
    started: float | None
    finished: float | None
    exit_code: int | None


class Jobs(Answer):
    jobs: list[JobRow]
    next: str | None
    """Ask again with `before` set to it; None: that was all."""


class JobState(Answer):
    job: str
    state: State


class Explanation(Answer):
    job: str
    state: State
    sentences: list[str]


class Snapshot(Answer):
    snapshot: str


class User(Answer):
    name: str
    role: Literal["admin", "user"]
    uid: int | None
    max_jobs: int | None
    max_gpus: int | None
    revoked: bool


class Users(Answer):
    users: list[User]


class NewUser(User):
    token: str
    """Shown this once; only its hash is kept."""


class Me(Answer):
    name: str
    admin: bool


class Status(Answer):
    version: str
    policy: str
    jobs_per_gpu: int
    as_root: bool
    started: float


class History(Answer):
    jobs: list[dict[str, Any]]
    next: str | None


class Workload(Answer):
    jobs: list[dict[str, Any]]
