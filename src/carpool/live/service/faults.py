"""Faults of MPS: a fatal fault of one job reaches all on its server, and nobody can tell whose it was.

Looked for every second. Whoever was on the failed server starts again without losing a retry: those who failed by it,
and those who go on without their GPU or hang, which are stopped first. A failure is judged at the look after it. One
that faults reach again and again comes back alone on its GPUs, outside MPS, where its next failure is its own.
"""

import asyncio
import logging
from dataclasses import dataclass, field, replace

from carpool.core import events as ev
from carpool.core.model import GpuId
from carpool.live.clock import Clock
from carpool.live.executors.base import Ended, Executor, Key, Outcome
from carpool.live.executors.machine import Machine, ServerFault
from carpool.live.service.driver import Driver

log = logging.getLogger("carpool.live")

LOOK_S = 1.0
FAULT_S = 5.0
"""So long after a fault, a failure on its GPUs of a gang that was never seen on a server counts as its consequence."""
MOST_PARDONS = 3


@dataclass
class Faults:
    machine: Machine
    driver: Driver
    executor: Executor
    clock: Clock
    pardons: dict[str, int] = field(default_factory=dict)
    """How often a job was started again because of a fault."""
    _failed: list[Ended] = field(default_factory=list)
    """Gangs that failed since the last look."""
    _reached: set[Key] = field(default_factory=set)
    _fault_at: float = -1e18
    _fault_gpus: frozenset[GpuId] = frozenset()
    _held: bool = False

    async def watch(self) -> None:
        while self.machine.mps is not None:
            await asyncio.sleep(LOOK_S)
            await self.look()
        self._tell(self._failed)

    async def look(self) -> None:
        failed, self._failed = self._failed, []
        try:
            for fault in await asyncio.to_thread(self.machine.faults):
                self._relaunch(fault)
        except Exception:  # whoever failed must hear of it all the same
            log.exception("MPS could not be looked at")
        self._tell(failed)
        if self._held and self.machine.ready:
            self._held = False
            self.driver.wake()

    def may_launch(self) -> bool:
        """A server that recovers from a fault refuses new clients, and a daemon that is gone cannot take any."""
        self._held = not self.machine.ready
        return not self._held

    def gang_ended(self, ended: Ended) -> None:
        if ended.outcome is Outcome.FAILED and self.machine.mps is not None:
            self._failed.append(ended)
        else:
            self._tell([ended])

    def _relaunch(self, fault: ServerFault) -> None:
        """Stop those who still run, as somebody who wants them back in the queue would."""
        now, jobs = self.clock.now(), self.driver.scheduler.state.jobs
        self._fault_at = now
        known = {job: attempt for job, attempt in fault.gangs if job in jobs and jobs[job].attempt == attempt}
        every = frozenset(slot.id for slot in self.machine.slots)
        self._fault_gpus = frozenset(gpu for job in known for gpu in jobs[job].gpus) or every
        self.driver.note(f"MPS: {fault.reason}; the jobs on it start again: {', '.join(sorted(known)) or 'none seen'}")
        for key in known.items():
            self._count(key)
            if key in self.executor.present():
                self.driver.tell(ev.Requeued(now, *key))

    def _count(self, key: Key) -> None:
        self._reached.add(key)
        self.pardons[key[0]] = self.pardons.get(key[0], 0) + 1

    def _tell(self, gangs: list[Ended]) -> None:
        for ended in gangs:
            self.driver.gang_ended(self._judged(ended))

    def _judged(self, ended: Ended) -> Ended:
        key = (ended.job, ended.attempt)
        if ended.outcome is Outcome.FAILED and key not in self._reached and self._may_be_of_the_fault(key):
            self._count(key)
        self.machine.seen.discard(key)
        if key not in self._reached:
            return ended
        self._reached.remove(key)
        if ended.outcome is not Outcome.FAILED and ended.outcome is not Outcome.STOPPED:
            return ended
        why, alone = "a fault under MPS reached it", self.pardons[ended.job] > MOST_PARDONS
        if alone:
            why = f"faults under MPS reached it {self.pardons[ended.job]} times: it comes back alone, outside MPS"
        reason = f"{ended.reason}; {why}" if ended.reason else why
        return replace(ended, outcome=Outcome.LOST, reason=reason, needs_alone=alone)

    def _may_be_of_the_fault(self, key: Key) -> bool:
        """Of a gang that failed before anybody looked whether a server had it."""
        record = self.driver.scheduler.state.jobs.get(key[0])
        if record is None or record.job.exclusive or key in self.machine.seen:
            return False
        return self.clock.now() - self._fault_at < FAULT_S and not self._fault_gpus.isdisjoint(record.gpus)
