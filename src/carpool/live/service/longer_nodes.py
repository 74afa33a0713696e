"""Jobs that are on hold because no node lasts as long as they need, until one does.

The dispatcher puts them on hold and the keeper of a ground releases them. The journal has the list (a row of its meta
table), written together with the events that hold or release a job, so that the next service releases them as well.
"""

import json
from collections.abc import Iterable, Sequence

from carpool.core import events as ev
from carpool.core.model import JobId, Status
from carpool.core.state import State
from carpool.live.journal.store import Commit
from carpool.live.service.inbox import Inbox

ROW = "needs_longer_nodes"
"""Key of the row in the journal."""
WHY = "no node lasts as long as it needs; it is released when one does"


class LongerNodes:
    """The jobs that need a node which lasts longer, with the seconds that each needs."""

    def __init__(self, state: State, inbox: Inbox, kept: str = "") -> None:
        """`kept`: the row of the journal; a job that is not on hold any more is left out."""
        self._state, self._inbox = state, inbox
        self.needed_s: dict[JobId, float] = {
            job: seconds for job, seconds in _read(kept).items() if job in state.jobs and state.jobs[job].on_hold
        }
        self._attempts: dict[JobId, int] = {}
        """The attempts that did not start."""

    def hold(self, job: JobId, attempt: int, needed_s: float, now: float) -> None:
        """Put a job on hold until a node lasts as long as it needs."""
        self.needed_s[job] = needed_s
        self._attempts[job] = attempt
        self._write(ev.Held(now, job, WHY), ev.Requeued(now, job, attempt))

    def release(self, longest_s: float, now: float) -> None:
        """Release the jobs that a node of `longest_s` seconds is long enough for; forget those that need none."""
        gone = [job for job in self.needed_s if not self._waits(job)]
        fit = [
            job
            for job, needed_s in self.needed_s.items()
            if job not in gone and self._state.jobs[job].on_hold and needed_s <= longest_s
        ]
        for job in (*gone, *fit):
            del self.needed_s[job]
            self._attempts.pop(job, None)
        if gone or fit:
            self._write(*(ev.Released(now, job) for job in fit))

    def _waits(self, job: JobId) -> bool:
        """Return whether a job is on hold, or will be when the events that hold it are applied."""
        record = self._state.jobs.get(job)
        if record is None:
            return False
        return record.on_hold or (record.status is Status.STARTING and record.attempt == self._attempts.get(job))

    def gpus(self) -> Iterable[int]:
        """Return the number of GPUs that each of the jobs needs."""
        return [self._state.jobs[job].job.gpus for job in self.needed_s if job in self._state.jobs]

    def _write(self, *events: ev.Event) -> None:
        def prepare(now: float, commit: Commit) -> Sequence[ev.Event]:
            commit.meta[ROW] = json.dumps(self.needed_s)
            return events

        self._inbox.add(prepare)


def _read(kept: str) -> dict[JobId, float]:
    """Return what a row of the journal says; nothing where it is damaged."""
    try:
        return {str(job): float(seconds) for job, seconds in json.loads(kept or "{}").items()}
    except (ValueError, TypeError, AttributeError, RecursionError):
        return {}
