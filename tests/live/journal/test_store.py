"""The journal: durable, whole or not at all, upgraded from older releases, short after a snapshot."""

import asyncio
import json
import random
import sqlite3

import pytest

from carpool.core import events as ev
from carpool.core import snapshot
from carpool.core.model import Job, Limits
from carpool.errors import InputError
from carpool.live.journal import schema
from carpool.live.journal.store import Batch, Store, StoreError
from carpool.live.service import service
from tests.support.fakes import FakeClock, FakeExecutor
from tests.support.services import notes, one, serving, shell

VERSION_1 = """
CREATE TABLE meta (key VARCHAR NOT NULL, value TEXT NOT NULL, PRIMARY KEY (key));
CREATE TABLE events (seq INTEGER NOT NULL, at FLOAT NOT NULL, uptime FLOAT NOT NULL, kind VARCHAR NOT NULL,
    data TEXT NOT NULL, PRIMARY KEY (seq));
CREATE TABLE jobs (id INTEGER NOT NULL, user VARCHAR NOT NULL, name VARCHAR NOT NULL, spec TEXT NOT NULL,
    submitted FLOAT NOT NULL, state VARCHAR, ended FLOAT, story TEXT, PRIMARY KEY (id));
CREATE INDEX jobs_ended ON jobs (state, id);
CREATE TABLE snapshots (seq INTEGER NOT NULL, data TEXT, PRIMARY KEY (seq));
CREATE TABLE users (name VARCHAR NOT NULL, row TEXT NOT NULL, PRIMARY KEY (name));
INSERT INTO meta VALUES ('version', '1'), ('policy', 'fifo'), ('jobs_per_gpu', '2'), ('boot', 'long ago');
INSERT INTO users VALUES ('eve', '{"token_hash": "x"}');
"""
"""The tables as the first release made them."""


def write(book: Store, batch: Batch) -> None:
    asyncio.run(book.write(batch))


def test_a_home_of_the_first_release_is_upgraded_and_its_jobs_go_on(home):
    home.create()
    node = {"event": "NodeJoined", "at": 5.0, "node": {"id": "node0", "gpus": [0, 1], "memory": 2**50}}
    job = {"id": "7", "submitted": 6.0, "model": "generic", "gpus": 1, "batch": 1, "iterations": 9, "user": "eve"}
    job |= {"alone_s": 9.0, "can_shrink": False, "exclusive": False, "max_slowdown": None, "priority": 0}
    submitted = {"event": "Submitted", "at": 6.0, "job": {**job, "after": [], "retries": 0}}  # no least_accum yet
    with sqlite3.connect(home.journal) as book:
        book.executescript(VERSION_1)
        for number, event in enumerate((node, submitted), 1):
            row = (number, event["at"], 1.0, event["event"], json.dumps(event))
            book.execute("INSERT INTO events VALUES (?, ?, ?, ?, ?)", row)
        spec = json.dumps({"command": ["sh", "-c", "exit 0"], "directory": "/tmp", "name": "old"})
        book.execute("INSERT INTO jobs VALUES (7, 'eve', 'old', ?, 6.0, NULL, NULL, NULL)", (spec,))
    book.close()

    async def play():
        async with serving(home) as live:
            assert await live.queries.wait("7") == "finished"
            assert live.queries.show("7")["name"] == "old"
            assert live.queries.users() == {"eve": {"token_hash": "x"}}
            assert await one(live, shell("true")) == "8"
            assert live._store.meta()["version"] == str(schema.VERSION)

    asyncio.run(play())


def test_a_home_of_a_newer_release_is_refused(home):
    home.create()
    book = Store(home.journal)
    book.open()
    write(book, Batch(meta={"version": str(schema.VERSION + 1)}))
    book.close()

    async def play():
        async with serving(home):
            pass

    with pytest.raises(InputError, match="newer release"):
        asyncio.run(play())


