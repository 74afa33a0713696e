"""Gangs over nodes without processes: when parts may go, and what the ends of parts mean for the whole."""

import os
import stat
from dataclasses import replace

import pytest

from carpool.live.executors.base import GangEnded, GangOutcome, Launch, StopMode
from carpool.live.executors.cluster_gang import (
    ClusterGang,
    ClusterPart,
    NodeShare,
    read_end,
    read_parts,
    share_out,
    write_end,
    write_parts,
)
from carpool.live.executors.wire import PartState, Phase, Want

KEY = ("7", 1)
LAUNCH = Launch("7", 1, (0, 1, 2), ("true",), "/", {})
PLACES = {0: ("a", 0), 1: ("a", 1), 2: ("b", 0), 3: ("b", 1)}


def gang(launch=LAUNCH, gpus=(0, 1, 2)):
    shares = share_out(gpus, PLACES)
    return ClusterGang(KEY, {share.node: ClusterPart(share) for share in shares}, launch, recorded=True)


def ended(outcome, **more):
    return PartState(Phase.GONE, started_ago_s=1.0, ended=GangEnded(*KEY, outcome, **more))


UP = PartState(Phase.UP, 4711, 0.5)


def test_ranks_are_numbered_by_node_in_the_order_of_the_first_gpus():
    assert share_out((2, 0, 3), PLACES) == [NodeShare("b", (2, 3), (0, 1), 0), NodeShare("a", (0,), (0,), 2)]


def test_no_part_goes_before_all_are_ready():
    found = gang()
    order = found.order("a")
    assert (order.want, order.launch.gpus, order.launch.part.world_size) == (Want.READY, (0, 1), 3)
    assert found.order("b").launch.part.first_rank == 2
    found.tell("a", PartState(Phase.READY, 4711))
    assert found.order("a").want is Want.READY
    assert found.order("a").launch is None, "the agent has it"
    found.tell("b", PartState(Phase.PREPARING))
    assert {found.order(node).want for node in "ab"} == {Want.READY}
    found.tell("b", PartState(Phase.READY, 999))
    assert [(found.order(node).want, found.order(node).port) for node in "ab"] == [(Want.GO, 4711)] * 2
    found.tell("a", UP)
    assert not found.up
    assert (found.order("b").want, found.order("b").port) == (Want.GO, 4711), "a service that restarted says the same"
    found.tell("b", UP)
    assert found.up


def test_a_part_goes_even_if_another_has_finished_already():
    found = gang()
    found.tell("a", PartState(Phase.READY, 4711))
    found.tell("b", PartState(Phase.READY, 999))
    found.tell("a", replace(ended(GangOutcome.FINISHED), port=4711))
    assert (found.order("b").want, found.order("b").port) == (Want.GO, 4711)


def test_a_gang_on_one_node_goes_at_once():
    found = gang(gpus=(2, 3))
    order = found.order("b")
    assert (order.want, order.launch.part) == (Want.GO, None)


def test_a_gang_of_an_earlier_service_is_never_started_again():
    found = gang(launch=None)
    assert found.order("a").want is Want.KEEP
    found.tell("a", PartState(Phase.UNKNOWN))
    found.tell("b", PartState(Phase.UNKNOWN))
    assert found.over
    assert found.ended().outcome is GangOutcome.NEVER_STARTED


def test_a_part_that_vanishes_is_lost_and_ends_the_gang():
    found = gang()
    for node in "ab":
        found.tell(node, UP)
    found.tell("a", PartState(Phase.UNKNOWN))
    assert not found.over
    assert (found.order("b").want, found.order("b").how) == (Want.STOP, StopMode.TERMINATE)
    found.tell("b", ended(GangOutcome.FAILED, reason="peer", exit_code=1))
    assert found.ended().outcome is GangOutcome.LOST


F, S, X, L, M, N = (
    GangOutcome.FINISHED,
    GangOutcome.STOPPED,
    GangOutcome.FAILED,
    GangOutcome.LOST,
    GangOutcome.OUT_OF_MEMORY,
    GangOutcome.NEVER_STARTED,
)


@pytest.mark.parametrize(
    ("stop", "first", "second", "whole"),
    [
        (None, F, F, F),
        (None, X, S, X),  # the second was stopped because the first failed
        (None, F, X, X),
        (None, X, L, L),  # a peer of a lost part fails first
        (None, X, M, M),
        (None, L, X, L),
        (None, N, N, N),
        (None, N, S, L),
        (StopMode.SAVE, S, S, S),
        (StopMode.SAVE, S, X, S),  # it was asked to stop, and its peers were gone
        (StopMode.SAVE, X, S, X),
        (StopMode.KILL, S, L, L),
    ],
)
def test_the_end_of_a_gang_follows_from_those_of_its_parts(stop, first, second, whole):
    found = gang()
    if stop:
        found.stop_by(stop)
    found.tell("a", ended(first, checkpoint=5.0, exit_code=3 if first is X else None))
    found.tell("b", ended(second, checkpoint=7.0, exit_code=4 if second is X else None))
    assert found.over
    end = found.ended()
    assert (end.outcome, end.checkpoint) == (whole, 7.0)
    if whole is X:
        assert end.exit_code == (3 if first is X else 4)


def test_a_lost_node_keeps_the_failure_of_its_peers_from_the_job():
    found = gang()
    for node in "ab":
        found.tell(node, UP)
    found.tell("b", ended(GangOutcome.FAILED, reason="connection reset", exit_code=1))
    assert not found.over, "the end is not known before the silent node is"
    found.lose("a", "node a was silent for 330 s")
    assert (found.ended().outcome, found.ended().reason) == (GangOutcome.LOST, "node a was silent for 330 s")


def test_only_a_stronger_stop_replaces_a_weaker_one():
    found = gang()
    for mode, kept in ((StopMode.TERMINATE, "end"), (StopMode.SAVE, "end"), (StopMode.KILL, "kill")):
        found.stop_by(mode)
        assert found.order("a").how == kept


def test_files_tell_the_parts_and_the_end_again(tmp_path):
    directory = tmp_path / "7" / "attempt-1"
    found = gang()
    assert read_parts(directory, KEY) is None
    directory.parent.mkdir(mode=0o700)
    write_parts(directory, found)
    mode = stat.S_IMODE(directory.parent.stat().st_mode)
    assert mode == (0o711 if os.getuid() == 0 else 0o700), "users reach their checkpoints through it"
    again = read_parts(directory, KEY)
    assert [part.share for part in again.parts.values()] == [part.share for part in found.parts.values()]
    assert again.launch is None
    assert read_end(directory) is None
    for node in "ab":
        found.tell(node, ended(GangOutcome.FINISHED, exit_code=0))
    write_end(directory, found, found.ended())
    assert read_end(directory)[0].outcome is GangOutcome.FINISHED
    for name in ("parts.json", "end.json"):
        (directory / name).write_text('{"parts": [{"node": 3}], "ended": 7')
    assert read_parts(directory, KEY) is None
    assert read_end(directory) is None


def test_a_gang_that_starts_ahead_of_its_turn_is_paused_only_once_its_parts_say_so():
    found = gang(replace(LAUNCH, ahead=True))
    found.paused = True
    for node in "ab":
        found.tell(node, UP)
    assert not found.has_switched(), "no request was made"
    assert not found.request_switch(True, False, 10), "its parts may still start up"
    for node in "ab":
        found.tell(node, replace(UP, switch=found.switch))
    assert found.has_switched()
    assert not found.request_switch(False, False, 10)
    assert (found.order("a").switch, found.order("a").paused) == (12, False)
