"""Agents pass the contract of every executor: gangs on one node, with real processes, through the exchange."""

import pytest_asyncio

from carpool.live.executors.contract import ExecutorContract
from tests.support.agents import agent_world


class TestAgents(ExecutorContract):
    @pytest_asyncio.fixture
    async def make_executor(self, tmp_path):
        async with agent_world(tmp_path) as world:
            yield world.make_executor
