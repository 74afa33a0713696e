"""Where jobs are and were: periods in which a job held the same GPUs in the same way.

A `PlaceBook` follows a state and compares what it knows with the records of the jobs that changed. The live service
keeps one of the past, and a forecast one of its simulated future, so that both look alike in a picture.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from carpool.core.model import PAUSE, GpuId, JobId
from carpool.core.record import JobRecord
from carpool.core.state import State

STARTING, RUNNING, PAUSED = "starting", "running", "paused"
MOST = 20_000
"""Number of periods that are kept."""


@dataclass(slots=True)
class Place:
    """A period in which a job held the same GPUs in the same way."""

    job: JobId
    user: str
    gpus: tuple[GpuId, ...]
    kind: str
    """How: `starting`, `running` or `paused`."""
    start: float
    end: float | None = None
    """None: it still does."""

    def row(self) -> dict[str, Any]:
        """Return the period as plain data, for a story."""
        return {"gpus": list(self.gpus), "kind": self.kind, "start": self.start, "end": self.end}


def kind_of(record: JobRecord) -> str:
    """Return how a job holds its GPUs."""
    if record.status in PAUSE:
        return PAUSED
    return STARTING if record.starts_up else RUNNING


class PlaceBook:
    """The periods of all jobs: those that last, and those that are over."""

    def __init__(self, most: int = MOST) -> None:
        self.open: dict[JobId, Place] = {}
        self.over: deque[Place] = deque(maxlen=most)

    def follow(self, state: State, jobs: Iterable[JobId], now: float) -> None:
        """Compare what is known of jobs with the state."""
        for job in jobs:
            record, known = state.jobs.get(job), self.open.get(job)
            gpus = record.gpus if record is not None else ()
            if record is None or not gpus:
                if known is not None:
                    self._close(known, now)
            elif known is None or known.gpus != gpus or known.kind != kind_of(record):
                if known is not None:
                    self._close(known, now)
                self.open[job] = Place(job, record.job.user, gpus, kind_of(record), now)

    def _close(self, place: Place, now: float) -> None:
        del self.open[place.job]
        place.end = now
        if now > place.start:
            self.over.append(place)

    def since(self, at: float) -> list[Place]:
        """Return the periods that lasted beyond a moment."""
        return [*(one for one in self.over if one.end is None or one.end >= at), *self.open.values()]

    def drop_before(self, at: float) -> None:
        """Forget the periods that were over before a moment."""
        while self.over and (self.over[0].end or 0.0) < at:
            self.over.popleft()
