"""The leader of a shared journal, with stores in this process and short times."""

import asyncio
import random
import signal
import time

import pytest
from sqlalchemy import bindparam, text

from carpool.core import events as ev
from carpool.live.errors import Deposed, Unavailable
from carpool.live.journal import keeper, leadership, postgres, schema
from carpool.live.journal.postgres import PostgresJournal
from carpool.live.journal.store import Commit, CommitInDoubt, Store, StoreError
from tests.cluster.services import Relay
from tests.support.postgres import PASSWORD, PostgresServer

NOTE = Commit(notes=[(1.0, "x")])


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(leadership, "RENEW_S", 0.1)
    monkeypatch.setattr(leadership, "LEASE_S", 0.6)
    monkeypatch.setattr(leadership, "TAKE_OVER_S", 0.8)
    monkeypatch.setattr(leadership, "LOOK_S", 0.05)


@pytest.fixture
def open_store(postgres):
    """A function that opens a store on the test's database."""
    address, stores = postgres.new_database(), []

    def opened(through: int | None = None) -> Store:
        where = address if through is None else address.replace(f":{postgres.port}/", f":{through}/")
        store = Store(PostgresJournal(where))
        stores.append(store)
        store.open()
        return store

    opened.address = address
    yield opened
    for store in stores:
        store.close()


async def freeze(store: Store) -> None:
    """Let a store renew nothing more, as if its process were stopped."""
    await asyncio.to_thread(store._keeper.stop)


async def test_a_standby_waits_as_long_as_the_leader_renews(open_store):
    first, second = open_store(), open_store()
    await first.lead()
    told = []
    waiting = asyncio.create_task(second.lead(told.append))
    await asyncio.sleep(2.0)
    assert not waiting.done()
    assert first.leadership.leads()
    assert not second.leadership.leads()
    assert [state.term for state in told] == [1]
    with pytest.raises(Deposed):
        await second.write(NOTE)
    first.close()
    await asyncio.wait_for(waiting, 0.7)
    assert second.leadership.term == 2


async def test_a_leader_that_does_not_renew_is_deposed_and_writes_nothing(open_store):
    first, second = open_store(), open_store()
    await first.lead()
    await first.write(Commit(events=[ev.Held(1.0, "1")]))
    await freeze(first)
    began = time.monotonic()
    await second.lead()
    assert 0.6 < time.monotonic() - began < 3.0
    assert not first.leadership.leads(), "it knows by its own clock"
    for forbidden in (
        first.write(Commit(events=[ev.Held(2.0, "1")])),
        first.keep_snapshot({}, 1, 0),
        first.set_aside(1),
        first.renew(),
        first.transact(lambda connection: connection.execute(text("DELETE FROM events")) and None),
    ):
        with pytest.raises(Deposed):
            await forbidden
    assert first.leadership.lost.is_set()
    await second.write(Commit(events=[ev.Held(3.0, "1")]))
    assert list(second.events_after(0)) == [(1, ev.Held(1.0, "1")), (2, ev.Held(3.0, "1"))]
    first.close()
    assert not second.leader().released, "an old leader does not release the lead of another"


async def test_the_lease_runs_out_before_another_can_lead(open_store):
    first, second = open_store(), open_store()
    await first.lead()
    await freeze(first)
    leading = asyncio.create_task(second.lead())
    while not second.leadership.term:
        both = first.leadership.leads() and second.leadership.leads()
        assert not both
        await asyncio.sleep(0.005)
    assert not first.leadership.leads()
    await leading


