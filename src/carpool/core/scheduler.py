"""One scheduling step: events in, plan out. The module does no IO and has no clock; a driver supplies both.

The simulator and the live service call `Scheduler.step` in the same way, with the same policies.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from carpool.core.batches import apply_together
from carpool.core.closures import fill
from carpool.core.events import Event, Planned
from carpool.core.model import Allocation, Decision
from carpool.core.perf import PerformanceModel
from carpool.core.rules import IllegalPlan, check, legal_part
from carpool.core.state import RESIDENT_PER_GPU, State
from carpool.core.tenants import WITHOUT_PREEMPTION, Entitlement
from carpool.core.view import JobView, View


class Policy(Protocol):
    """What decides. A policy is pure: the same view gives the same plan, and the view does not change.

    Five more attributes are optional: `in_rounds` (the policy decides only at the times that `wake` returns), `pauses`
    (the policy pauses and resumes jobs; for other policies the scheduler resumes what was paused), `start_s` (seconds
    that the simulator charges when a job starts for the first time), `entitlement` (which part of its share a group may
    have before others: see `carpool.core.tenants`) and `explain(view, job)` (why a pending job does not share: see
    `carpool.policies.base`).
    """

    restart_s: float
    """Seconds that the simulator charges when a preempted job starts again."""

    def key(self, job: JobView, now: float) -> tuple[float, ...]:
        """Return the job's sort key for the queue, smallest first. It is computed when the job enters the queue and at
        `PriorityChanged`."""

    def decide(self, view: View) -> Sequence[Decision]:
        """Return what to change now."""

    def wake(self, view: View) -> float | None:
        """Return when to decide again even if nothing happens; None: not before the next event."""


class Scheduler:
    """A state and the policy that decides on it."""

    def __init__(
        self,
        policy: Policy,
        perf: PerformanceModel,
        jobs_per_gpu: int = 2,
        resident_per_gpu: int = RESIDENT_PER_GPU,
        *,
        strict: bool = True,
    ) -> None:
        self.policy = policy
        self.state = State(perf, policy.key, jobs_per_gpu, resident_per_gpu)
        self.strict = strict
        self.in_rounds = bool(getattr(policy, "in_rounds", False))
        self.pauses = bool(getattr(policy, "pauses", False))
        self.entitlement: Entitlement = getattr(policy, "entitlement", WITHOUT_PREEMPTION)
        self.policy_calls = 0
        """Number of times that the policy decided."""
        self.refused: deque[IllegalPlan] = deque(maxlen=100)
        """The latest decisions that broke a rule. Where `strict` is off (live), only these are refused."""

    def step(self, now: float, events: Iterable[Event], *, wake: bool = False) -> Planned | None:
        """Apply events, ask the policy, check its plan, apply it as `Planned`, and return it to the driver.

        The policy decides only if an event may change its decision, or if `wake` is true; a policy that decides in
        rounds only if `wake` is true.
        """
        state = self.state
        self.begin_moment(now)
        apply_together(state, events)
        if not (wake or (state.needs_decision and not self.in_rounds)):
            return None
        state.needs_decision = False
        if state.now != now:
            state.advance(now)
        if state.tenants.on:
            state.tenants.entitlement = self.entitlement
            state.rank_queue()
        self.policy_calls += 1
        decisions = tuple(self.policy.decide(state))
        if state.paused and not self.pauses:
            decisions = (*decisions, *self._resumes(decisions))
        if decisions:
            decisions = self._legal(decisions)
        decided = decisions
        if state.closures:
            decisions = fill(state, decided)
        if not decisions:
            return None
        planned = Planned(now, decisions)
        state.apply(planned)
        # the plan itself set it, and needs no further decision, unless its starts leave GPUs that the policy had taken
        state.needs_decision = decisions[: len(decided)] != decided
        return planned

    def begin_moment(self, now: float) -> None:
        """Forget the jobs that were to be looked at again at an earlier moment."""
        if self.state.awakened and now > self.state.now:
            self.state.awakened.clear()

    @property
    def asks_again(self) -> bool:
        """Whether the policy must decide again, although nothing has happened since its plan."""
        return self.state.needs_decision and not self.in_rounds

    def _legal(self, decisions: tuple[Decision, ...]) -> tuple[Decision, ...]:
        """Return a plan if it obeys the rules. Else raise `IllegalPlan`, or return its legal part (live)."""
        try:
            check(self.state, decisions)
        except IllegalPlan:
            if self.strict:
                raise
            decisions, refused = legal_part(self.state, decisions)
            self.refused.extend(refused)
        return decisions

    def _resumes(self, decisions: tuple[Decision, ...]) -> tuple[Decision, ...]:
        """Return the resumes that the rules allow beside a plan: of jobs without a reason to stay paused.

        Their owners paused them, or a policy that pauses jobs did before this one took over.
        """
        resumes: tuple[Decision, ...] = ()
        named = {decision.job for decision in decisions}
        for record in self.state.paused.values():
            if record.job.id in named:
                continue
            again = Allocation(record.gpus, record.accumulation, record.batch)
            decision = Decision(record.job.id, again, "nothing keeps it paused any more")
            try:
                check(self.state, (*decisions, *resumes, decision))
                resumes = (*resumes, decision)
            except IllegalPlan:
                continue
        return resumes
