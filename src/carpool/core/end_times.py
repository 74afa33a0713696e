"""When the running jobs will end, and when their GPUs will be free.

A job that shares speeds up as its mates end; each mate is taken to end at its present pace. A paused job goes on once
the jobs that compute on its GPUs, and paused jobs there with less left, have ended. The state marks the jobs
that an event touched, and `refresh` predicts the ends of those and of their mates again. A prediction follows from the
records alone, not from the time at which it is made, so a replayed journal gives the same predictions. `State` creates
the index when a policy first uses it.
"""

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush

from carpool.core.availability import Availability, Until, corrected, finish
from carpool.core.cluster import Cluster
from carpool.core.model import Status
from carpool.core.perf import PerformanceModel
from carpool.core.record import JobRecord
from carpool.core.sorted_jobs import SortedJobs
from carpool.core.view import JobView

NOTHING: dict[float, int] = {}


class EndTimes:
    """The index of predicted ends."""

    def __init__(self, cluster: Cluster, perf: PerformanceModel, holders: Mapping[int, JobRecord]) -> None:
        self.cluster = cluster
        self._holders = holders
        self.perf = perf
        self.ends: dict[int, float] = {}
        """The predicted end of every job that holds GPUs, by `seq`."""
        self._lent = Availability()
        self._freed: dict[int, dict[float, int]] = {}  # number of GPUs by time, by the first resident of these GPUs
        self._touched: dict[int, JobRecord] = {}
        self._running: RunningJobs | None = None
        self._soonest: SortedJobs | None = None

    def touch(self, record: JobRecord) -> None:
        """Note that a job or its mates changed."""
        self._touched[record.seq] = record

    def refresh(self) -> "EndTimes":
        """Predict the ends of the jobs that were touched."""
        if not self._touched:
            return self
        touched = self._with_mates(self._touched)
        self._touched = {}
        self._predict(touched)
        self._note_freed(touched)
        if self._running is not None:
            for record in touched.values():
                self._running.update(record, self.cluster, self.ends)
        if self._soonest is not None:
            for seq, record in touched.items():
                self._soonest.put(record, self.ends.get(seq))
        return self

    def _predict(self, touched: dict[int, JobRecord]) -> None:
        """Predict the ends of these jobs, and add the paused jobs whose ends move with them."""
        paused = []
        for seq, record in touched.items():
            if not record.gpus:
                self.ends.pop(seq, None)
            elif record.active:
                end = self._end(record)
                if len(record.gpus) > 1 and end != self.ends.get(seq):  # its paused mates may be on other GPUs
                    paused += [mate for mate in self.cluster.mates(record) if not mate.active]
                self.ends[seq] = end
            else:
                paused.append(record)
        if paused:
            touched.update(self._predict_paused(paused))

    def _note_freed(self, touched: dict[int, JobRecord]) -> None:
        """Note when the GPUs of these jobs become free."""
        lent = self._lent
        for seq, record in self._with_first(touched).items():
            before = self._freed.pop(seq, NOTHING)
            after = self._first_on(record)
            if after:
                self._freed[seq] = after
            if after != before:
                for moment, gpus in before.items():
                    lent.remove(moment, gpus)
                for moment, gpus in after.items():
                    lent.add(moment, gpus)

    @property
    def running(self) -> Mapping[tuple[int, int], Sequence[tuple[float, int, JobRecord]]]:
        """The jobs that compute, by their number of GPUs and of mates. Kept up to date from the first use on."""
        if self._running is None:
            self._running = RunningJobs()
            for seq in self.ends:
                self._running.update(self._holders[seq], self.cluster, self.ends)
        return self._running.groups

    @property
    def soonest_first(self) -> Sequence[tuple[float, int, JobRecord]]:
        """The jobs that hold GPUs, by predicted end. Kept up to date from the first use on."""
        if self._soonest is None:
            self._soonest = SortedJobs()
            for seq, end in self.ends.items():
                self._soonest.put(self._holders[seq], end)
        return self._soonest.entries

    @property
    def lent(self) -> Availability:
        """The times at which the GPUs that hold jobs become free. Copy it to change it."""
        return self._lent

    def _with_mates(self, records: dict[int, JobRecord]) -> dict[int, JobRecord]:
        found = dict(records)
        for record in records.values():
            if record.gpus:
                for mate in self.cluster.mates(record):
                    found[mate.seq] = mate
        return found

    def _predict_paused(self, paused: list[JobRecord]) -> dict[int, JobRecord]:
        """Predict the ends of paused jobs and of the paused jobs that go on after them. Return all whose end moved."""
        ends, moved = self.ends, {}
        ahead = [(*_turn(record), record) for record in paused]
        heapify(ahead)
        while ahead:
            left, seq, record = heappop(ahead)
            if seq in moved:
                continue
            mates = self.cluster.mates(record)
            before = [ends[mate.seq] for mate in mates if mate.active or _turn(mate) < (left, seq)]
            end = max([_ready(record), *before]) + left
            if end != ends.get(seq):
                ends[seq] = end
                moved[seq] = record
                for mate in mates:
                    if not mate.active and _turn(mate) > (left, seq):
                        heappush(ahead, (*_turn(mate), mate))
        return moved

    def _with_first(self, records: dict[int, JobRecord]) -> dict[int, JobRecord]:
        """Return these jobs and the first residents of their GPUs."""
        residents, found = self.cluster.residents, dict(records)
        for record in records.values():
            for gpu in record.gpus:
                first = residents[gpu][0]
                found[first.seq] = first
        return found

    def _first_on(self, record: JobRecord) -> dict[float, int]:
        """Return the GPUs whose first resident is this job: their number, by the time at which they become free."""
        residents, ends = self.cluster.residents, self.ends
        counts: dict[float, int] = {}
        for gpu in record.gpus:
            there = residents[gpu]
            if there[0] is record:
                moment = ends[record.seq] if len(there) == 1 else max([ends[other.seq] for other in there])
                counts[moment] = counts.get(moment, 0) + 1
        return counts

    def _end(self, record: JobRecord) -> float:
        if record.status is not Status.RUNNING or record.warming_up:  # as if it ran alone, once it computes
            since = record.gpus_since + record.startup_s if record.paused_since < 0.0 else record.since
            return since + _alone_left(record)
        if record.slowdown == 1.0:
            return record.end()
        return finish(record.since, _alone_left(record), self.slowdowns(record))

    def slowdowns(self, record: JobView) -> list[Until]:
        """Return how much its present mates slow a running job down, and until when.

        The observed slow-down corrects those that the model predicts for later.
        """
        steps: list[Until] = []
        present = 1.0
        for cell in self.cluster.shared_cells(record):
            mates = [mate for mate in cell if mate is not record and mate.computing]
            if len(mates) > 1:
                mates.sort(key=_pace_end)
            for index, mate in enumerate(mates):
                xi = self.perf.slowdown(
                    record.job, record.accumulation, [(m.job, m.accumulation) for m in mates[index:]]
                )
                steps.append((mate.end(), xi))
                present = max(present, xi)
        return corrected(steps, present, record.slowdown)


