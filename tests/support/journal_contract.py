"""What every journal must do, wherever it is: a suite for SQLite and PostgreSQL.

Derive a test class from `JournalContract`, with a fixture `place` that returns a function. Each of its calls returns
the same journal, as a service that is started again opens it.
"""

import asyncio
import json
import random

import pytest

from carpool import __version__
from carpool.core import events as ev
from carpool.errors import InputError
from carpool.live.journal import schema
from carpool.live.journal import store as stores
from carpool.live.journal.store import Commit, Store, StoreError

BIG = 2**40
"""A number that does not fit into 32 bits."""


def job_row(number: int, **more) -> dict:
    return {"id": number, "user": "eve", "name": "ü", "spec": "{}", "submitted": 0.5, "source": "{}", **more}


class Opened:
    """A store that leads, for one block."""

    def __init__(self, place) -> None:
        self.store = Store(place)

    async def __aenter__(self) -> Store:
        try:
            self.store.open()
            await self.store.lead()
        except BaseException:
            self.store.close()
            raise
        return self.store

    async def __aexit__(self, *_) -> None:
        self.store.close()


class JournalContract:
    async def test_what_is_written_is_there_after_a_restart(self, place):
        story = {"id": 1, "state": "finished", "ended": 2.5, "story": '{"job": "1"}'}
        estimate = {"job": 1, "kind": "end", "at": 1.0, "value": 2.0, "low": 1.0, "high": 3.0, "actual": 2.5}
        async with Opened(place()) as store:
            await store.write(Commit(events=[ev.Held(1.0, "1")], jobs=[job_row(1), job_row(2)], users={"eve": "{}"}))
            await store.write(Commit(stories=[story], meta={"policy": "fifo"}, notes=[(1.5, "a note")]))
            await store.write(Commit(users={"eve": '{"uid": 7}'}, estimates=[{**estimate, "source": "{}"}] * 2))
        async with Opened(place()) as store:
            assert list(store.events_after(0)) == [(1, ev.Held(1.0, "1"))]
            assert store.seq == 2, "notes are numbered too"
            assert store.users() == {"eve": {"uid": 7}}
            assert store.meta()["policy"] == "fifo"
            assert store.job(1) == {**job_row(1), **story}
            assert [row["id"] for row in store.living_jobs()] == [2]
            assert [row["id"] for row in store.ended_jobs(5)] == [1]
            assert store.ends() == [("1", "eve", 2.5)]
            assert store.known_jobs() == {1, 2}
            assert [row["actual"] for row in store.estimates()] == [2.5, 2.5]
            assert [json.loads(row["data"]) for row in store.rows() if row["kind"] == "Note"] == ["a note"]
            assert store.last_moment()[0] == 1.5

    async def test_the_history_is_in_the_order_of_the_ends(self, place):
        ends = {1: 9.0, 2: 3.0, 3: 9.0, 4: None, 5: 5.0}
        async with Opened(place()) as store:
            await store.write(Commit(jobs=[job_row(number) for number in range(1, 7)]))
            stories = [{"id": job, "state": "finished", "ended": at, "story": "{}"} for job, at in ends.items()]
            await store.write(Commit(stories=stories))

            def ids(limit, before=None, user=None):
                return [row["id"] for row in store.latest_ended(limit, before, user)]

            assert ids(9) == [3, 1, 5, 2, 4]
            assert ids(2) == [3, 1]
            assert ids(2, (9.0, 3)) == [1, 5]
            assert ids(9, (3.0, 2)) == [4]
            assert ids(9, user="nobody") == []

    async def test_a_commit_is_written_whole_or_not_at_all(self, place):
        async with Opened(place()) as store:
            await store.write(Commit(events=[ev.Held(1.0, "1")], jobs=[job_row(1)]))
            with pytest.raises(StoreError):
                await store.write(Commit(events=[ev.Released(2.0, "1")], jobs=[job_row(1)]))  # the same id again
            await store.write(Commit(events=[ev.Cancelled(3.0, "1")]))
            assert list(store.events_after(0)) == [(1, ev.Held(1.0, "1")), (2, ev.Cancelled(3.0, "1"))]

    async def test_an_error_shows_neither_statement_nor_values(self, place):
        async with Opened(place()) as store:
            secret = job_row(1, spec='{"env": {"KEY": "hunter2"}}')
            await store.write(Commit(jobs=[secret]))
            with pytest.raises(StoreError) as refused:
                await store.write(Commit(jobs=[secret]))
        assert "hunter2" not in str(refused.value)
        assert "INSERT" not in str(refused.value)
        assert "\n" not in str(refused.value)

    async def test_numbers_are_longer_than_32_bits(self, place):
        async with Opened(place()) as store:
            store.seq = BIG
            await store.write(Commit(events=[ev.Held(1.0, str(BIG))], jobs=[job_row(BIG)]))
            await store.keep_snapshot({"x": 1}, BIG, 10)
            row = {"job": BIG, "kind": "end", "at": 1.0, "value": 2.0, "low": 1.0, "high": 3.0, "actual": 2.5}
            await store.write(Commit(estimates=[{**row, "source": "{}"}]))
        async with Opened(place()) as store:
            assert store.seq == BIG + 1
            assert store.job(BIG)["id"] == BIG
            assert [seq for seq, _ in store.snapshots()] == [BIG]
            assert store.estimates()[0]["job"] == BIG

    async def test_times_keep_their_precision(self, place):
        moment = 1_800_000_000.123456
        async with Opened(place()) as store:
            await store.write(Commit(events=[ev.Held(moment, "1")], jobs=[job_row(1, submitted=moment)]))
            assert store.job(1)["submitted"] == moment
            assert store.last_moment()[0] == moment

    async def test_two_snapshots_are_kept_and_old_events_go(self, place):
        async with Opened(place()) as store:
            await store.write(Commit(events=[ev.Held(float(n), "1") for n in range(1, 51)]))
            for seq in (10, 20, 30):
                await store.keep_snapshot({"seq": seq}, seq, 5)
            assert [data["seq"] for _, data in store.snapshots()] == [30, 20]
            assert next(seq for seq, _ in store.events_after(0)) == 16
            assert [seq for seq, _ in store.events_after(48)] == [49, 50]

    async def test_events_that_are_set_aside_stay_out_of_every_replay(self, place):
        async with Opened(place()) as store:
            await store.write(Commit(events=[ev.Held(float(n), "1") for n in range(1, 6)], notes=[(1.0, "x")]))
            await store.set_aside(3)
        async with Opened(place()) as store:
            assert [seq for seq, _ in store.events_after(0)] == [1, 2]
            assert store.seq == 6

    async def test_a_gap_between_events_is_noticed(self, place):
        async with Opened(place()) as store:
            await store.write(Commit(events=[ev.Held(1.0, "1")]))
            store.seq += 1
            await store.write(Commit(events=[ev.Held(2.0, "1")]))
            assert list(store.events_after(0)) == [(1, ev.Held(1.0, "1")), (3, None)]

    async def test_many_events_are_read_in_order(self, place, monkeypatch):
        monkeypatch.setattr("carpool.live.journal.reader.PAGE", 7)
        async with Opened(place()) as store:
            await store.write(Commit(events=[ev.Held(float(n), "1") for n in range(1, 51)]))
            assert [(seq, event.at) for seq, event in store.events_after(3)] == [(n, float(n)) for n in range(4, 51)]

    async def test_a_journal_of_a_newer_release_is_refused(self, place):
        async with Opened(place()) as store:
            await store.write(Commit(meta={"version": str(schema.VERSION + 1)}))
        with pytest.raises(InputError, match="newer release"):
            async with Opened(place()):
                pass

    async def test_each_release_that_writes_is_recorded_once(self, place, monkeypatch):
        for version in ("1.0", "1.0", "2.0"):
            monkeypatch.setattr(stores, "__version__", version)
            async with Opened(place()) as store:
                await store.write(Commit(meta={"policy": "fifo"}))
                await store.write(Commit(events=[ev.Held(1.0, "1")]))
        async with Opened(place()) as store:
            assert json.loads(store.meta()["releases"]) == [[1, "1.0"], [3, "2.0"]]
            assert [store.release_of(seq) for seq in (1, 2, 3)] == ["1.0", "1.0", "2.0"]
        assert __version__ not in ("1.0", "2.0")

    async def test_the_term_grows_with_every_start(self, place):
        terms = []
        for _ in range(3):
            async with Opened(place()) as store:
                assert store.leadership.leads()
                await store.write(Commit(notes=[(1.0, "x")]))
                terms.append(store.leadership.term)
        assert terms == [1, 2, 3]

    async def test_nothing_leads_before_it_took_the_lead(self, place):
        store = Store(place())
        store.open()
        assert not store.leadership.leads()
        assert store.leader().released
        store.close()

    async def test_commits_from_many_tasks_are_numbered_without_gaps(self, place):
        drawn = random.Random(3)
        async with Opened(place()) as store:
            batches = [[ev.Held(1.0, "1")] * drawn.randint(0, 5) for _ in range(40)]
            await asyncio.gather(*(store.write(Commit(events=list(batch))) for batch in batches))
            assert [row["seq"] for row in store.rows()] == list(range(1, sum(map(len, batches)) + 1))
