"""Cancelling without the journal: on a full disk, the job that fills it must still be stoppable.

If the journal cannot be written, a cancelled job's workers are stopped at once, and the event waits for room. Until it
is in the journal, the job's id is kept in a small file whose blocks were written at the start, so that overwriting it
needs no room: a service that is restarted in between cancels these jobs first. `requests.py` calls `cancel`, the driver
calls `settle` after each turn.
"""

import contextlib
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from carpool.core import events as ev
from carpool.core.model import JobId, Status
from carpool.core.state import State
from carpool.live.executors.base import StopMode
from carpool.live.journal.store import Commit
from carpool.live.service.dispatcher import Dispatcher
from carpool.live.service.inbox import Inbox

CAPACITY = 8192
"""Number of jobs in the file. More can be cancelled, but a restart before there is room forgets them."""
_ID = struct.Struct("<Q")
REASON = "cancelled; the journal learns it when it can be written"


class CancelFile:
    """Ids of cancelled jobs in a file that is overwritten in place."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def prepare(self) -> list[JobId]:
        """Allocate the file, and return the ids that an earlier service left there."""
        ids: list[JobId] = []
        with contextlib.suppress(OSError):
            ids = list(_ids(self._path.read_bytes()[: CAPACITY * _ID.size]))
        self.write(ids)
        return ids

    def write(self, ids: Sequence[JobId]) -> None:
        """Replace the ids; durable on return. A disk that refuses loses nothing but this second record."""
        data = b"".join(_ID.pack(int(job)) for job in ids[:CAPACITY]).ljust(CAPACITY * _ID.size, b"\0")
        with contextlib.suppress(OSError):
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                os.pwrite(descriptor, data, 0)
                os.fdatasync(descriptor)
            finally:
                os.close(descriptor)


def _ids(data: bytes) -> Iterable[JobId]:
    for start in range(0, len(data) - _ID.size + 1, _ID.size):
        (number,) = _ID.unpack_from(data, start)
        if 0 < number < 10**18:
            yield str(number)


@dataclass
class UnwrittenCancels:
    """Jobs that were cancelled and whose cancellation is not in the journal."""

    state: State
    dispatcher: Dispatcher
    inbox: Inbox
    file: CancelFile
    leads: Callable[[], bool] = lambda: True
    """Whether this service leads. If it does not, another one decides about the jobs."""
    jobs: dict[JobId, None] = field(default_factory=dict)

    def resume(self) -> None:
        """Cancel the jobs that an earlier service cancelled and could not write."""
        left = [job for job in self.file.prepare() if job in self.state.jobs]
        if left:
            named = ", ".join(left[:10]) + (f" and {len(left) - 10} more" if len(left) > 10 else "")
            self.inbox.note(f"job {named} was cancelled before the restart, when the journal could not be written")
            self._add(left)

    def cancel(self, jobs: Sequence[JobId]) -> None:
        """Stop the workers of jobs now. The event is written as soon as the journal can be."""
        new = [job for job in jobs if job in self.state.jobs and job not in self.jobs]
        self._add(new)
        for job in new:
            self.dispatcher.drop(job)
            for key in self.dispatcher.gangs_of(job):
                self.dispatcher.executor.stop(key, StopMode.TERMINATE)
        self.file.write(list(self.jobs))

    def _add(self, jobs: Sequence[JobId]) -> None:
        self.jobs.update(dict.fromkeys(jobs))

        def prepare(now: float, commit: Commit) -> Sequence[ev.Event]:
            return [ev.Cancelled(now, job) for job in jobs if job in self.state.jobs]

        self.inbox.add(prepare)

    def settle(self) -> None:
        """Forget the jobs whose cancellation is in the journal and applied. Call it after every turn."""
        if not self.jobs:
            return
        records = ((job, self.state.jobs.get(job)) for job in self.jobs)
        self.jobs = {job: None for job, one in records if one is not None and one.status is not Status.CANCELLING}
        if not self.jobs:
            self.file.write([])
