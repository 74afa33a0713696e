"""Cancelling without the journal: on a full disk, the job that fills it must still be stoppable.

If the journal cannot be written, a cancelled job's workers are stopped at once, and the event waits for room. Until it
is in the journal, the job's id and the moment are kept in a small file whose blocks were written at the start, so that
overwriting it needs no room: a service that is restarted in between cancels these jobs first. `requests.py` calls
`cancel`, the driver calls `settle` after each turn.
"""

import contextlib
import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
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
_ID, _TIME = struct.Struct("<Q"), struct.Struct("<d")
REASON = "cancelled; the journal records it when it can be written"


class CancelFile:
    """Ids of cancelled jobs in a file that is overwritten in place, and after all ids the times of the service's clock,
    which files of earlier releases lack."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def prepare(self) -> dict[JobId, float]:
        """Allocate the file, and return the ids and times that an earlier service left there; infinite: not known."""
        jobs: dict[JobId, float] = {}
        with contextlib.suppress(OSError):
            jobs = dict(_entries(self._path.read_bytes()[: CAPACITY * (_ID.size + _TIME.size)]))
        self.write(jobs)
        return jobs

    def write(self, jobs: Mapping[JobId, float]) -> None:
        """Replace the entries; durable on return. If the disk refuses, only this second record is lost."""
        kept = list(jobs.items())[:CAPACITY]
        data = b"".join(_ID.pack(int(job)) for job, _ in kept).ljust(CAPACITY * _ID.size, b"\0")
        data += b"".join(_TIME.pack(at) for _, at in kept).ljust(CAPACITY * _TIME.size, b"\0")
        with contextlib.suppress(OSError):
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                os.pwrite(descriptor, data, 0)
                os.fdatasync(descriptor)
            finally:
                os.close(descriptor)


def _entries(data: bytes) -> Iterable[tuple[JobId, float]]:
    ids, times = data[: CAPACITY * _ID.size], data[CAPACITY * _ID.size :]
    for start in range(0, len(ids) - _ID.size + 1, _ID.size):
        (number,) = _ID.unpack_from(ids, start)
        at = _TIME.unpack_from(times, start)[0] if start + _TIME.size <= len(times) else 0.0
        if 0 < number < 10**18:
            yield str(number), at if at > 0.0 else inf


@dataclass
class UnwrittenCancels:
    """Jobs that were cancelled and whose cancellation is not in the journal."""

    state: State
    dispatcher: Dispatcher
    inbox: Inbox
    file: CancelFile
    leads: Callable[[], bool] = lambda: True
    """Whether this service leads. If it does not, another one decides about the jobs."""
    jobs: dict[JobId, float] = field(default_factory=dict)
    """The jobs, and when they were cancelled: that is when they end, not when the event is in the journal."""

    def resume(self) -> None:
        """Cancel the jobs that an earlier service cancelled and could not write."""
        left = {job: at for job, at in self.file.prepare().items() if job in self.state.jobs}
        if left:
            named = ", ".join(list(left)[:10]) + (f" and {len(left) - 10} more" if len(left) > 10 else "")
            self.inbox.note(f"job {named} was cancelled before the restart, when the journal could not be written")
            self._add(left)

    def cancel(self, jobs: Sequence[JobId]) -> None:
        """Stop the workers of jobs now. The event is written as soon as the journal can be."""
        new = [job for job in jobs if job in self.state.jobs and job not in self.jobs]
        self._add(dict.fromkeys(new, self.inbox.clock.now()))
        for job in new:
            self.dispatcher.drop(job)
            for key in self.dispatcher.gangs_of(job):
                self.dispatcher.executor.stop(key, StopMode.TERMINATE)
        self.file.write(self.jobs)

    def _add(self, jobs: Mapping[JobId, float]) -> None:
        self.jobs.update(jobs)

        def prepare(now: float, commit: Commit) -> Sequence[ev.Event]:
            first = self.state.now  # time never goes back
            return [ev.Cancelled(min(now, max(first, at)), job) for job, at in jobs.items() if job in self.state.jobs]

        self.inbox.add(prepare)

    def settle(self) -> None:
        """Forget the jobs whose cancellation is in the journal and applied. Call it after every turn."""
        if not self.jobs:
            return
        records = ((job, at, self.state.jobs.get(job)) for job, at in self.jobs.items())
        self.jobs = {job: at for job, at, one in records if one is not None and one.status is not Status.CANCELLING}
        if not self.jobs:
            self.file.write({})
