"""What the policies have in common: a policy is a small dataclass whose fields are its options."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import floor
from typing import Any, ClassVar

from carpool.core.model import Decision
from carpool.core.view import JobView, View


def option(default: Any, help: str) -> Any:
    """A policy's option with its default and one line on what it does."""
    return field(default=default, metadata={"help": help})


@dataclass
class BasePolicy:
    """Sort the queue by `key`, fill a `Draft` in `decide`. The class's docstring is what `carpool policies` shows."""

    name: ClassVar[str]
    restart_s: ClassVar[float] = 0.0
    start_s: ClassVar[float] = 0.0

    def key(self, job: JobView, now: float) -> tuple[float, ...]:
        raise TypeError(f"{type(self).__name__} must define key()")

    def decide(self, view: View) -> Sequence[Decision]:
        raise TypeError(f"{type(self).__name__} must define decide()")

    def wake(self, view: View) -> float | None:
        return None

    @property
    def in_rounds(self) -> bool:
        """Is the policy asked only at the times that `wake` names?"""
        return False


def next_round(now: float, round_s: float) -> float:
    """The first multiple of the round after now."""
    number = floor(now / round_s) + 1
    return number * round_s if number * round_s > now else (number + 1) * round_s


def shortest_first(job: JobView, now: float) -> tuple[float, ...]:
    """SJF's key: the expected time left alone, L_k (Alg. 1, l. 1)."""
    return (job.alone_left(now),)
