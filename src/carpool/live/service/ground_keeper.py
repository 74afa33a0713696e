"""Keeps the nodes that a ground hands out: as many as the queue needs, none that is idle, none beyond its end.

The service runs it where it was started with `--on`. It asks the ground every few seconds and at once when a request
waits for the answer; an answer that does not come changes nothing. It is also the service's witness: a node of the
ground is lost only when the ground has had it on record, for a lease and a margin, that the node's pilot has ended.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from carpool.core.state import State
from carpool.errors import InputError
from carpool.live.clock import Clock, since_boot
from carpool.live.errors import Unavailable
from carpool.live.executors.cluster import ClusterExecutor
from carpool.live.executors.nodes import ClusterNode
from carpool.live.grounds.base import HAND, Ground, JoinTicket, Pilot, PilotStatus
from carpool.live.grounds.tickets import new_pilot, remove_ticket
from carpool.live.home import Home
from carpool.live.service.inbox import Inbox
from carpool.live.service.longer_nodes import LongerNodes
from carpool.live.text import clock as time_of_day

log = logging.getLogger("carpool.live")

ASK_S, SOON_S = 5.0, 0.5
"""Seconds between two questions to the ground: usually, and while something is awaited from it."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 300.0
"""Seconds before the next pilot after one that ended without joining."""
FORGOTTEN_S = 120.0
"""Seconds after which a pilot that was submitted and that the ground does not know counts as never submitted."""


class NotOfThisGround(InputError):
    """A pilot that the ground says does not run."""


@dataclass(frozen=True, slots=True)
class NodePlan:
    """How many nodes the operator wants, and how quickly they come and go."""

    least: int = 1
    most: int = 1
    grow_s: float = 5.0
    """Seconds that a job waits before a node is asked for."""
    idle_s: float = 300.0
    """Seconds without a job after which a node is given back."""
    save_s: float = 300.0
    """Seconds before its end at which jobs of a node save and move."""


