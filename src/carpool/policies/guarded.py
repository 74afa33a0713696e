"""A policy that may fail: its failures become one line, and a simple policy decides in its place.

The live service wraps every policy in `GuardedPolicy`, so that a policy that raises or exits, returns something that is
no plan, or returns a plan of which nothing obeys the rules, stops no job. The policy is asked again each time; its
answers count again as soon as it has some. The simulator has no fallback, because its results would be those of another
policy; it reports the failure with `failure_text`.
"""

import traceback
from collections.abc import Callable, Sequence
from inspect import getsourcefile
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

from carpool.core.model import Decision
from carpool.core.rules import IllegalPlan, check, legal_part
from carpool.core.scheduler import Policy
from carpool.core.tenants import WITHOUT_PREEMPTION, Entitlement
from carpool.core.view import JobView, View
from carpool.policies.base import Explanation
from carpool.policies.simple.fifo import Fifo

Answer = TypeVar("Answer")


class GuardedPolicy:
    """A policy and the one that stands in for it: `fifo`, which lets later jobs pass one that does not fit."""

    def __init__(self, inner: Policy, name: str) -> None:
        self.inner, self.name = inner, name
        self.restart_s: float = inner.restart_s
        self.start_s: float = getattr(inner, "start_s", 0.0)
        self.entitlement: Entitlement = getattr(inner, "entitlement", WITHOUT_PREEMPTION)
        self.fallback = Fifo(skip=True)
        self._failures: dict[str, str] = {}
        """What failed, by method."""

    @property
    def failure(self) -> str:
        """How the policy failed, with what decides instead; empty: it did not fail lately."""
        if not self._failures:
            return ""
        method, text = next(iter(self._failures.items()))
        return f"policy {self.name} failed in {method}(): {text}; {self.fallback.name} decides until it works again"

    @property
    def _failing(self) -> bool:
        return "decide" in self._failures or "wake" in self._failures

    @property
    def in_rounds(self) -> bool:
        return not self._failing and bool(getattr(self.inner, "in_rounds", False))

    @property
    def pauses(self) -> bool:
        return not self._failing and bool(getattr(self.inner, "pauses", False))

    def key(self, job: JobView, now: float) -> tuple[float, ...]:
        return self._ask("key", lambda: _sort_key(self.inner.key(job, now)), lambda: self.fallback.key(job, now))

    def decide(self, view: View) -> Sequence[Decision]:
        failed = self._failures.get("decide")
        found = self._ask("decide", lambda: _plan(view, self.inner.decide(view)), lambda: self.fallback.decide(view))
        if failed and not found and not any(True for _ in view.queue):
            self._failures.setdefault("decide", failed)  # an empty plan for an empty queue does not show that it works
        return found

    def wake(self, view: View) -> float | None:
        return self._ask("wake", lambda: _moment(self.inner.wake(view)), lambda: None)

    def explain(self, view: View, job: JobView) -> Explanation | None:
        ask = getattr(self.inner, "explain", None)  # a policy need not have it
        return None if ask is None else self._ask("explain", lambda: _explanation(ask(view, job)), lambda: None)

    def _ask(self, method: str, ask: Callable[[], Answer], instead: Callable[[], Answer]) -> Answer:
        try:
            answer = ask()
        except BaseException as error:  # also SystemExit and the like, which would end the service
            self._failures[method] = failure_text(self.inner, error)
            return instead()
        self._failures.pop(method, None)
        return answer


def failure_text(policy: Any, error: BaseException) -> str:
    """Return an error of a policy in one line, with the place in the policy's own file."""
    frames = traceback.extract_tb(error.__traceback__)
    file = own_file(policy)
    place = next((frame for frame in reversed(frames) if frame.filename == file), frames[-1] if frames else None)
    where = f" ({Path(place.filename).name}, line {place.lineno})" if place is not None else ""
    said = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}{f': {said}' if said else ''}{where}"


def comes_from(policy: Any, error: BaseException) -> bool:
    """Return whether the policy's own code was running when an error was raised."""
    return any(frame.filename == own_file(policy) for frame in traceback.extract_tb(error.__traceback__))


def own_file(policy: Any) -> str:
    try:
        return getsourcefile(type(policy)) or ""
    except (TypeError, OSError):
        return ""


def _sort_key(found: Any) -> tuple[float, ...]:
    if not isinstance(found, tuple) or not all(isinstance(part, int | float) and part == part for part in found):
        raise TypeError(f"key() must return a tuple of numbers, and returned {found!r}")
    return found


def _plan(view: View, found: Any) -> tuple[Decision, ...]:
    decisions = tuple(found)
    if not all(isinstance(one, Decision) for one in decisions):
        raise TypeError("decide() must return decisions")
    try:
        check(view, decisions)
    except IllegalPlan:
        kept, refused = legal_part(view, decisions)
        if not kept:  # jobs would wait for ever
            raise IllegalPlan(f"nothing of the plan obeys the rules: {refused[0]}") from None
    return decisions  # the scheduler refuses single decisions that break a rule


def _moment(found: Any) -> float | None:
    if found is not None and not (isinstance(found, int | float) and isfinite(found)):
        raise TypeError(f"wake() must return a time or None, and returned {found!r}")
    return found


def _explanation(found: Any) -> Explanation | None:
    if not isinstance(found, Explanation | None):
        raise TypeError("explain() must return an Explanation or None")
    return found
