"""A job that needs a node which lasts longer is on hold until there is one, also over a restart of the service."""

import json

import pytest

from carpool.core.model import Status
from carpool.live.executors.local import LocalExecutor
from carpool.live.executors.registry import BUILT_IN
from carpool.live.service.longer_nodes import ROW, LongerNodes
from tests.support.services import notes, one, serving, settle, shell, started, until

LONG_S = 3600.0


@pytest.fixture
def seconds_left(monkeypatch):
    """For how long the GPUs stay: a list of one number, which the test may change."""
    left = [60.0]

    class EndingExecutor(LocalExecutor):
        def seconds_left(self, gpus):
            return left[0]

    monkeypatch.setitem(BUILT_IN, "local", EndingExecutor)
    return left


def is_held(service, job):
    return service.state.jobs[job].status is Status.HELD


async def held_job(service):
    job = await one(service, shell("sleep 60", duration_s=LONG_S, can_checkpoint=False))
    await until(lambda: is_held(service, job))
    return job


async def test_it_is_released_by_the_next_service_when_a_longer_node_comes(home, seconds_left):
    async with serving(home) as service:
        job = await held_job(service)
        assert any("it is released when a node lasts longer" in note for note in notes(service))
    async with serving(home) as service:
        longer_nodes = service.driver.dispatcher.longer_nodes
        assert list(longer_nodes.gpus()) == [1]
        longer_nodes.release(LONG_S / 2, service.clock.now())
        await settle(service)
        assert is_held(service, job)
        seconds_left[0] = 2 * LONG_S
        longer_nodes.release(2 * LONG_S, service.clock.now())
        await started(service, job)
        assert json.loads(service.store.meta()[ROW]) == {}
        await service.requests.cancel(job)
        await service.queries.wait(job)


async def test_a_job_that_its_owner_released_and_held_again_stays_on_hold(home, seconds_left):
    async with serving(home) as service:
        job = await held_job(service)
        seconds_left[0] = 2 * LONG_S
        await service.requests.release(job)
        await started(service, job)
        service.driver.dispatcher.longer_nodes.release(0.0, service.clock.now())  # the look of a keeper
        await settle(service)
        await service.requests.hold(job)
        await service.requests.requeue(job)
        await until(lambda: is_held(service, job))
    async with serving(home) as service:
        assert not service.driver.dispatcher.longer_nodes.needed_s
        await service.requests.cancel(job)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"1": "x"}', '{"9": 5}', "7"])
async def test_a_damaged_row_holds_no_job(home, text):
    async with serving(home) as service:
        assert LongerNodes(service.state, service.inbox, text).needed_s == {}