@dataclass
class GroundKeeper:
    """Asks a ground for nodes and gives them back."""

    ground: Ground
    plan: NodePlan
    cluster: ClusterExecutor
    state: State
    inbox: Inbox
    clock: Clock
    home: Home
    longer_nodes: LongerNodes
    """Jobs on hold that need a node which lasts longer."""
    ticket: Callable[[str], JoinTicket]
    """Returns the ticket of a new pilot."""
    pilots: dict[str, Pilot] = field(default_factory=dict)
    """Pilots as the ground listed them last."""
    problem: str = ""
    """Why the ground could not be asked the last time; empty: it could."""
    refusal: str = ""
    """Why the ground did not take the last pilot; empty: it did."""
    failure: str = ""
    """How the last pilot ended, if that was before its agent joined; empty: it joined."""
    _asked: float = -math.inf
    """When the last question that was answered was asked."""
    _ended: dict[str, float] = field(default_factory=dict)
    """Since when the ground has had it on record that a pilot of a present node has ended."""
    _submitted: dict[str, float] = field(default_factory=dict)
    """Pilots that were submitted and that the ground has not listed so far, with the time."""
    _joined: set[str] = field(default_factory=set)
    """Pilots whose agents joined."""
    _idle: dict[str, float] = field(default_factory=dict)
    """Since when nodes have had no job."""
    _failures: int = 0
    _pause_until: float = 0.0
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.cluster.members.may_run = self.may_run
        self.cluster.members.save_s = self.plan.save_s
        self.cluster.members.end_of = lambda pilot: self.pilots[pilot].ends_at if pilot in self.pilots else None

    async def run(self) -> None:
        while True:
            self._wake.clear()
            try:
                self.cluster.check_leading()
                await self.look()
            except Unavailable:
                pass
            except InputError as error:
                self._trouble(str(error))
            except Exception:  # the next look must happen
                log.exception("the ground could not be looked at")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), SOON_S if self._awaits() else ASK_S)
            await asyncio.sleep(SOON_S / 2)  # however often it is woken

    def _trouble(self, problem: str) -> None:
        if not self.problem:
            self.inbox.note(f"{self.ground.name} cannot be asked ({problem}); it is tried again")
        self.problem = problem

    def _refused(self, why: str) -> None:
        """Remember why there is no node, until the ground takes a pilot."""
        if self.refusal != why:
            self.inbox.note(f"{self.ground.name} gives no node ({why}); it is asked again every two minutes")
        self.refusal = why

    def _awaits(self) -> bool:
        """Return whether something new is expected from the ground."""
        running = {node.record.pilot for node in self._nodes()}
        return (
            bool(self._submitted or self._ended)
            or any(node.silent for node in self._nodes())
            or any(pilot.status is PilotStatus.RUNNING and pilot.id not in running for pilot in self.pilots.values())
        )

    def _nodes(self) -> list[ClusterNode]:
        """Return the present nodes of this ground."""
        return [node for node in self.cluster.book.present if node.record.ground == self.ground.name]

    # ---- what others ask -------------------------------------------------------------------------------------------

    def node_of(self, pilot: str) -> str:
        """Return the node for which a pilot's agent may speak: the one on which the ground runs it, or ran it."""
        known = self.pilots.get(pilot)
        if known is not None and known.status is PilotStatus.RUNNING:
            return known.node
        for node in self._nodes():
            if node.record.pilot == pilot:
                return node.name
        if known is not None and not known.alive:
            raise NotOfThisGround(f"{self.ground.name} says that pilot {pilot} has ended; its agent must end, too")
        self._wake.set()
        raise Unavailable(f"{self.ground.name} has not said so far where pilot {pilot} runs; try again")

    def may_run(self, node: ClusterNode) -> bool:
        """Return whether workers may run on a node whose lease is over. They may not once the ground has denied its
        pilot for so long that no earlier answer to its agent counts any more, and still denies it."""
        if node.record.ground == HAND:
            return False
        if node.record.ground != self.ground.name:
            return True
        since = self._ended.get(node.record.pilot)
        lease_s = self.cluster.members.lease_of(node)
        return since is None or self._asked < since + lease_s + self.cluster.margin_s

    def row(self) -> dict[str, Any]:
        """Return the ground as operators see it."""
        count = dict.fromkeys(PilotStatus, 0)
        for pilot in self.pilots.values():
            count[pilot.status] += 1
        waiting = [pilot.why for pilot in self.pilots.values() if pilot.status is PilotStatus.WAITING and pilot.why]
        return {
            "name": self.ground.name,
            "least": self.plan.least,
            "most": self.plan.most,
            "waiting": count[PilotStatus.WAITING],
            "running": count[PilotStatus.RUNNING],
            "why_waiting": waiting[0] if waiting else "",
            "asked_s": None if self._asked < 0 else since_boot() - self._asked,
            "problem": self.problem,
            "refusal": self.refusal,
            "failure": self.failure,
        }

    # ---- looking ---------------------------------------------------------------------------------------------------

    async def look(self) -> None:
        """Ask the ground once, and do what follows."""
        asked = since_boot()
        found = {pilot.id: pilot for pilot in await self.ground.pilots()}
        if self.problem:
            self.inbox.note(f"{self.ground.name} answers again")
        self.problem = ""
        await self._take(found, asked)
        await self._give_up_silent()
        self._obey_ends()
        self._release_held()
        await self._resize()

    async def _take(self, found: dict[str, Pilot], asked: float) -> None:
        now = since_boot()
        joined = {node.record.pilot for node in self._nodes()}
        if joined - self._joined:
            self.failure = ""
        self._joined.update(joined)
        for pilot in self.pilots.values():
            if pilot.alive and not (pilot.id in found and found[pilot.id].alive):
                await self._pilot_ended(pilot)
        for pilot in found.values():
            if pilot.id in self._submitted and not pilot.alive:  # it started and ended since the last look
                await self._pilot_ended(pilot)
        self.pilots = found
        for name in self._submitted.keys() & found.keys():
            del self._submitted[name]
        for name, at in list(self._submitted.items()):
            if now - at > FORGOTTEN_S:
                del self._submitted[name]
        present = {node.record.pilot: node for node in self._nodes()}
        for name, node in present.items():
            listed = found.get(name)
            if listed is not None and listed.alive:
                self._ended.pop(name, None)
                self.cluster.members.set_end(node.name, listed.ends_at)
            else:
                self._ended.setdefault(name, now)
        for name in [name for name in self._ended if name not in present]:
            del self._ended[name]
        self._asked = asked

    async def _pilot_ended(self, pilot: Pilot) -> None:
        """Note that a pilot is gone, and wait before the next one if it never joined."""
        await asyncio.to_thread(remove_ticket, self.home.pilots, pilot.id)
        if pilot.id in self._joined:
            self._joined.discard(pilot.id)
            self._failures = 0
            return
        if pilot.status is PilotStatus.WAITING:  # it was given up before it started
            return
        self._failures += 1
        pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (self._failures - 1))
        self._pause_until = since_boot() + pause
        self.failure = (
            f"pilot {pilot.id} ended on {pilot.node or 'its node'} before its agent joined; "
            f"see {self.home.pilots / pilot.id}.log"
        )
        self.inbox.note(f"{self.failure}; the next one is submitted in {pause:.0f} s")

    async def _give_up_silent(self) -> None:
        """Make the ground end pilots whose agents have been silent for a lease: their jobs must run elsewhere. An agent
        that speaks although its pilot has ended is told to leave."""
        for node in self._nodes():
            pilot = self.pilots.get(node.record.pilot)
            alive = pilot is not None and pilot.alive
            if alive and pilot is not None and node.unheard_s > self.cluster.lease_s:
                self.inbox.note(f"node {node.name} is silent; {self.ground.name} is told to end its pilot")
                await self.ground.give_up(pilot)
                self._wake.set()
            elif not alive and not node.silent and node.heard:
                self.cluster.members.dismiss(node.name, f"{self.ground.name} has ended its pilot")

    def _obey_ends(self) -> None:
        """Let the jobs on nodes that the ground takes back soon save and move."""
        for node in self._nodes():
            if node.ends_at is not None and time.time() > node.ends_at - self.plan.save_s:
                self.cluster.members.dismiss(
                    node.name, f"its allocation ends at {time_of_day(node.ends_at, time.time())}"
                )

    def _release_held(self) -> None:
        """Release jobs that waited for a node that lasts long enough, where there is one."""
        nodes = [node for node in self.cluster.book.present if not node.closed]
        longest = max((self.cluster.members.seconds_left(node) for node in nodes), default=0.0)
        self.longer_nodes.release(longest, self.clock.now())

    # ---- how many --------------------------------------------------------------------------------------------------

    async def _resize(self) -> None:
        now, staying = since_boot(), [node for node in self._nodes() if not node.dismissed and not node.leaving]
        self._note_idle(staying, now)
        per_node = max((len(node.gpus) for node in self.cluster.book.nodes.values()), default=1)
        known = sum(len(node.gpus) for node in {node.id: node for node in self.state.topology.nodes}.values())
        self.state.may_come = max(0, self.plan.most * per_node - known) if self.cluster.book.nodes else 0
        going = {node.record.pilot for node in self._nodes() if node.dismissed or node.leaving}
        alive = [pilot for pilot in self.pilots.values() if pilot.alive and pilot.id not in going]
        wanted = self._wanted(staying, per_node, now)
        have = len(alive) + len(self._submitted)
        if have < wanted and now >= self._pause_until:
            for _ in range(wanted - have):
                name = new_pilot()
                self._submitted[name] = now
                try:
                    await self.ground.submit(self.ticket(name))
                except InputError as error:
                    self._pause_until = now + FIRST_PAUSE_S
                    self._refused(str(error))
                    return
                self.refusal = ""
        elif have > wanted:
            await self._give_back(alive, staying, have - wanted, now)

    def _note_idle(self, nodes: Collection[ClusterNode], now: float) -> None:
        idle = {node.name for node in nodes if not self.cluster.jobs_on(node.name)}
        self._idle = {name: self._idle.get(name, now) for name in idle}

    def _wanted(self, staying: Collection[ClusterNode], per_node: int, now: float) -> int:
        """Return how many nodes the cluster should have: those in use, those that are not idle for long, and as many as
        are needed by jobs that have waited for a while."""
        in_use = sum(1 for node in staying if now - self._idle.get(node.name, now) < self.plan.idle_s)
        busy = sum(1 for node in staying if node.name not in self._idle)
        moment = self.clock.now()
        waiting = [record.job.gpus for record in self.state.queue if moment - record.pending_since >= self.plan.grow_s]
        waiting += self.longer_nodes.gpus()
        needed = busy + math.ceil(sum(waiting) / max(1, per_node))
        return max(self.plan.least, min(self.plan.most, max(in_use, needed)))

    async def _give_back(self, alive: list[Pilot], staying: Collection[ClusterNode], count: int, now: float) -> None:
        """End pilots that wait, then let nodes that have been idle for long leave."""
        joined = {node.record.pilot for node in staying}
        waiting = [pilot for pilot in alive if pilot.status is PilotStatus.WAITING and pilot.id not in joined]
        for pilot in waiting[:count]:
            await self.ground.give_up(pilot)
            count -= 1
        idle = sorted(self._idle, key=lambda name: self._idle[name])
        for name in idle[: max(0, count)]:
            if now - self._idle[name] >= self.plan.idle_s:
                self.cluster.members.dismiss(name, "it was idle")
