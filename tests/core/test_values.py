"""Values that are made quickly behave like the frozen dataclasses that they are declared as."""

import pickle
from dataclasses import dataclass, field, fields, replace

import pytest

from carpool.core import events as ev
from carpool.core.model import Allocation, Decision
from carpool.core.values import quick


@dataclass(frozen=True, slots=True)
class Guarded:
    """A frozen value."""

    name: str
    number: int = 3
    parts: list[int] = field(default_factory=list)


@quick
@dataclass(frozen=True, slots=True)
class Unguarded:
    """The same value, made quickly."""

    name: str
    number: int = 3
    parts: list[int] = field(default_factory=list)


def test_a_quick_value_has_the_fields_and_defaults_of_the_frozen_one():
    assert [one.name for one in fields(Unguarded)] == [one.name for one in fields(Guarded)]
    for arguments in (("a",), ("a", 4), ("a", 4, [1])):
        assert repr(Unguarded(*arguments)) == repr(Guarded(*arguments)).replace("Guarded", "Unguarded")
    assert Unguarded("a").parts is not Unguarded("a").parts
    with pytest.raises(TypeError):
        Unguarded()


def test_quick_values_are_compared_hashed_replaced_and_pickled_by_their_fields():
    decision = Decision("a", Allocation((0, 1), 2), "it fits")
    same = Decision(job="a", allocation=Allocation(gpus=(0, 1), accumulation=2), why="it fits")
    assert decision == same
    assert hash(decision) == hash(same)
    assert replace(decision, why="").allocation is decision.allocation
    assert replace(decision, why="") != decision
    for value in (decision, ev.Started(1.0, "a", 1), ev.Planned(2.0, (decision,))):
        assert pickle.loads(pickle.dumps(value)) == value
        assert not hasattr(value, "__dict__")
