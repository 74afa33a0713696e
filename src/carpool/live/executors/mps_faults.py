"""Faults of MPS on this machine: which gangs a fault hit, although it is not known which gang caused it.

A fatal fault of one process reaches every client of its MPS server. All gangs on a failed server are hit: those that
failed by it, and those that run on without their GPU or hang, which the service requeues. A server forgets its fault
when its last client has left, which may be before the next look. So gangs that fail on the same GPU within moments
count as hit too. A failure is therefore reported at the look after it, or, where mates still run, after those moments.
Part of the local executor, between its gangs and the listener.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Protocol

from carpool.core.model import GpuId
from carpool.live.clock import since_boot
from carpool.live.executors.base import ExecutorListener, GangEnded, GangKey, GangOutcome, NodeFault
from carpool.live.executors.node import LocalNode, MpsServerFault

log = logging.getLogger("carpool.live")

LOOK_S = 1.0
"""Seconds between two looks at MPS."""
FAULT_S = 5.0
"""Seconds after a fault in which a failure on its GPUs counts as its consequence, for a gang not seen on a server."""
TOGETHER_S = 3.0
"""Seconds within which failures on one GPU count as one fault: how long a process may live after its GPU failed."""


class SharingGang(Protocol):
    """What the watch must know about a gang."""

    @property
    def gpus(self) -> tuple[GpuId, ...]: ...
    @property
    def exclusive(self) -> bool: ...


@dataclass(frozen=True)
class FailedGang:
    """A gang that failed and is not reported yet."""

    at: float
    ended: GangEnded
    gpus: frozenset[GpuId]
    """GPUs that it shared by MPS; empty if it had them to itself."""

    @property
    def key(self) -> GangKey:
        return self.ended.key


@dataclass
class MpsFaultWatch:
    """Looks at MPS every second and decides which ends of gangs are the consequence of a fault."""

    node: LocalNode
    gangs: Mapping[GangKey, SharingGang]
    """The gangs that are present; the executor changes them."""
    listener: ExecutorListener
    now: Callable[[], float] = since_boot
    _failed: list[FailedGang] = field(default_factory=list)
    _hit: set[GangKey] = field(default_factory=set)
    _fault_at: float = -1e18
    _fault_gpus: frozenset[GpuId] = frozenset()
    _fault_named: bool = True
    """The server said which clients the last fault hit, so a gang seen on another server has nothing to do with it."""

    async def run(self) -> None:
        while self.node.mps is not None:
            await asyncio.sleep(LOOK_S)
            try:
                await self.look()
            except Exception:  # the next look must happen, or no later failure would be reported
                log.exception("a look at MPS failed")
        self._report(self._failed)

    async def look(self) -> None:
        before_look = len(self._failed)
        try:
            for fault in await asyncio.to_thread(self.node.faults):
                self._take_fault(fault)
        except Exception:  # failures must be reported even if MPS cannot be asked
            log.exception("MPS could not be asked")
        self._find_together()
        limit = self.now() - TOGETHER_S
        due = [one for one in self._failed[:before_look] if one.at <= limit or not self._mate_may_fail(one)]
        self._report(due)

    def gang_ended(self, ended: GangEnded, gang: SharingGang) -> None:
        """Report an end, later if it has to be judged first."""
        if ended.outcome is GangOutcome.FAILED and self.node.mps is not None:
            self._failed.append(FailedGang(self.now(), ended, _shared_gpus(gang)))
        else:
            self.listener.gang_ended(self._judged(ended))

    def _take_fault(self, fault: MpsServerFault) -> None:
        failed = {one.key: one.gpus for one in self._failed}
        present = {key: frozenset(gang.gpus) for key, gang in self.gangs.items()}
        gpus = {key: found for key, found in {**failed, **present}.items() if key in fault.gangs}
        self._fault_at, self._fault_named = self.now(), True
        every = frozenset(slot.id for slot in self.node.slots)
        self._fault_gpus = frozenset().union(*gpus.values()) or every
        self._hit.update(gpus)
        self.listener.node_fault(NodeFault(self.node.name, f"MPS: {fault.reason}", frozenset(gpus)))

    def _find_together(self) -> None:
        """Find two gangs that failed on the same GPU without a known fault: one failed by the other's fault."""
        for a, b in combinations([one for one in self._failed if self._is_unexplained(one)], 2):
            shared = a.gpus & b.gpus
            if shared and abs(a.at - b.at) < TOGETHER_S:
                self._fault_at, self._fault_gpus, self._fault_named = self.now(), shared, False
                self._hit.update((a.key, b.key))
                reason = "MPS: these jobs failed together on one GPU"
                self.listener.node_fault(NodeFault(self.node.name, reason, frozenset((a.key, b.key))))

    def _mate_may_fail(self, failure: FailedGang) -> bool:
        """Return whether a gang that shared its GPUs still runs and may fail by the same fault."""
        others = [gang for key, gang in self.gangs.items() if key != failure.key]
        shared = any(failure.gpus & _shared_gpus(other) for other in others)
        return shared and self._is_unexplained(failure)

    def _is_unexplained(self, failure: FailedGang) -> bool:
        """Return whether a fault may be behind it. A gang that never reached a server failed by itself."""
        seen = failure.key in self.node.seen and failure.key not in self._hit
        return seen and not self._follows_a_fault(failure)

    def _follows_a_fault(self, failure: FailedGang) -> bool:
        """Return whether it failed just after its mates, or before any look saw which server it was on."""
        if self._fault_named and failure.key in self.node.seen:
            return False
        return self.now() - self._fault_at < FAULT_S and bool(self._fault_gpus & failure.gpus)

    def _report(self, due: Iterable[FailedGang]) -> None:
        for failure in list(due):
            self._failed.remove(failure)
            if self._follows_a_fault(failure):
                self._hit.add(failure.key)
            self.listener.gang_ended(self._judged(failure.ended))

    def _judged(self, ended: GangEnded) -> GangEnded:
        """Return the end as the service should see it."""
        self.node.seen.discard(ended.key)
        if ended.key not in self._hit:
            return ended
        self._hit.remove(ended.key)
        if ended.outcome not in (GangOutcome.FAILED, GangOutcome.STOPPED):
            return replace(ended, node_fault=True)
        reason = "a fault under MPS hit it"
        if ended.reason:
            reason = f"{ended.reason}; {reason}"
        return replace(ended, outcome=GangOutcome.LOST, reason=reason, node_fault=True)


def _shared_gpus(gang: SharingGang) -> frozenset[GpuId]:
    """Return the GPUs that a gang shares by MPS: none if it has them to itself."""
    return frozenset() if gang.exclusive else frozenset(gang.gpus)