class RunningJobs:
    """The jobs that compute, grouped by their number of GPUs and of mates, each group sorted by predicted end."""

    def __init__(self) -> None:
        self.groups: dict[tuple[int, int], list[tuple[float, int, JobRecord]]] = {}
        self._places: dict[int, tuple[tuple[int, int], tuple[float, int, JobRecord]]] = {}

    def update(self, record: JobRecord, cluster: Cluster, ends: dict[int, float]) -> None:
        """Enter a job again: it, its mates or its predicted end changed."""
        place = self._places.get(record.seq)
        if not record.computing:
            if place is not None:
                self._remove(record.seq, *place)
            return
        key = (len(record.gpus), len(cluster.mates(record)))
        end = ends[record.seq]
        if place is not None:
            if place[0] == key and place[1][0] == end:
                return
            self._remove(record.seq, *place)
        entry = (end, record.seq, record)
        insort(self.groups.setdefault(key, []), entry)
        self._places[record.seq] = key, entry

    def _remove(self, seq: int, key: tuple[int, int], entry: tuple[float, int, JobRecord]) -> None:
        del self._places[seq]
        group = self.groups[key]
        del group[bisect_left(group, entry)]


def _alone_left(record: JobRecord) -> float:
    """Return the time left alone at the last settlement."""
    return (record.job.iterations - record.done) * record.alone_iteration_s


def _ready(record: JobRecord) -> float:
    """Return the time from which a paused job, or one that starts without a turn, can compute."""
    return record.gpus_since + record.startup_s if record.standby else record.since


def _turn(record: JobRecord) -> tuple[float, int]:
    """Return the order in which paused jobs go on: the shortest first."""
    return _alone_left(record), record.seq


def _pace_end(record: JobRecord) -> tuple[float, int]:
    return record.end(), record.seq
