"""One scheduling step: events in, plan out. No IO, no clock; a driver supplies both.

The simulator and the live service call `Scheduler.step` in the same way, with the same policy object behind it.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from carpool.core.events import Event, Planned
from carpool.core.model import Decision
from carpool.core.perf import PerformanceModel
from carpool.core.rules import IllegalPlan, check
from carpool.core.state import State
from carpool.core.view import JobView, View


class Policy(Protocol):
    """Who decides. Pure: the same view gives the same plan, and the view is left as it was.

    Three more attributes may be there: `in_rounds` (it is asked only at the times that `wake` names, whatever happens
    in between), `start_s` (what the simulator charges when a job starts for the first time) and `explain(view, job)`
    (why a pending job does not share: see `carpool.policies.base`)."""

    restart_s: float
    """What the simulator charges when a preempted job starts again."""

    def key(self, job: JobView, now: float) -> tuple[float, ...]:
        """The job's place in the queue, smallest first; asked when it enters the queue and at `PriorityChanged`."""

    def decide(self, view: View) -> Sequence[Decision]:
        """What to change now."""

    def wake(self, view: View) -> float | None:
        """When to be asked again even if nothing happens; None: not at all."""


class Scheduler:
    def __init__(self, policy: Policy, perf: PerformanceModel, jobs_per_gpu: int = 2, *, strict: bool = True) -> None:
        self.policy = policy
        self.state = State(perf, policy.key, jobs_per_gpu)
        self.strict = strict
        self.in_rounds = bool(getattr(policy, "in_rounds", False))
        self.decisions_asked = 0
        """How often the policy was asked."""
        self.refused: deque[IllegalPlan] = deque(maxlen=100)
        """The latest decisions that broke a rule, where `strict` is off (live): they are refused, the rest goes on."""

    def step(self, now: float, events: Iterable[Event], *, wake: bool = False) -> Planned | None:
        """Apply what happened, ask the policy, check its plan, apply it as `Planned`, and return it to be acted upon.

        The policy is asked only if something happened that may change its mind, or if `wake` says so; one that decides
        in rounds only if `wake` says so.
        """
        state = self.state
        for event in events:
            state.apply(event)
        if not (wake or (state.needs_decision and not self.in_rounds)):
            return None
        state.needs_decision = False
        if state.now != now:
            state.advance(now)
        self.decisions_asked += 1
        decisions = tuple(self.policy.decide(state))
        if not decisions:
            return None
        try:
            check(state, decisions)
        except IllegalPlan:
            if self.strict:
                raise
            decisions = self._legal_part(decisions)
            if not decisions:
                return None
        planned = Planned(now, decisions)
        state.apply(planned)
        state.needs_decision = False  # by the plan itself, which the policy knows
        return planned

    def _legal_part(self, decisions: Sequence[Decision]) -> tuple[Decision, ...]:
        """The plan without the decisions that break a rule, so that one bad decision does not starve the cluster."""
        kept: tuple[Decision, ...] = ()
        for decision in decisions:
            try:
                check(self.state, (*kept, decision))
                kept = (*kept, decision)
            except IllegalPlan as illegal:
                self.refused.append(illegal)
        return kept
