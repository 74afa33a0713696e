"""Faults of MPS: a fatal fault of one job reaches all on its server, and nobody can tell whose it was.

Looked for every second. Whoever was on the failed server starts again without losing a retry: those who failed by it,
and those who go on without their GPU or hang, which are stopped first. A server forgets its fault as soon as everybody
has left, which may be sooner than we look: so gangs that fail on the same GPU within moments count as reached, too. A
failure is judged at the look after it, and where the gang had mates, after those moments. One that faults reach again
and again comes back alone on its GPUs, outside MPS, where its next failure is its own.
"""

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import combinations

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
TOGETHER_S = 3.0
"""Gangs that fail within so long on the same GPU fail together: the rest of a process's life after its GPU is gone."""
MOST_PARDONS = 3


@dataclass(frozen=True)
class Failure:
    """A gang that failed and is to be judged."""

    at: float
    ended: Ended
    gpus: frozenset[GpuId]
    """Where it shared by MPS, if it did."""

    @property
    def key(self) -> Key:
        return self.ended.job, self.ended.attempt


@dataclass
class Faults:
    machine: Machine
    driver: Driver
    executor: Executor
    clock: Clock
    pardons: dict[str, int] = field(default_factory=dict)
    """How often a job was started again because of a fault."""
    _failed: list[Failure] = field(default_factory=list)
    _reached: set[Key] = field(default_factory=set)
    _fault_at: float = -1e18
    _fault_gpus: frozenset[GpuId] = frozenset()
    _fault_named: bool = True
    """Did the server say whom the last fault reached? Then whoever was seen elsewhere has nothing to do with it."""
    _held: bool = False

    async def watch(self) -> None:
        while self.machine.mps is not None:
            await asyncio.sleep(LOOK_S)
            try:
                await self.look()
            except Exception:  # or nobody who fails from now on would ever hear of it
                log.exception("a look at MPS broke off")
        self._tell_failed(self._failed)

    async def look(self) -> None:
        came = len(self._failed)
        try:
            for fault in await asyncio.to_thread(self.machine.faults):
                self._relaunch(fault)
        except Exception:  # whoever failed must hear of it all the same
            log.exception("MPS could not be looked at")
        self._find_together()
        before = self.clock.now() - TOGETHER_S
        self._tell_failed(one for one in self._failed[:came] if one.at <= before or not self._may_be_a_mates(one))
        if self._held and self.machine.ready:
            self._held = False
            self.driver.wake()

    def may_launch(self) -> bool:
        """A server that recovers from a fault refuses new clients, and a daemon that is gone cannot take any."""
        self._held = not self.machine.ready
        return not self._held

    def gang_ended(self, ended: Ended) -> None:
        if ended.outcome is Outcome.FAILED and self.machine.mps is not None:
            gpus = self._gpus_under_mps((ended.job, ended.attempt))
            self._failed.append(Failure(self.clock.now(), ended, gpus))
        else:
            self.driver.gang_ended(self._judged(ended))

    def _relaunch(self, fault: ServerFault) -> None:
        """Stop those who still run, as somebody who wants them back in the queue would."""
        now, jobs = self.clock.now(), self.driver.scheduler.state.jobs
        self._fault_at, self._fault_named = now, True
        known = {job: attempt for job, attempt in fault.gangs if job in jobs and jobs[job].attempt == attempt}
        every = frozenset(slot.id for slot in self.machine.slots)
        self._fault_gpus = frozenset(gpu for job in known for gpu in jobs[job].gpus) or every
        self.driver.note(f"MPS: {fault.reason}; the jobs on it start again: {', '.join(sorted(known)) or 'none seen'}")
        for key in known.items():
            self._count(key)
            if key in self.executor.present():
                self.driver.tell(ev.Requeued(now, *key))

    def _find_together(self) -> None:
        """Two that fail on the same GPU, neither by a known fault: one took the other along, and both have left."""
        for a, b in combinations([one for one in self._failed if self._is_unexplained(one)], 2):
            shared = a.gpus & b.gpus
            if shared and abs(a.at - b.at) < TOGETHER_S:
                self._fault_at, self._fault_gpus, self._fault_named = self.clock.now(), shared, False
                self.driver.note(
                    f"MPS: jobs {a.ended.job} and {b.ended.job} failed together on one GPU and start again"
                )
                self._count(a.key)
                self._count(b.key)

    def _may_be_a_mates(self, failure: Failure) -> bool:
        """Does anybody who shared its GPUs still run, and may yet fail by the same fault?"""
        others = self.executor.present().keys() - {failure.key}
        shared = any(failure.gpus & self._gpus_under_mps(other) for other in others)
        return shared and self._is_unexplained(failure)

    def _is_unexplained(self, failure: Failure) -> bool:
        """Whoever never came to a server (a wrong path, say) has failed by itself."""
        seen = failure.key in self.machine.seen and failure.key not in self._reached
        return seen and not self._may_be_of_the_fault(failure.key, failure.gpus)

    def _gpus_under_mps(self, key: Key) -> frozenset[GpuId]:
        """None for one that has its GPUs to itself, outside MPS."""
        record = self.driver.scheduler.state.jobs.get(key[0])
        if record is None or record.attempt != key[1] or record.job.exclusive:
            return frozenset()
        return frozenset(record.gpus)

    def _count(self, key: Key) -> None:
        """Once a fault: a server that fails and then goes has reached a gang twice."""
        if key not in self._reached:
            self._reached.add(key)
            self.pardons[key[0]] = self.pardons.get(key[0], 0) + 1

    def _tell_failed(self, due: Iterable[Failure]) -> None:
        for failure in list(due):
            self._failed.remove(failure)
            if self._may_be_of_the_fault(failure.key, failure.gpus):
                self._count(failure.key)
            self.driver.gang_ended(self._judged(failure.ended))

    def _judged(self, ended: Ended) -> Ended:
        key = (ended.job, ended.attempt)
        self.machine.seen.discard(key)
        if key not in self._reached:
            return ended
        self._reached.remove(key)
        if ended.outcome is not Outcome.FAILED and ended.outcome is not Outcome.STOPPED:
            return ended
        times = self.pardons.get(ended.job, 0)  # none: its end was written in the meantime, a cancel say
        why, alone = "a fault under MPS reached it", times > MOST_PARDONS
        if alone:
            why = f"faults under MPS reached it {times} times: it comes back alone, outside MPS"
        reason = f"{ended.reason}; {why}" if ended.reason else why
        return replace(ended, outcome=Outcome.LOST, reason=reason, needs_alone=alone)

    def _may_be_of_the_fault(self, key: Key, gpus: frozenset[GpuId]) -> bool:
        """Of a gang that failed before anybody looked whether a server had it, or just after its mates did."""
        if self._fault_named and key in self.machine.seen:
            return False
        return self.clock.now() - self._fault_at < FAULT_S and bool(self._fault_gpus & gpus)