ROWS = [{"key": f"stuck{number}", "value": "x"} for number in range(3)]
WRITES = {
    "a row": lambda connection: connection.execute(schema.meta.insert().values(**ROWS[0])),
    "rows": lambda connection: connection.execute(schema.meta.insert(), ROWS),
    "changes": lambda connection: connection.execute(
        schema.meta.update().where(schema.meta.c.key == bindparam("name")), [{"name": "version", "value": "0"}] * 3
    ),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
async def test_a_leader_stopped_inside_a_transaction_does_not_keep_the_lock(open_store, monkeypatch, write):
    monkeypatch.setitem(postgres.SETTINGS, "idle_in_transaction_session_timeout", "500ms")
    first = open_store()
    await first.lead()
    second = open_store()
    before = second.meta()

    def stuck(connection):
        write(connection)
        time.sleep(3.0)  # as if the process were stopped here

    hanging = asyncio.create_task(first.transact(stuck))
    await asyncio.sleep(0.2)
    await freeze(first)
    await asyncio.wait_for(second.lead(), 2.5)
    with pytest.raises((StoreError, Deposed)):
        await hanging
    assert second.meta() == before


async def test_a_busy_service_keeps_the_lead_and_a_stuck_one_does_not(open_store, monkeypatch):
    store = open_store()
    await store.lead()
    time.sleep(2.0)  # the event loop stands still for longer than a lease
    assert store.leadership.leads()
    monkeypatch.setattr(keeper, "STUCK_S", 0.3)
    time.sleep(1.0)
    assert not store.leadership.leads()
    beat = store.leader().beat
    time.sleep(0.5)
    assert store.leader().beat == beat, "another service can take over"
    await asyncio.sleep(0.5)
    assert store.leadership.leads(), "nobody did, and it turns again"


async def test_one_of_many_leads_each_term(open_store):
    """Whoever leads writes its name; the journal shows that names do not mix."""
    drawn, stores = random.Random(4), [open_store() for _ in range(4)]
    leaders: list[Store] = []

    async def reign(store: Store) -> None:
        await store.lead()
        leaders.append(store)
        try:
            for _ in range(drawn.randint(3, 8)):
                await store.write(Commit(notes=[(1.0, str(store.leadership.term))]))
                await asyncio.sleep(0.01)
        finally:
            if drawn.random() < 0.5:
                await freeze(store)
            else:
                store.close()

    await asyncio.gather(*map(reign, stores))
    assert sorted(store.leadership.term or 0 for store in leaders) == sorted(
        store.leadership.term or 0 for store in stores
    )
    last = open_store()
    terms = [row["data"] for row in last.rows()]
    assert terms == sorted(terms), "a later term never writes before an earlier one"
    assert len(set(terms)) == 4
    assert [row["seq"] for row in last.rows()] == list(range(1, len(terms) + 1))


async def test_an_outage_of_the_database_changes_no_leader(postgres, open_store):
    relay = Relay(postgres.port)
    try:
        first, second = open_store(relay.port), open_store(relay.port)
        await first.lead()
        waiting = asyncio.create_task(second.lead())
        await asyncio.sleep(0.3)
        relay.refusing = True
        relay.cut()
        await asyncio.sleep(1.5)  # longer than a standby waits
        assert not first.leadership.leads()
        relay.refusing = False
        await asyncio.sleep(0.6)
        assert first.leadership.leads()
        assert not waiting.done()
        await first.write(NOTE)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    finally:
        for store in (first, second):
            store.close()
        relay.close()


async def test_a_commit_in_doubt_is_found_or_not_found(postgres, open_store):
    relay = Relay(postgres.port)
    try:
        store = open_store(relay.port)
        await store.lead()
        await freeze(store)
        for number, written in enumerate((True, False, True), 1):
            if written:
                relay.swallow_after = b"COMMIT"
            else:
                relay.cut_before = b"COMMIT"
            commit = Commit(meta={f"doubt-{number}": "x"}, events=[ev.Held(float(number), "1")] * (number % 2))
            with pytest.raises(CommitInDoubt):
                await store.write(commit)
            assert await store.settle() is written
            assert (f"doubt-{number}" in store.meta()) is written
        await store.write(Commit(events=[ev.Held(9.0, "1")]))
        assert [event.at for _, event in store.events_after(0)] == [1.0, 3.0, 9.0]
    finally:
        store.close()
        relay.close()


async def test_every_call_has_a_deadline(monkeypatch):
    monkeypatch.setattr(postgres, "ANSWER_S", 1.0)
    server = PostgresServer().start()
    try:
        store = Store(PostgresJournal(server.new_database()))
        store.open()
        await store.lead()
        server.signal(signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(StoreError, match="did not answer within 1 s") as failed:
            await store.write(NOTE)
        with pytest.raises(Unavailable):
            await asyncio.to_thread(store.meta)
        assert time.monotonic() - began < 8.0
        assert PASSWORD not in str(failed.value)
        server.signal(signal.SIGCONT)
        await store.renew()
        await store.write(NOTE)
        store.close()
    finally:
        server.signal(signal.SIGCONT)
        server.close()


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("postgresql://u:secret@h:5/d", "postgresql://u@h:5/d"),
        ("postgres://u@h/d?password=secret&sslmode=require", "postgresql://u@h/d"),
        ("postgresql:///d?host=/run/pg&user=u", "postgresql://u@/d?host=/run/pg"),
    ],
)
def test_an_address_is_shown_without_its_secrets(address, shown):
    place = PostgresJournal(address)
    assert str(place) == shown
    assert "secret" not in repr(place)
    assert place.has_password == ("secret" in address)
    assert PostgresJournal(shown).has_password is False
    if place.has_password:
        assert place.reason(ValueError("a secret here")) == "a *** here"
