"""What the scheduler knows about one job, and the shape by which jobs are alike.

`State` is the only writer of a `JobRecord`; policies see it as a `JobView`, whose members are read-only.
Progress is lazy: iterations done at `since`, plus what the pace gives until now.
"""

from carpool.core.model import GpuId, Job, JobId, Status
from carpool.core.shapes import Shape


class JobRecord:
    """The mutable truth about one job."""

    __slots__ = (
        "accumulation",
        "alone_iteration_s",
        "alone_s",
        "alone_seen",
        "attempt",
        "batch",
        "checkpoint",
        "done",
        "ended",
        "first_start",
        "gpus",
        "gpus_since",
        "hosted",
        "index_entry",
        "iteration_s",
        "job",
        "leaving",
        "memory",
        "most_gpus",
        "on_hold",
        "pace_seen",
        "pace_valid_until",
        "pace_version",
        "pending_since",
        "preemptions",
        "queue_entry",
        "ran_s",
        "reason",
        "reported",
        "retries_left",
        "saved_s",
        "seq",
        "served",
        "shape",
        "shares",
        "since",
        "slowdown",
        "status",
        "waited_s",
        "waits_for",
        "whole_iteration_s",
    )

    def __init__(self, job: Job, shape: Shape, seq: int, whole_iteration_s: float) -> None:
        self.job = job
        self.shape = shape
        self.seq = seq  # of submission; breaks ties
        self.status = Status.PENDING
        self.attempt = 0
        self.gpus: tuple[GpuId, ...] = ()
        self.leaving: tuple[GpuId, ...] = ()  # where its workers may still be, though the GPUs are no longer its own
        self.accumulation = 1
        self.batch: int | None = None  # where the scheduler chose one
        self.memory = 0  # reserved on each GPU
        self.whole_iteration_s = whole_iteration_s  # the uncut batch, most consolidated
        self.alone_iteration_s = whole_iteration_s  # where it is placed now, or best could be
        self.done = 0.0
        self.checkpoint = 0.0
        self.since = 0.0
        self.iteration_s = 0.0  # 0: does not iterate
        self.pace_valid_until = float(job.iterations)  # up to where the pace holds
        self.slowdown = 1.0
        self.pace_version = 0  # counts changes of iteration_s, so that a driver recognises stale predictions
        self.alone_seen = False  # alone_iteration_s was measured in this launch, not predicted
        self.pace_seen = False  # iteration_s was measured beside the present mates
        self.reported = False
        self.on_hold = False
        self.waits_for: tuple[JobId, ...] = ()  # of `after`: those that have not finished yet
        self.index_entry: object = None  # owned by Hosts
        self.queue_entry: object = None  # owned by Queue
        # the job's story, for receipts and metrics
        self.retries_left = job.retries
        self.pending_since = 0.0
        self.first_start = -1.0
        self.ended = -1.0
        self.waited_s = 0.0
        self.gpus_since = 0.0
        self.served = 0.0  # GPU-seconds held, until held_since
        self.ran_s = 0.0  # iterating
        self.alone_s = 0.0  # what the same iterations would have taken alone
        self.preemptions = 0
        self.shares = 0  # times it joined others
        self.hosted = 0  # times others joined it
        self.most_gpus = 0  # that it ever ran on
        self.saved_s = 0.0  # how much longer it would have waited for those it joined to end, as believed then
        self.reason = ""

    def __repr__(self) -> str:
        return f"<{self.job.id} {self.status} {self.gpus}>"

    def iterations_left(self, now: float) -> float:
        left = self.job.iterations - self.done
        if self.iteration_s:
            left -= (now - self.since) / self.iteration_s
        return left if left > 0.0 else 0.0

    def alone_left(self, now: float) -> float:
        """L of the paper: the time left if the job runs alone."""
        left = self.job.iterations - self.done  # as in iterations_left, which would be one more call: many ask this
        if self.iteration_s:
            left -= (now - self.since) / self.iteration_s
        return left * self.alone_iteration_s if left > 0.0 else 0.0

    def whole_left(self, now: float) -> float:
        """The same with the uncut batch, most consolidated; times a `Size.relative_time` for a cut one."""
        return self.iterations_left(now) * self.whole_iteration_s

    def waited(self, now: float) -> float:
        """Seconds that the job was pending (not held, not blocked), over all its attempts."""
        return self.waited_s + (now - self.pending_since) if self.queue_entry is not None else self.waited_s

    def service(self, now: float) -> float:
        """GPU-seconds held so far."""
        return self.served + len(self.gpus) * (now - self.gpus_since) if self.gpus else self.served

    def forget_scale(self) -> None:
        """From now on it runs with its own batch, at one pace up to its end."""
        self.batch = None
        self.pace_valid_until = float(self.job.iterations)

    def end(self) -> float:
        """When the job will be done at its present pace, or come to where that pace changes."""
        return self.since + (self.pace_valid_until - self.done) * self.iteration_s