def test_a_batch_is_written_whole_or_not_at_all(home):
    home.create()
    book = Store(home.journal)
    assert book.open() == 0
    row = {"id": 1, "user": "", "name": "", "spec": "{}", "submitted": 0.0, "source": "{}"}
    write(book, Batch(events=[ev.Held(1.0, "1")], jobs=[row]))
    with pytest.raises(StoreError):
        write(book, Batch(events=[ev.Released(2.0, "1")], jobs=[row]))  # the same id again
    write(book, Batch(events=[ev.Cancelled(3.0, "1")]))
    assert list(book.events_after(0)) == [(1, ev.Held(1.0, "1")), (2, ev.Cancelled(3.0, "1"))]
    assert book._connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2, "a commit waits for the disk"
    assert book._connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
    book.close()


def test_what_arrives_together_shares_one_sync(quick_home):
    async def play():
        async with serving(quick_home, executor=FakeExecutor(), clock=FakeClock(1.0)) as live:
            commits = 0
            real = live._store._write

            def counted(batch):
                nonlocal commits
                commits += 1
                real(batch)

            live._store._write = counted
            await asyncio.gather(*(one(live, shell("true")) for _ in range(500)))
            assert commits < 50

    asyncio.run(play())


def test_a_restart_from_a_snapshot_gives_the_state_that_a_whole_replay_gives(quick_home, monkeypatch):
    """Jobs that ended leave the memory and the snapshot; their rows stay."""
    monkeypatch.setattr(service, "SNAPSHOT_EVENTS", 50)
    clock, drawn = FakeClock(1.0), random.Random(5)
    executor = FakeExecutor()

    async def play():
        async with serving(quick_home, gpus=4, executor=executor, clock=clock) as live:
            await live.requests.set_limits("bob", Limits(jobs=1))
            for _ in range(80):
                clock.time += drawn.choice([0.0, 1.0, 20.0])
                after = drawn.sample(sorted(live.specs), min(2, len(live.specs))) if drawn.random() < 0.2 else []
                wishes = {"gpus": drawn.randint(1, 4), "duration_s": drawn.randint(5, 500), "after": after}
                await one(live, shell("true", name=drawn.choice("abc"), **wishes), drawn.choice(["eve", "bob"]))
                for key in list(executor.gangs):
                    if drawn.random() < 0.5:
                        executor.listener.gang_up(*key)
                    elif drawn.random() < 0.5:
                        del executor.gangs[key]
                        live._driver.tell(ev.Finished(clock.time, *key))
                await live._driver.turn()
            await asyncio.sleep(0.1)
            return snapshot.encode(live._state), live._driver.quiet

    (present, quiet) = asyncio.run(play())
    assert quiet
    book = Store(quick_home.journal)
    book.open()
    taken = [seq for seq, _ in book.snapshots()]
    first = next(seq for seq, _ in book.events_after(0))
    book.close()
    assert len(taken) == 2
    assert taken[-1] > 100, "two are kept, the older ones go"
    assert first == 1, "events stay for a while after they are no longer needed"

    async def again():
        async with serving(quick_home, gpus=4, executor=executor, clock=clock) as live:
            ended = [row for row in live.queries.jobs(all=True) if row["status"] == "finished"]
            return snapshot.encode(live._state), len(ended)

    with_snapshot, ended = asyncio.run(again())
    with sqlite3.connect(quick_home.journal) as raw:
        raw.execute("DELETE FROM snapshots")
    raw.close()
    from_the_start, _ = asyncio.run(again())
    assert ended > 20
    assert with_snapshot == from_the_start
    assert with_snapshot["jobs"] == present["jobs"]


def test_a_damaged_snapshot_is_replaced_by_the_one_before(quick_home):
    options = {"executor": FakeExecutor(), "clock": FakeClock(1.0)}

    async def submit():
        async with serving(quick_home, **options) as live:
            return await one(live, shell("true", gpus=2))

    for _ in range(3):
        asyncio.run(submit())
    with sqlite3.connect(quick_home.journal) as raw:
        raw.execute("UPDATE snapshots SET data = '{}' WHERE seq = (SELECT max(seq) FROM snapshots)")
    raw.close()

    async def again():
        async with serving(quick_home, **options) as live:
            assert len(live.queries.jobs()) == 3
            assert any("an older one is used" in text for text in notes(live))

    asyncio.run(again())


def test_a_plain_job_survives_its_way_through_the_codec():
    from carpool.core.codec import decode, encode

    event = ev.Submitted(1.0, Job("1", 1.0, "m", 1, 8, 10, min_accumulation=2))
    assert decode(json.loads(json.dumps(encode(event)))) == event
