"""The live service: `Scheduler.step` with a real clock, a journal on disk and an executor of real processes.

One asyncio process. What happens comes in as events (submits, reports, exits); they are durable in the journal before
anything is done about them. The HTTP API calls the methods of `Service`; who may call which is decided there, not here.
All results are plain lists and dictionaries, ready for JSON.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from carpool.core.model import Limits
from carpool.live.home import Home
from carpool.live.spec import Spec

Row = dict[str, Any]


class Service:
    def __init__(
        self,
        home: Home,
        policy: str = "sjf-bsbf",
        *,
        gpus: int | None = None,
        jobs_per_gpu: int = 2,
    ) -> None:
        """`gpus`: so many logical slots; None: the GPUs that NVML finds."""

    async def start(self) -> None:
        """Take the home, read the journal, find the workers that still run. Raises `InputError` where that fails."""

    async def run(self) -> None:
        """Schedule until `stop` is called."""

    async def stop(self) -> None:
        """Leave; the workers go on and are found again by the next start."""

    # ---- changing --------------------------------------------------------------------------------------------------

    async def submit(self, specs: Sequence[Spec], user: str) -> list[str]:
        """The new jobs' ids, durable on return. All or none: raises `InputError` for what could never run."""
        raise NotImplementedError

    async def cancel(self, job: str) -> None: ...

    async def hold(self, job: str) -> None:
        """Keep a waiting job from starting until `release`."""

    async def release(self, job: str) -> None: ...

    async def requeue(self, job: str) -> None:
        """Stop a running job (it saves first) and put it back into the queue."""

    async def set_priority(self, job: str, priority: int) -> None: ...

    async def set_limits(self, user: str, limits: Limits) -> None:
        """`user` "" stands for everybody without limits of their own."""

    # ---- reading ---------------------------------------------------------------------------------------------------

    def dry_run(self, spec: Spec, user: str) -> Row:
        """What would happen: `where` (GPUs or None), `mates`, `start` and `end` estimates with a range and source."""
        raise NotImplementedError

    def jobs(self, all: bool = False, *, limit: int | None = None, before: str | None = None) -> list[Row]:
        """Jobs in order of submission; those that ended only with `all`, the last `limit` of them before a job id.

        Keys: job, name, user, state, gpus, submitted, started, finished, exit_code, and reason, priority, held,
        model, attempt, progress (0 to 1), on (GPUs as node:index), mates.
        """
        raise NotImplementedError

    def show(self, job: str) -> Row:
        """All that is known: the keys of `jobs`, and spec (with env: leave it out for other users), attempts with
        their ranks, receipt, estimates with their source."""
        raise NotImplementedError

    def owner(self, job: str) -> str:
        """Whose job it is; raises `NoSuchJob`."""
        raise NotImplementedError

    def explain(self, job: str) -> Row:
        """position, reason, mates with predicted and measured slow-down of both, start and end with a range."""
        raise NotImplementedError

    def gpus(self) -> Row:
        """nodes → GPUs with their residents, memory, foreign memory; `mechanism`: mps, time-slicing or logical."""
        raise NotImplementedError

    def log_file(self, job: str, rank: int = 0, stream: str = "stdout", attempt: int | None = None) -> Path:
        """The file a worker writes to; `stream` is stdout or stderr. It may not exist yet."""
        raise NotImplementedError

    def history(self, *, limit: int = 100, before: str | None = None, user: str | None = None) -> list[Row]:
        """Ended jobs, the latest first, with their receipts."""
        raise NotImplementedError

    def accuracy(self) -> Row:
        """How right the estimates were."""
        raise NotImplementedError

    def workload(self) -> list[Row]:
        """The jobs of the history as the simulator wants them, for `carpool replay`."""
        raise NotImplementedError

    async def wait(self, job: str) -> str:
        """The job's state once it has ended: finished, failed or cancelled."""
        raise NotImplementedError

    # ---- users: rows only; tokens and rights are auth.py's business ------------------------------------------------

    async def put_user(self, name: str, row: Mapping[str, Any]) -> None:
        """Keep a user's row: `token_hash`, `role`, `uid`, `revoked` and whatever else auth.py wants (JSON)."""

    def users(self) -> dict[str, Row]:
        raise NotImplementedError
