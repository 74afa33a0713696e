"""How long an owner's pause of a plain gang may last: the service ends it, with a note.

The workers of a job with several GPUs wait for each other in collective operations, which give up after some minutes.
With the training library they are paused between two steps, where nothing waits. Without it they may be paused within
one, so such a gang goes on after a while.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from carpool.core import events as ev
from carpool.core.record import JobRecord
from carpool.core.state import State
from carpool.live.clock import Clock
from carpool.live.executors.base import Executor
from carpool.live.journal.store import Commit
from carpool.live.service.inbox import Inbox
from carpool.live.text import span

EVERY_S = 1.0


@dataclass
class PauseLimit:
    """Resumes plain gangs that their owners paused too long ago."""

    state: State
    executor: Executor
    inbox: Inbox
    clock: Clock
    limit_s: float

    async def run(self) -> None:
        while True:
            await asyncio.sleep(min(EVERY_S, self.limit_s))
            self.look()

    def look(self) -> None:
        for record in self.state.paused.values():
            if self._is_over(record, self.clock.now()):
                self._end(record)

    def _is_over(self, record: JobRecord, now: float) -> bool:
        if len(record.gpus) < 2 or not record.paused_by_owner or now - record.paused_since < self.limit_s:
            return False
        report = self.executor.report((record.job.id, record.attempt))
        return report is None or not report.can_stand

    def _end(self, record: JobRecord) -> None:
        job = record.job.id

        def prepare(now: float, commit: Commit) -> Sequence[ev.Event]:
            return (ev.ResumedByOwner(now, job),) if self._is_over(record, now) else ()

        self.inbox.note(
            f"job {job}: goes on after {span(self.limit_s)}, because its workers may wait for each other and give up; "
            "with the training library it can be paused for any time"
        )
        self.inbox.add(prepare)
