"""The journal: durable, whole or not at all, upgraded from older releases, short after a snapshot."""

import asyncio
import json
import random
import sqlite3
from contextlib import closing

import pytest

from carpool import __version__
from carpool.core import events as ev
from carpool.core import snapshot
from carpool.core.model import Limits
from carpool.errors import InputError
from carpool.live.executors.memory import MemoryExecutor
from carpool.live.journal import schema
from carpool.live.journal import store as stores
from carpool.live.journal.store import Commit, Store, StoreError
from carpool.live.service import snapshots
from tests.support.fakes import FakeClock
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
INSERT INTO users VALUES ('eve', '{"token_hash": "x", "uid": 7000001}');
"""
"""The tables as the first release made them."""


async def test_a_home_of_the_first_release_is_upgraded_and_its_jobs_finish(home):
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

    async with serving(home) as live:
        assert await live.queries.wait("7") == "finished"
        assert live.queries.show("7")["name"] == "old"
        assert live.queries.users() == {"eve": {"token_hash": "x", "uid": 7_000_001}}
        assert await one(live, shell("true")) == "8"
        assert live.store.meta()["version"] == str(schema.VERSION)
        assert [live.store.release_of(seq) for seq in (1, 2, 3)] == ["0.1", "0.1", __version__]


async def test_a_home_of_a_newer_release_is_refused(home):
    home.create()
    store = Store(home.journal)
    store.open()
    await store.write(Commit(meta={"version": str(schema.VERSION + 1)}))
    store.close()
    with pytest.raises(InputError, match="newer release"):
        async with serving(home):
            pass


def tables(home) -> dict[str, list]:
    """Everything in the journal."""
    names = ("meta", "events", "jobs", "snapshots", "users", "estimates")
    with closing(sqlite3.connect(home.journal)) as raw:
        return {name: raw.execute(f"SELECT * FROM {name} ORDER BY 1").fetchall() for name in names}


async def test_an_event_of_an_unknown_kind_stops_the_start_and_nothing_is_lost(home):
    """A newer release wrote it: that is no damage, and the events after it must stay."""
    options = {"executor": MemoryExecutor(), "clock": FakeClock(1.0)}
    async with serving(home, **options) as live:
        jobs = [await one(live, shell("true")) for _ in range(3)]
    with closing(sqlite3.connect(home.journal)) as raw, raw:
        raw.execute("DELETE FROM snapshots")
        (middle,) = raw.execute(
            "SELECT seq FROM events WHERE kind = 'Submitted' ORDER BY seq LIMIT 1 OFFSET 1"
        ).fetchone()
        (data,) = raw.execute("SELECT data FROM events WHERE seq = ?", (middle,)).fetchone()
        foreign = json.dumps({"event": "Teleported", "at": 1.0, "job": "1"})
        raw.execute("UPDATE events SET kind = 'Teleported', data = ? WHERE seq = ?", (foreign, middle))
        releases = [[1, __version__], [middle, "9.9"], [middle + 1, __version__]]
        raw.execute("UPDATE meta SET value = ? WHERE key = 'releases'", (json.dumps(releases),))
    before = tables(home)
    with pytest.raises(InputError, match=r"^journal .*'Teleported'.* Carpool 9\.9 wrote it") as refused:
        async with serving(home, **options):
            pass
    assert "\n" not in str(refused.value)
    assert tables(home) == before
    with closing(sqlite3.connect(home.journal)) as raw, raw:
        raw.execute("UPDATE events SET kind = 'Submitted', data = ? WHERE seq = ?", (data, middle))
    async with serving(home, **options) as live:
        assert [row["job"] for row in live.queries.jobs()] == jobs
        assert not any("set aside" in text for text in notes(live))


async def test_each_release_that_writes_is_recorded_once(home, monkeypatch):
    home.create()
    for version in ("1.0", "1.0", "2.0"):
        monkeypatch.setattr(stores, "__version__", version)
        store = Store(home.journal)
        store.open()
        await store.write(Commit(meta={"policy": "fifo"}))
        await store.write(Commit(events=[ev.Held(1.0, "1")]))
        await store.write(Commit(notes=[(1.0, "a note")]))
        store.close()
    store = Store(home.journal)
    store.open()
    assert json.loads(store.meta()["releases"]) == [[1, "1.0"], [5, "2.0"]]
    assert [store.release_of(seq) for seq in (1, 4, 5, 6)] == ["1.0", "1.0", "2.0", "2.0"]
    store.close()


async def test_a_commit_is_written_whole_or_not_at_all(home):
    home.create()
    store = Store(home.journal)
    assert store.open() == 0
    row = {"id": 1, "user": "", "name": "", "spec": "{}", "submitted": 0.0, "source": "{}"}
    await store.write(Commit(events=[ev.Held(1.0, "1")], jobs=[row]))
    with pytest.raises(StoreError):
        await store.write(Commit(events=[ev.Released(2.0, "1")], jobs=[row]))  # the same id again
    await store.write(Commit(events=[ev.Cancelled(3.0, "1")]))
    assert list(store.events_after(0)) == [(1, ev.Held(1.0, "1")), (2, ev.Cancelled(3.0, "1"))]
    assert store._connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2, "a commit waits for the disk"
    assert store._connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
    store.close()


async def test_requests_that_arrive_together_share_one_sync(quick_home):
    async with serving(quick_home, executor=MemoryExecutor(), clock=FakeClock(1.0)) as live:
        commits = 0
        real = live.store._write

        def counted(commit):
            nonlocal commits
            commits += 1
            real(commit)

        live.store._write = counted
        await asyncio.gather(*(one(live, shell("true")) for _ in range(500)))
        assert commits < 250  # the service looks at two directories and scripts of a user at a time


async def test_a_restart_from_a_snapshot_gives_the_state_that_a_whole_replay_gives(quick_home, monkeypatch):
    """Jobs that ended leave the state and the snapshot; their rows stay."""
    monkeypatch.setattr(snapshots, "SNAPSHOT_EVENTS", 50)
    clock, drawn = FakeClock(1.0), random.Random(5)
    executor = MemoryExecutor(gpus=4)

    async def play():
        async with serving(quick_home, executor=executor, clock=clock) as live:
            await live.requests.put_user("bob", {"uid": 7_000_001})
            await live.requests.set_limits("bob", Limits(jobs=1))
            for _ in range(80):
                clock.time += drawn.choice([0.0, 1.0, 20.0])
                known = sorted(live.book.specs)
                after = drawn.sample(known, min(2, len(known))) if drawn.random() < 0.2 else []
                fields = {"gpus": drawn.randint(1, 4), "duration_s": drawn.randint(5, 500), "after": after}
                await one(live, shell("true", name=drawn.choice("abc"), **fields), drawn.choice(["admin", "bob"]))
                for key in list(executor.gangs):
                    if drawn.random() < 0.5:
                        executor.start(key)
                    elif drawn.random() < 0.5:
                        del executor.gangs[key]
                        live.inbox.add_events(ev.Finished(clock.time, *key))
                await live.driver.turn()
            await asyncio.sleep(0.1)
            return snapshot.encode(live.state), live.driver.settled

    (present, settled) = await play()
    assert settled
    store = Store(quick_home.journal)
    store.open()
    taken = [seq for seq, _ in store.snapshots()]
    first = next(seq for seq, _ in store.events_after(0))
    store.close()
    assert len(taken) == 2
    assert taken[-1] > 100, "two snapshots are kept"
    assert first == 1, "events stay for a while after they are no longer needed"

    async def again():
        async with serving(quick_home, executor=executor, clock=clock) as live:
            ended = [row for row in live.queries.jobs(all=True) if row["status"] == "finished"]
            return snapshot.encode(live.state), len(ended)

    with_snapshot, ended = await again()
    with sqlite3.connect(quick_home.journal) as raw:
        raw.execute("DELETE FROM snapshots")
    raw.close()
    from_the_start, _ = await again()
    assert ended > 20
    assert with_snapshot == from_the_start
    assert with_snapshot["jobs"] == present["jobs"]


async def test_a_damaged_snapshot_is_replaced_by_the_one_before(quick_home):
    options = {"executor": MemoryExecutor(), "clock": FakeClock(1.0)}

    async def submit():
        async with serving(quick_home, **options) as live:
            return await one(live, shell("true", gpus=2))

    for _ in range(3):
        await submit()
    with sqlite3.connect(quick_home.journal) as raw:
        raw.execute("UPDATE snapshots SET data = '{}' WHERE seq = (SELECT max(seq) FROM snapshots)")
    raw.close()

    async with serving(quick_home, **options) as live:
        assert len(live.queries.jobs()) == 3
        assert any("an older one is used" in text for text in notes(live))
