"""When the running jobs will end, and when their GPUs will be free.

A job that shares speeds up as its mates end; each mate is taken to end at its present pace. The state marks the jobs
that an event touched, and `refresh` predicts the ends of those and of their mates again. A prediction follows from the
records alone, not from the time at which it is made, so a replayed journal gives the same predictions. `State` creates
the index when a policy first uses it.
"""

from carpool.core.availability import Availability, Until, corrected, finish
from carpool.core.cluster import Cluster
from carpool.core.model import Status
from carpool.core.perf import PerformanceModel
from carpool.core.record import JobRecord
from carpool.core.view import JobView

NOTHING: dict[float, int] = {}


class EndTimes:
    """The index of predicted ends."""

    def __init__(self, cluster: Cluster, perf: PerformanceModel) -> None:
        self.cluster = cluster
        self.perf = perf
        self.ends: dict[int, float] = {}
        """The predicted end of every job that holds GPUs, by `seq`."""
        self._lent = Availability()
        self._freed: dict[int, dict[float, int]] = {}  # number of GPUs by time, by the first resident of these GPUs
        self._touched: dict[int, JobRecord] = {}

    def touch(self, record: JobRecord) -> None:
        """Note that a job or its mates changed."""
        self._touched[record.seq] = record

    def refresh(self) -> "EndTimes":
        """Predict the ends of the jobs that were touched."""
        if not self._touched:
            return self
        touched = self._with_mates(self._touched)
        self._touched = {}
        ends, lent = self.ends, self._lent
        for seq, record in touched.items():
            if record.gpus:
                ends[seq] = self._end(record)
            else:
                ends.pop(seq, None)
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
        return self

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
        if record.status is not Status.RUNNING:  # as if it ran alone from the last event on
            since = record.gpus_since if record.paused_since < 0.0 else record.since
            return since + (record.job.iterations - record.done) * record.alone_iteration_s
        if record.slowdown == 1.0:
            return record.end()
        work = (record.job.iterations - record.done) * record.alone_iteration_s
        return finish(record.since, work, self.slowdowns(record))

    def slowdowns(self, record: JobView) -> list[Until]:
        """Return how much its present mates slow a running job down, and until when.

        The observed slow-down corrects those that the model predicts for later.
        """
        steps: list[Until] = []
        present = 1.0
        for cell in self.cluster.shared_cells(record):
            mates = [mate for mate in cell if mate is not record and mate.status is Status.RUNNING]
            if len(mates) > 1:
                mates.sort(key=_pace_end)
            for index, mate in enumerate(mates):
                xi = self.perf.slowdown(
                    record.job, record.accumulation, [(m.job, m.accumulation) for m in mates[index:]]
                )
                steps.append((mate.end(), xi))
                present = max(present, xi)
        return corrected(steps, present, record.slowdown)


def _pace_end(record: JobRecord) -> tuple[float, int]:
    return record.end(), record.seq
