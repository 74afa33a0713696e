"""A service on PostgreSQL in this process: what it refuses, and what it keeps when it is stopped at a bad moment."""

import asyncio

import pytest

from carpool.errors import InputError
from carpool.live.errors import Deposed
from carpool.live.executors.memory import MemoryExecutor
from carpool.live.home import Home
from carpool.live.journal import leadership
from carpool.live.journal.postgres import PostgresJournal
from carpool.live.service import driver, opening
from carpool.live.service.config import ServiceConfig
from carpool.live.service.service import open_service
from tests.cluster.services import Relay
from tests.support.fakes import FakeClock
from tests.support.services import journalled, one, serving, shell


@pytest.fixture
def home(tmp_path):
    return Home(tmp_path / "home")


@pytest.fixture
def address(postgres):
    return postgres.new_database()


async def test_jobs_of_another_machine_are_taken_over_only_when_it_is_gone(home, address, monkeypatch):
    async with serving(home, database=PostgresJournal(address)):
        pass
    monkeypatch.setattr(opening, "machine", lambda: "another-machine")
    with pytest.raises(InputError, match=r"run on machine .*add --machine-is-gone"):
        async with serving(home, database=PostgresJournal(address)):
            pass
    async with serving(home, database=PostgresJournal(address), machine_is_gone=True) as service:
        assert service.store.meta()["machine"] == "another-machine"


async def test_a_service_that_lost_the_lead_ends(home, address, postgres):
    config = ServiceConfig(home, database=PostgresJournal(address), executor=MemoryExecutor())
    service = await open_service(config)
    running = asyncio.create_task(service.run())
    postgres.sql("UPDATE leader SET term = term + 1", address)
    with pytest.raises(Deposed):
        await asyncio.wait_for(running, 10)
    assert not service.store.leadership.leads()
    await service.close()
    assert postgres.sql("SELECT term, released FROM leader", address) == [(2, False)]


async def test_a_service_stopped_while_a_commit_is_in_doubt_loses_no_job(home, address, postgres, monkeypatch):
    """The client gets no answer, and the next service has the job with its code snapshot."""
    monkeypatch.setattr(driver, "RETRY_S", 0.1)
    relay = Relay(postgres.port)
    through = PostgresJournal(address.replace(f":{postgres.port}/", f":{relay.port}/"))
    folder = home.path.parent / "code"
    folder.mkdir()
    (folder / "train.py").write_text("")
    options = {"executor": MemoryExecutor(), "clock": FakeClock(1.0)}
    spec = shell("true", directory=str(folder), snapshot=True)
    try:
        async with serving(home, database=through, **options) as service:
            relay.swallow_after = b"COMMIT"
            relay.refusing = True  # no new connection: the doubt cannot be settled
            submitting = asyncio.create_task(one(service, spec))
            await asyncio.to_thread(relay.swallowed.wait, 10)
            await asyncio.sleep(0.3)
            assert not submitting.done()
        submitting.cancel()
        await asyncio.gather(submitting, return_exceptions=True)
        async with serving(home, database=PostgresJournal(address), **options) as service:
            (row,) = service.queries.jobs()
            assert (home.snapshot(row["job"]) / "train.py").exists()
            assert len(journalled(service, "Submitted")) == 1
    finally:
        relay.close()


async def test_a_leader_that_releases_is_followed_at_once(home, address):
    database = PostgresJournal(address)
    terms = []
    for _ in range(2):
        async with asyncio.timeout(leadership.TAKE_OVER_S):
            async with serving(home, database=database, executor=MemoryExecutor()) as service:
                terms.append(service.store.leadership.term)
    assert terms == [1, 2]
