"""Events register themselves, and the codec writes and reads any of them from its fields."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import get_type_hints

import pytest

from carpool.core import events as ev
from carpool.core.codec import UnknownEvent, builder, decode, encode
from carpool.core.model import Allocation, Closure, Decision, FairShare, GpuDemand, Job, Limits, Node, UserGroup
from carpool.core.state import HANDLERS, State, UnhandledEvent, handles
from tests.support.world import model

JOB = Job("j", 1.0, "bert", 2, 64, 1000, user="eve", after=("a", "b"), max_slowdown=1.5)
EVERY_KIND = (
    ev.Submitted(1.0, JOB),
    ev.Planned(2.0, (Decision("j", Allocation((1, 2), 4), "why"), Decision("k", None, "why"))),
    ev.Started(3.0, "j", 1, 20.0, computes=False),
    ev.Computing(3.0, "j", 1),
    ev.Progressed(3.0, "j", 1, 5.5),
    ev.Observed(3.0, "j", 1, 5.5, 0.25, relative=True),
    ev.SavingSeen(3.0, "j", 1, False),
    ev.DemandMeasured(3.0, "j", 1, GpuDemand(0.75, 0.9, 0.5, 0.25, 2**30, 0.02)),
    ev.Retuned(3.0, "j", 1, 4, 32, True),
    ev.Checkpointed(3.0, "j", 1, 7.0),
    ev.Stopped(3.0, "j", 1, 7.0),
    ev.Requeued(3.0, "j", 1),
    ev.LimitNeared(3.0, "j", 1, 60.0),
    ev.LimitReached(3.0, "j", 1),
    ev.ClosureSet(3.0, Closure("n0", (0, 1), 9.0, 12.0, "red")),
    ev.ClosureBegan(9.0, "n0"),
    ev.ClosureRemoved(12.0, "n0"),
    ev.Paused(3.0, "j", 1),
    ev.SwapFailed(3.0, "j", 1),
    ev.Resumed(3.0, "j", 1),
    ev.PausedByOwner(1.0, "j"),
    ev.ResumedByOwner(1.0, "j"),
    ev.Finished(3.0, "j", 1),
    ev.Failed(3.0, "j", 1, "reason", True),
    ev.Cancelled(3.0, "j"),
    ev.Held(3.0, "j", "its owner is not certain", True),
    ev.Released(3.0, "j"),
    ev.ConstraintsChanged(3.0, "j", True, 2, None),
    ev.NodeClosed(3.0, "n"),
    ev.NodeOpened(3.0, "n"),
    ev.SwapChanged(3.0, "n", True),
    ev.MemoryTaken(3.0, 1, 5),
    ev.PriorityChanged(3.0, "j", 7),
    ev.LimitsChanged(3.0, "eve", Limits(1, None)),
    ev.GroupChanged(3.0, UserGroup("vision", 2.5, 4, None)),
    ev.FairShareChanged(3.0, FairShare(0.5, 3600.0)),
    ev.AccountsOpened(3.0, True),
    ev.GuessesTrusted(3.0, False),
    ev.Outlived(3.0, "j", 1),
    ev.NodeJoined(0.0, Node("n", (0, 1), 5)),
    ev.NodeLost(9.0, "n"),
)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, type[ev.Event]]]:
    """The registry, as it was again after the test."""
    before = dict(ev.EVENTS)
    yield ev.EVENTS
    ev.EVENTS.clear()
    ev.EVENTS.update(before)


def subclasses(cls: type[ev.Event]) -> Iterator[type[ev.Event]]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from subclasses(subclass)


def through_json(event: ev.Event) -> ev.Event:
    return decode(json.loads(json.dumps(encode(event))))


def test_every_concrete_event_is_registered_under_its_name() -> None:
    concrete = {cls.__name__ for cls in subclasses(ev.Event)} - {"JobEvent"}
    assert {name: cls.__name__ for name, cls in ev.EVENTS.items()} == {name: name for name in concrete}


def test_every_kind_of_event_survives_encoding() -> None:
    assert {type(event) for event in EVERY_KIND} == set(ev.EVENTS.values()), "a kind of event is missing here"
    for event in EVERY_KIND:
        assert through_json(event) == event


def test_a_new_event_is_written_and_read_without_another_line(registry: dict[str, type[ev.Event]]) -> None:
    class Color(StrEnum):
        RED = "red"

    @dataclass(frozen=True, slots=True)
    class Moved(ev.JobEvent):
        job_again: Job
        back_to: Allocation | None
        decisions: tuple[Decision, ...]
        nodes: tuple[tuple[int, ...], ...]
        color: Color
        limits: Limits | None = None

    event = Moved(1.0, "j", 2, JOB, Allocation((3,), 2, 8), (Decision("j", None, "w"),), ((1, 2), ()), Color.RED)
    assert through_json(event) == event
    assert isinstance(through_json(event), Moved)


def test_a_field_that_cannot_be_written_names_its_type(registry: dict[str, type[ev.Event]]) -> None:
    @dataclass(frozen=True, slots=True)
    class Odd(ev.Event):
        values: dict[str, int]

    with pytest.raises(TypeError, match=r"dict\[str, int\] cannot be written"):
        builder(Odd)
    with pytest.raises(TypeError, match=r"dict cannot be written; use numbers, strings, enums, dataclasses or tuples"):
        encode(Odd(1.0, {"a": 1}))


def test_an_abstract_event_is_not_registered(registry: dict[str, type[ev.Event]]) -> None:
    @dataclass(frozen=True, slots=True)
    class UserEvent(ev.Event):
        abstract = True
        user: str

    @dataclass(frozen=True, slots=True)
    class UserJoined(UserEvent):
        pass

    assert "UserEvent" not in registry
    assert registry["UserJoined"] is UserJoined


def test_two_events_of_one_name_are_refused(registry: dict[str, type[ev.Event]]) -> None:
    with pytest.raises(TypeError, match=r"there is an event Started already, in carpool\.core\.events"):
        type("Started", (ev.Event,), {"__module__": "elsewhere"})


def test_an_unknown_kind_is_named_together_with_the_release_that_wrote_it() -> None:
    with pytest.raises(UnknownEvent, match=r"event 'Teleported' is unknown to this release") as caught:
        decode({"event": "Teleported", "at": 1.0})
    assert (caught.value.kind, caught.value.release) == ("Teleported", None)
    assert "Carpool 9.1 wrote it" in str(UnknownEvent("Teleported", "9.1"))
    assert isinstance(caught.value, ValueError)


def test_decoding_leaves_the_data_as_it_was() -> None:
    for event in EVERY_KIND:
        data = encode(event)
        before = json.dumps(data)
        decode(data)
        assert json.dumps(data) == before


def test_every_event_has_exactly_one_function_that_applies_it() -> None:
    missing = [name for name, kind in ev.EVENTS.items() if kind not in HANDLERS]
    assert not missing, f"events without a function: {missing}; write one with @handles in core/transitions"
    assert set(HANDLERS) == set(ev.EVENTS.values())
    for kind, function in HANDLERS.items():
        assert get_type_hints(function)["event"] is kind


def test_an_event_without_a_function_that_applies_it_is_refused(registry: dict[str, type[ev.Event]]) -> None:
    @dataclass(frozen=True, slots=True)
    class Forgotten(ev.Event):
        pass

    state = State(model(), lambda job, now: (0.0,))
    with pytest.raises(UnhandledEvent, match=r"event Forgotten: no function applies it; write one with @handles"):
        state.apply(Forgotten(5.0))
    assert state.now == 0.0, "nothing of it is applied"


def test_a_second_function_for_one_event_is_refused() -> None:
    with pytest.raises(TypeError, match=r"carpool\.core\.transitions\.workers handles Started already"):
        handles(ev.Started)(lambda state, event: None)
