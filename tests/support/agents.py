"""Agents in the process of a test: real local executors, and a road that calls the cluster's executor directly."""

import asyncio
from contextlib import asynccontextmanager

from carpool.errors import InputError
from carpool.live.agent.agent import Agent, AgentOptions
from carpool.live.agent.road import NoAnswer, Turned
from carpool.live.executors import wire
from carpool.live.executors.base import ExecutorOptions, OnlyService
from carpool.live.executors.cluster import ClusterExecutor
from carpool.live.executors.contract import eventually
from carpool.live.home import Home
from carpool.live.http.agent_routes import append_to_log
from carpool.live.http.api import status_of

LEASE = {"lease": "30s", "margin": "2s"}


class DirectRoad:
    """A road without HTTP. `cut` makes it fail, as a network does; `end` names where it leads."""

    url = "direct"
    timeout_s = 5.0

    def __init__(self, world):
        self.world = world
        self.loop = asyncio.get_running_loop()
        self.cut = False
        self.lose_answers = False

    def sync(self, state):
        executor = self._there()
        told = wire.read(wire.NodeState, wire_copy(state))
        asked = asyncio.run_coroutine_threadsafe(executor.sync(told), self.loop)
        try:
            answer = asked.result(10.0)
        except InputError as error:
            raise Turned(503, str(error)) from None
        self._there()
        if self.lose_answers:
            raise NoAnswer("the answer was lost")
        return wire_copy(wire.plain(answer))

    def send_log(self, data, job, attempt, rank, stream, offset):
        executor = self._there()
        return append_to_log(executor.home.rank(job, attempt, rank) / f"{stream}.log", offset, data)

    def doors(self, here):
        here = wire.read(wire.DoorsHere, wire_copy(here))
        return wire_copy(wire.plain(self._await(lambda doors: doors.fetch(here), here.instance)))

    def bring_from_door(self, data, place):
        async def bring(doors):
            return doors.bring(place["door"], place["offset"], data, last=bool(place["last"]))

        return self._await(bring, place["instance"])

    def _await(self, ask, instance):
        """Ask at the doors of the node whose agent it is."""
        executor = self._there()
        name = next(name for name, road in self.world.roads.items() if road is self)

        async def asked():
            return await ask(executor.doors_for(name, instance))

        try:
            return asyncio.run_coroutine_threadsafe(asked(), self.loop).result(10.0)
        except InputError as error:
            raise Turned(status_of(error), str(error)) from None

    def close(self):
        return

    def _there(self):
        if self.cut or self.world.executor is None:
            raise NoAnswer("the road is cut")
        return self.world.executor


def wire_copy(data):
    import json

    return json.loads(json.dumps(data))


class JoinedExecutor(ClusterExecutor):
    """A cluster's executor that, for the contract, has its nodes from the start and waits for what they say."""

    world = None

    async def recover(self, known, listener):
        found = await super().recover(known, listener)
        self.world.executor = self
        agents = self.world.agents
        await eventually(lambda: all(self._has_heard(agent) for agent in agents.values()))
        return {key for key in found if key in self._gangs or listener_knows(listener, key)}

    def _has_heard(self, agent):
        node = self.book.nodes.get(agent.options.node)
        settled = set(agent.parts.parts) <= set(self._gangs)
        told = all(part.state is not None for gang in self._gangs.values() for part in gang.parts.values())
        return node is not None and node.heard and node.instance == agent.instance and settled and told

    async def close(self):
        self.world.executor = None
        await super().close()


def listener_knows(listener, key):
    return any(ended.key == key for ended in getattr(listener, "ended", ()))


class AgentWorld:
    """A home of a service, and agents that look for its executor."""

    def __init__(self, folder, nodes, gpus=2, settings=LEASE):
        self.home = Home(folder / "service")
        self.home.create()
        self.folder, self.nodes, self.gpus, self.settings = folder, nodes, gpus, settings
        self.agents, self.running, self.roads = {}, {}, {}
        self.executor = None
        self.term = 0

    def make_executor(self, **more):
        self.term += 1
        options = ExecutorOptions(self.home, settings=self.settings, leadership=OnlyService(self.term), **more)
        executor = JoinedExecutor(options)
        executor.world = self
        return executor

    def start(self, name):
        road = self.roads[name] = DirectRoad(self)
        options = AgentOptions(Home(self.folder / name), name, "127.0.0.1", gpus=self.gpus)
        agent = self.agents[name] = Agent(options, road)
        self.running[name] = asyncio.create_task(agent.run())
        return agent

    async def end(self, name):
        self.agents[name].end()
        await self.running.pop(name)


@asynccontextmanager
async def agent_world(folder, nodes=("a",), **options):
    world = AgentWorld(folder, nodes, **options)
    for name in nodes:
        world.start(name)
    try:
        yield world
    finally:
        for name in list(world.running):
            await world.end(name)
