"""What the dashboard draws of the past: the places of jobs during the last hour, and each job's speed over time.

The recorder is called after every turn of the driver. What it has recorded of a job goes into the job's story at its
end, so that a restart loses only the earlier part of jobs that still run.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from carpool.core import events as ev
from carpool.core.model import GpuId, JobId, Status
from carpool.core.record import JobRecord
from carpool.core.state import State
from carpool.live.insight.event_views import jobs_of
from carpool.live.insight.places import RUNNING, Place, PlaceBook, kind_of
from carpool.live.insight.views import progress, read_stories
from carpool.live.service.turns import TurnDone

KEPT_S = 3900.0
"""Seconds for which places are kept: a little more than the hour that is shown."""
MOST_POINTS, POINTS_IN_STORY = 240, 60
"""Number of points of a job's trace while it runs, and in its story; beyond it, every second one is dropped."""
MOST_PLACES_IN_STORY = 100
NODES = (ev.NodeJoined, ev.NodeLost)
POINTS = (ev.Started, ev.Computing, ev.Observed, ev.Progressed, ev.Paused, ev.Resumed, ev.Planned)
"""Events at which a point is added to the traces of the jobs that they are about."""


@dataclass(frozen=True, slots=True)
class TracePoint:
    """How far a job is and how fast, at one moment."""

    at: float
    progress: float
    slowdown: float | None
    """ξ as measured or believed; None: it does not compute."""
    measured: bool

    def row(self) -> list[Any]:
        slow = None if self.slowdown is None else round(self.slowdown, 3)
        return [round(self.at, 2), round(self.progress, 5), slow, self.measured]


class Recorder:
    """Places and traces of jobs."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.places = PlaceBook()
        self._traces: dict[JobId, list[TracePoint]] = {}
        self._own: dict[JobId, list[Place]] = {}
        """Places of jobs that have not ended, for their stories."""
        self.places.follow(state, list(state.jobs), state.now)
        for place in self.places.open.values():
            place.start = min(place.start, state.jobs[place.job].gpus_since)

    def load(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Take over the places in the stories of jobs that ended before this service began."""
        found = []
        for story in read_stories(rows, whole=True):
            for one in story.get("places", ()):
                user, job = str(story["user"]), str(story["job"])
                found.append(Place(job, user, tuple(one["gpus"]), one["kind"], one["start"], one["end"]))
        for place in sorted(found, key=lambda place: place.end or 0.0):
            self.places.over.append(place)

    def turned(self, turn: TurnDone) -> None:
        events = [*turn.events, turn.planned] if turn.planned is not None else turn.events
        touched = {job for event in events for job in jobs_of(event)}
        if any(isinstance(event, NODES) for event in events):
            touched.update(self.places.open)
        before = {job: self.places.open.get(job) for job in touched}
        self.places.follow(self._state, touched, turn.now)
        for job, place in before.items():
            if place is not None and place.end is not None:
                self._own.setdefault(job, []).append(place)
        self.places.drop_before(turn.now - KEPT_S)
        for job in {job for event in events if isinstance(event, POINTS) for job in jobs_of(event)}:
            self._add_point(job, turn.now)
        for ended in turn.ended:
            self._traces.pop(ended.id, None)
            self._own.pop(ended.id, None)

    def _add_point(self, job: JobId, now: float) -> None:
        record = self._state.jobs.get(job)
        if record is None or not record.gpus:
            return
        trace = self._traces.setdefault(job, [])
        trace.append(_point(record, now))
        if len(trace) > MOST_POINTS:
            self._traces[job] = _thinned(trace)

    def trace(self, job: JobId, now: float) -> list[TracePoint]:
        """Return the trace of a job that has not ended, up to now."""
        record = self._state.jobs.get(job)
        known = self._traces.get(job, [])
        return [*known, _point(record, now)] if record is not None and record.gpus else known

    def places_of(self, job: JobId, labels: Mapping[GpuId, str]) -> list[dict[str, Any]]:
        """Return where a job that has not ended was and is."""
        last = [self.places.open[job]] if job in self.places.open else []
        places = [*self._own.get(job, ()), *last]
        return [{**one.row(), "on": [labels.get(gpu, f"GPU {gpu}") for gpu in one.gpus]} for one in places]

    def story(self, record: JobRecord) -> dict[str, Any]:
        """Return what is kept of an ended job."""
        job = record.job.id
        last = [self.places.open[job]] if job in self.places.open else []
        places = [{**one.row(), "end": one.end or record.ended} for one in [*self._own.get(job, ()), *last]]
        points = self._traces.get(job, [])
        if points:
            done = 1.0 if record.status is Status.FINISHED else points[-1].progress
            points = [*points, TracePoint(record.ended, done, points[-1].slowdown, points[-1].measured)]
        while len(points) > POINTS_IN_STORY:
            points = _thinned(points)
        return {"places": places[-MOST_PLACES_IN_STORY:], "trace": [one.row() for one in points]}


def _point(record: JobRecord, now: float) -> TracePoint:
    slow = record.iteration_s / record.alone_iteration_s if record.iteration_s and kind_of(record) == RUNNING else None
    return TracePoint(now, progress(record, None, now), slow, record.pace_seen)


def _thinned(points: list[TracePoint]) -> list[TracePoint]:
    """Return every second point, and the last one."""
    return points[:-1:2] + points[-1:]
