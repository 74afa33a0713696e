"""What the scheduler knows about one job.

Only the functions that apply events (`transitions` and what it calls) write to a `JobRecord`; policies see it as a
`JobView`. Progress is lazy: a record holds the iterations done at the time `since`, and its iteration time gives the
rest.
"""

from dataclasses import dataclass, field
from math import inf

from carpool.core.model import GpuId, Job, JobId, Status
from carpool.core.shapes import Shape


@dataclass(slots=True, eq=False, repr=False)
class JobRecord:
    """A job's present state and its history. Two records are equal only if they are the same object."""

    job: Job
    """The job as submitted, changed only by `ConstraintsChanged`."""
    shape: Shape
    """The shape that it shares with jobs that can be placed in the same way."""
    seq: int
    """Number in the order of submission; breaks ties."""
    whole_iteration_s: float
    """Iteration time with the whole batch, alone at the most consolidated placement."""

    # ---- where it is ----
    status: Status = field(default=Status.PENDING, init=False)
    attempt: int = field(default=0, init=False)
    """Number of the present attempt; 0 before the first."""
    gpus: tuple[GpuId, ...] = field(default=(), init=False)
    """The GPUs that it holds."""
    leaving: tuple[GpuId, ...] = field(default=(), init=False)
    """The GPUs that it gave up and on which its workers may still run."""
    accumulation: int = field(default=1, init=False)
    batch: int | None = field(default=None, init=False)
    """Batch that the scheduler chose for an elastic job; None: the user's own."""
    memory: int = field(default=0, init=False)
    """Bytes reserved on each of its GPUs."""
    active: bool = field(default=False, init=False)
    """It holds GPUs and computes, or is about to; False while it is paused or being paused."""
    swapped: bool = field(default=False, init=False)
    """It is paused, and its memory is in main memory or on its way there."""
    on_hold: bool = field(default=False, init=False)
    """It must not be started before it is released."""
    hold_why: str = field(default="", init=False)
    """What keeps it on hold; empty: its owner."""
    held_for_good: bool = field(default=False, init=False)
    """It is on hold, and no release lets it start."""
    paused_by_owner: bool = field(default=False, init=False)
    """Its owner paused it, or the closure of its GPUs did: no policy may resume it."""
    kept_paused: bool = field(default=False, init=False)
    """A closure of its GPUs paused it, and not its owner."""
    paused_before: bool = field(default=False, init=False)
    """Its owner had paused it when a closure kept it paused, so it stays paused when the closure is over."""
    waits_for: tuple[JobId, ...] = field(default=(), init=False)
    """The jobs of `after` that have not finished."""

    # ---- its time limit ----
    limit_s: float | None = field(default=None, init=False)
    """Seconds for which it may compute: its own limit or that of its group; None: any time."""
    limit_from: float = field(default=0.0, init=False)
    """The value of `ran_s` from which the limit counts: where it was requeued at its limit, it counts anew."""
    near_limit: bool = field(default=False, init=False)
    """`LimitNeared` has come since then."""
    at_limit: bool = field(default=False, init=False)
    """It reached its limit, and its workers are still to stop."""

    # ---- progress and pace ----
    done: float = field(default=0.0, init=False)
    """Iterations done at the time `since`."""
    checkpoint: float = field(default=0.0, init=False)
    """Iterations that a restart resumes after."""
    since: float = field(default=0.0, init=False)
    """Time of the last settlement: see `pace.settle`."""
    alone_iteration_s: float = field(init=False)
    """Iteration time alone where it is placed, or, while it is not, at the best placement."""
    iteration_s: float = field(default=0.0, init=False)
    """Iteration time beside its mates; 0 while it does not iterate."""
    slowdown: float = field(default=1.0, init=False)
    """ξ beside its present mates, the worst over its GPUs."""
    pace_valid_until: float = field(init=False)
    """Iteration up to which its pace holds."""
    pace_version: int = field(default=0, init=False)
    """Number of changes of its pace, by which a driver recognises stale predictions."""
    alone_seen: bool = field(default=False, init=False)
    """`alone_iteration_s` was measured in this attempt, not predicted."""
    pace_seen: bool = field(default=False, init=False)
    """`iteration_s` was measured beside the present mates, not predicted."""
    warming_up: bool = field(default=False, init=False)
    """It is up and does not compute: `Computing` is still to come. It makes no progress and slows no job down."""
    standby: bool = field(default=False, init=False)
    """It starts up without a turn to compute: once it is up it is paused, unless no job computes on its GPUs."""
    startup_s: float = field(default=0.0, init=False)
    """Expected seconds from a claim to its first iteration."""
    reported: bool = field(default=False, init=False)
    """It reported its speed at least once."""

    # ---- what its user guessed ----
    guess_s: float = field(default=0.0, init=False)
    """Duration that its user guessed; 0: none, or guesses are trusted."""
    guess_iterations: int = field(default=0, init=False)
    """Iterations that its user guessed, where there is no guess of a duration; 0: none."""
    correction: float = field(default=1.0, init=False)
    """What the user's record, or a measured speed, multiplies the guessed duration by."""
    stretched: float = field(default=1.0, init=False)
    """What it is multiplied by, because the job outlived it."""
    grown: float = field(default=1.0, init=False)
    """What its iterations are multiplied by, because it reported more of them than there should have been."""
    outlived: int = field(default=0, init=False)
    """Number of times that it outlived what was believed of it."""
    relative: bool = field(default=False, init=False)
    """It reported its speed without telling how many iterations it makes."""

    queue_entry: object = field(default=None, init=False)
    """Its entry in `Queue`, which alone writes it; None while it is not pending."""

    # ---- history, for receipts and metrics ----
    retries_left: int = field(init=False)
    pending_since: float = field(default=0.0, init=False)
    """When it last began to wait."""
    first_start: float = field(default=-1.0, init=False)
    """When it first ran; −1: never."""
    ended: float = field(default=-1.0, init=False)
    """When it finished, failed or was cancelled; −1: not so far."""
    waited_s: float = field(default=0.0, init=False)
    """Seconds pending, up to `pending_since`."""
    gpus_since: float = field(default=0.0, init=False)
    """When it got its present GPUs."""
    charge: float = field(default=0.0, init=False)
    """GPUs that its tenants pay for now: one that several jobs compute on counts in parts. 0 without shares."""
    served: float = field(default=0.0, init=False)
    """GPU-seconds held, up to `gpus_since`."""
    ran_s: float = field(default=0.0, init=False)
    """Seconds in which it iterated, up to `since`."""
    told: bool = field(default=False, init=False)
    """Its workers reported in some attempt that they compute: what came before was start-up."""
    silent_s: float = field(default=0.0, init=False)
    """Seconds of start-ups that no report ended. They count as run, unless its workers report something later."""
    silent_from: float = field(default=-1.0, init=False)
    """When its present start-up began, on a clock that stands still while it is paused; −1: not known."""
    alone_s: float = field(default=0.0, init=False)
    """Seconds that the same iterations would have taken alone."""
    preemptions: int = field(default=0, init=False)
    pauses: int = field(default=0, init=False)
    paused_since: float = field(default=-1.0, init=False)
    """When its present pause began; −1: it is not paused."""
    paused_s: float = field(default=0.0, init=False)
    """Seconds paused, up to `paused_since`."""
    shares: int = field(default=0, init=False)
    """Number of times that it joined other jobs: it began to compute beside them."""
    hosted: int = field(default=0, init=False)
    """Number of times that another job joined it."""
    shared_with: tuple[int, ...] = field(default=(), init=False)
    """The `seq` of the jobs on its GPUs that it joined or that joined it, in order."""
    most_gpus: int = field(default=0, init=False)
    """Largest number of GPUs on which it ever ran."""
    saved_s: float = field(default=0.0, init=False)
    """Seconds that it would have waited longer for its hosts to end, as believed when it joined them."""
    reason: str = field(default="", init=False)
    """Why it failed or was cancelled."""

    def __post_init__(self) -> None:
        self.alone_iteration_s = self.whole_iteration_s
        self.pace_valid_until = float(self.job.iterations)
        self.retries_left = self.job.retries

    def __repr__(self) -> str:
        return f"<{self.job.id} {self.status} {self.gpus}>"

    def iterations_left(self, now: float) -> float:
        """Return the iterations that are not done, at its present pace."""
        left = self.job.iterations - self.done
        if self.iteration_s:
            left -= (now - self.since) / self.iteration_s
        return left if left > 0.0 else 0.0

    def alone_left(self, now: float) -> float:
        """Return the time left if the job runs alone: L of the paper."""
        left = self.job.iterations - self.done  # as in iterations_left; a call would cost more, and this is asked often
        if self.iteration_s:
            left -= (now - self.since) / self.iteration_s
        return left * self.alone_iteration_s if left > 0.0 else 0.0

    def whole_left(self, now: float) -> float:
        """Return the time left alone with the whole batch at the most consolidated placement.

        Multiply it by a `Size.relative_time` for a split batch.
        """
        return self.iterations_left(now) * self.whole_iteration_s

    @property
    def computing(self) -> bool:
        """Whether it iterates now."""
        return self.status is Status.RUNNING and not self.warming_up

    @property
    def starts_up(self) -> bool:
        """Whether it has GPUs and does not compute so far, so that it slows no job down."""
        return self.status is Status.STARTING or self.warming_up

    def startup_left(self, now: float) -> float:
        """Return the expected seconds until the job computes, if it gets its GPUs now or has just got them."""
        if self.status is Status.STARTING or self.warming_up:
            left = self.gpus_since + self.startup_s - now
            return left if left > 0.0 else 0.0
        return 0.0 if self.gpus else self.startup_s

    def alone_done(self, now: float) -> float:
        """Return the seconds that its iterations so far would have taken alone, as believed when it did them."""
        return self.alone_s + (now - self.since) / self.slowdown if self.iteration_s else self.alone_s

    def waited(self, now: float) -> float:
        """Return the seconds that the job was pending (not held, not blocked), over all its attempts."""
        return self.waited_s + (now - self.pending_since) if self.queue_entry is not None else self.waited_s

    def ran(self, now: float) -> float:
        """Return the seconds in which the job computed, over all its attempts."""
        return self.ran_s + (now - self.since) if self.iteration_s else self.ran_s

    def silent(self, now: float) -> float:
        """Return the seconds of its present start-up, if its workers never reported anything."""
        known = self.warming_up and not self.told and self.silent_from >= 0.0
        return max(0.0, now - self.paused(now) - self.silent_from) if known else 0.0

    def limit_left(self, now: float) -> float:
        """Return the seconds for which the job may still compute."""
        return inf if self.limit_s is None else self.limit_s - (self.ran(now) - self.limit_from)

    def paused(self, now: float) -> float:
        """Return the seconds that the job was paused, over all its attempts."""
        return self.paused_s + (now - self.paused_since) if self.paused_since >= 0.0 else self.paused_s

    def service(self, now: float) -> float:
        """Return the GPU-seconds held so far."""
        return self.served + len(self.gpus) * (now - self.gpus_since) if self.gpus else self.served

    @property
    def stretch(self) -> float:
        """What the iteration times of the model are multiplied by, because its guess was corrected or outlived."""
        return self.correction * self.stretched

    def forget_scale(self) -> None:
        """Return to the user's own batch, with which one pace holds up to the end."""
        self.batch = None
        self.pace_valid_until = float(self.job.iterations)

    def end(self) -> float:
        """Return when the job is done at its present pace, or reaches the iteration where its pace changes."""
        return self.since + (self.pace_valid_until - self.done) * self.iteration_s
