"""The message between agent and service: what is written is read again, and anything else is refused."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.channel import Report, Shrinking, WorkerStatus
from carpool.errors import InputError
from carpool.gpu.counters import GpuUse
from carpool.live.executors import wire
from carpool.live.executors.base import GangEnded, GangOutcome, GangPart, Launch
from carpool.live.executors.wire import DeviceRow, NodeOrders, NodeState, PartOrder, PartState, Phase, RankRow, Want

ENDED = GangEnded("8", 2, GangOutcome.FAILED, "why", exit_code=3, node_fault=True)
STATE = NodeState(
    node="a",
    identity="i",
    boot="b",
    instance="x",
    number=3,
    address="127.0.0.1",
    memory=2**40,
    mechanism="mps",
    release="0.2",
    devices=(DeviceRow(0, "GPU-1", "H200"), DeviceRow(1)),
    parts={
        "7-1": PartState(
            Phase.UP,
            4711,
            1.5,
            report=Report(attempt=1, status=WorkerStatus.RUNNING, shrinking=Shrinking.WARNED, note="ξ"),
            ranks=(RankRow(0, 17, 1.0), RankRow(1)),
            switch=2,
        ),
        "8-2": PartState(
            Phase.GONE,
            ended=GangEnded("8", 2, GangOutcome.FAILED, "why", exit_code=3, node_fault=True),
            ended_ago_s=0.1,
        ),
    },
    taken={"0": 2**30},
    use={"1": GpuUse(0.5, 0.6, None, None, 0.1, True)},
    remarks=(wire.Remark(4, "text", ("7-1",), True),),
)
LAUNCH = Launch(
    "7", 1, (0, 1), ("sh", "-c", "true"), "/tmp", {"A": "b"}, uid=7, part=GangPart(2, 4, 1, 2), gpu_memory=2**34
)
ORDERS = NodeOrders(9, 17, 30.0, "abc", {"7-1": PartOrder(Want.GO, launch=LAUNCH, user="eve", port=99, paused=True)})


@pytest.mark.parametrize("message", [STATE, ORDERS, NodeState("a", "i", "b", "x", 1, "h", 1, "logical", "0", ())])
def test_what_is_written_is_read_again(message):
    assert wire.read(type(message), json.loads(json.dumps(wire.plain(message)))) == message


def test_names_that_this_release_does_not_know_are_ignored():
    data = {**wire.plain(ORDERS), "new": [1, 2]}
    assert wire.read(NodeOrders, json.loads(json.dumps(data))) == ORDERS


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("number",), "3", "NodeState.number: is not a whole number"),
        (("number",), True, "whole number"),
        (("number",), 2**60, "whole number"),
        (("devices",), {}, "NodeState.devices: is not a list"),
        (("parts", "7-1", "phase"), "dead", "NodeState.parts.7-1.phase: is not one of"),
        (("parts", "7-1", "started_ago_s"), float("nan"), "is not a number"),
        (("parts", "7-1", "ranks"), [[]], r"ranks\[0\]: is not an object"),
        (("leaving",), 1, "true or false"),
        (("node",), None, "a text"),
    ],
)
def test_a_wrong_type_is_refused_with_its_place(path, value, message):
    data = json.loads(json.dumps(wire.plain(STATE)))
    place = data
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    with pytest.raises(InputError, match=message):
        wire.read(NodeState, data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(name=st.sampled_from(sorted(wire.plain(STATE))), value=JSON)
def test_no_value_does_more_than_be_refused(name, value):
    data = {**json.loads(json.dumps(wire.plain(STATE))), name: value}
    try:
        found = wire.read(NodeState, data)
    except InputError:
        return
    assert wire.read(NodeState, json.loads(json.dumps(wire.plain(found)))) == found


@pytest.mark.parametrize("text", ["", "7", "7-", "-1", "x-1", "7-1-1", "٣-1", "7-x", "../1-1"])
def test_only_names_of_gangs_become_keys(text):
    with pytest.raises(InputError):
        wire.read_key(text)
    assert wire.read_key("17-4") == ("17", 4)
