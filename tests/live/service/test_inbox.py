"""The inbox by itself: what the driver takes, what is kept after a failed commit, and which requests are refused."""

import asyncio

import pytest

from carpool.core import events as ev
from carpool.live.errors import Unavailable
from carpool.live.journal.store import Commit
from carpool.live.service.inbox import Inbox
from tests.support.fakes import FakeClock

HELD = ev.Held(1.0, "1")


async def test_inputs_and_notes_are_taken_in_order_and_wake_the_driver():
    inbox = Inbox(FakeClock(5.0))
    assert inbox.empty
    inbox.add_events(HELD)
    inbox.add(lambda now, commit: [ev.Released(now, "1")])
    inbox.note("a line")
    assert inbox.woken.is_set()
    inputs, notes = inbox.take()
    assert [event for one in inputs for event in one.prepare(2.0, Commit())] == [HELD, ev.Released(2.0, "1")]
    assert notes == [(5.0, "a line")]
    assert inbox.empty


async def test_a_failed_commit_keeps_everything_but_requests():
    inbox = Inbox(FakeClock())
    inbox.add_events(HELD)
    asked = asyncio.create_task(inbox.request(lambda now, commit: ()))
    await asyncio.sleep(0)
    inbox.note("before")
    inputs, notes = inbox.take()
    inbox.note("after")
    inbox.put_back(inputs, notes)
    inbox.refusal = "the disk is full"
    inbox.refuse([one.answer for one in inputs if one.answer is not None])
    with pytest.raises(Unavailable, match="the disk is full"):
        await asked
    kept, notes = inbox.take()
    assert [event for one in kept for event in one.prepare(2.0, Commit())] == [HELD]
    assert [text for _, text in notes] == ["before", "after"]


async def test_no_request_is_accepted_while_there_is_a_refusal():
    inbox = Inbox(FakeClock(), refusal="the service is stopping")
    with pytest.raises(Unavailable, match="stopping"):
        await inbox.request(lambda now, commit: ())
    assert inbox.empty
