"""The feed: numbered events that a reader can resume after any number, also after a restart."""

import asyncio

from carpool.core import events as ev
from carpool.core.model import Limits
from carpool.live.service import feed as feeds
from tests.support.services import one, serving, shell


async def read(feed, after):
    """Return all parts after a number, up to now."""
    return [part async for part in feed.follow(after, until=0.0)]


def events_of(parts):
    return [one for part in parts for one in part.events]


async def test_events_have_the_numbers_of_the_journal_and_survive_a_restart(quick_home, monkeypatch):
    async with serving(quick_home) as service:
        job = await one(service, shell("true"))
        await service.queries.wait(job)
        seen = events_of(await read(service.feed, 0))
        rows = {row["seq"]: row["kind"] for row in service.store.rows(1000)}
    assert {one.seq: one.kind for one in seen} == {seq: kind for seq, kind in rows.items() if seq <= seen[-1].seq}
    assert {"Submitted", "Planned", "Started", "Finished", "Note"} <= {one.kind for one in seen}
    monkeypatch.setattr(feeds, "MOST", 3)  # several pages, of the journal and then of what is in memory
    async with serving(quick_home) as service:
        again = events_of(await read(service.feed, 0))
        assert [one.seq for one in again] == [*range(1, service.feed.last + 1)]
        assert [one.data for one in again[: len(seen)]] == [one.data for one in seen]
        assert [one.seq for one in events_of(await read(service.feed, seen[-2].seq))][:2] == [
            seen[-1].seq,
            seen[-1].seq + 1,
        ]


async def test_a_reader_learns_that_events_are_missing(quick_home):
    async with serving(quick_home) as service:
        (part,) = await read(service.feed, service.feed.last + 7)
        assert (part.gap, part.events, part.last) == (True, (), service.feed.last)
        await service.store.transact(lambda connection: connection.exec_driver_sql("DELETE FROM events WHERE seq < 2"))
        service.feed._kept.clear()
        part = (await read(service.feed, 0))[0]
        assert part.gap
        assert part.events[0].seq == 2


async def test_a_reader_that_waits_is_woken_by_news_and_by_the_end(quick_home):
    async with serving(quick_home) as service:
        parts = service.feed.follow(None)
        assert (await anext(parts)).events == ()
        waiting = asyncio.create_task(anext(parts))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        service.inbox.note("something")
        assert [one.text for one in (await asyncio.wait_for(waiting, 2)).events] == ["something"]
        ending = asyncio.create_task(anext(parts, None))
        await asyncio.sleep(0.05)
        service.feed.close()
        assert await asyncio.wait_for(ending, 2) is None


async def test_old_events_leave_the_memory(quick_home, monkeypatch):
    monkeypatch.setattr(feeds, "KEPT", 5)
    async with serving(quick_home) as service:
        for number in range(30):
            service.inbox.note(f"note {number}")
            await service.driver.turn()
        assert len(service.feed._kept) <= 10
        texts = [one.text for one in events_of(await read(service.feed, 0)) if one.text.startswith("note")]
        assert texts == [f"note {number}" for number in range(30)]


def test_users_see_neither_notes_nor_the_limits_of_others():
    def seen(source):
        fed = feeds.FedEvent(1, source, dict)
        return [fed.visible_to("alice", False), fed.visible_to("bob", False), fed.visible_to("admin", True)]

    assert seen(None) == [False, False, True]
    assert seen(ev.LimitsChanged(0.0, "alice", Limits(1, 2))) == [True, False, True]
    assert seen(ev.Held(0.0, "7")) == [True, True, True]
