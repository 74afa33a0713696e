"""The live service: `Scheduler.step` with a real clock, a journal on disk and an executor of real processes.

One asyncio process. What happens comes in as events (submits, reports, exits); they are durable in the journal before
anything is done about them. The HTTP API calls the methods of `Service`; who may call which is decided there, not here.
This file starts and ends it; `requests.py` and `reading.py` have what others call.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import getuid as own_uid
from typing import Any

from carpool import policies
from carpool.core import events as ev
from carpool.core import snapshot
from carpool.core.record import JobRecord
from carpool.core.scheduler import Scheduler
from carpool.core.state import ALIVE
from carpool.errors import InputError
from carpool.live.clock import RealClock
from carpool.live.executors.base import Ended, Launch
from carpool.live.executors.machine import Ours, discover, gang_of
from carpool.live.executors.processes import boot_id
from carpool.live.home import write_private
from carpool.live.insight.forecaster import Forecaster
from carpool.live.journal.store import Batch, StoreError
from carpool.live.service import prune, recovery
from carpool.live.service.driver import Driver, Ending
from carpool.live.service.faults import Faults
from carpool.live.service.inside import new_row
from carpool.live.service.knowledge import Knowledge
from carpool.live.service.reading import Reading
from carpool.live.service.requests import Requests
from carpool.live.service.watch import EVERY_S
from carpool.live.spec import ARRAY_VARIABLE, from_json

log = logging.getLogger("carpool.live")

Row = dict[str, Any]
SNAPSHOT_EVENTS = 20_000
"""So many events after the last snapshot, there is another one."""
KEEP_EVENTS = 200_000
"""So many events before the older snapshot stay in the journal, for those who want to look back."""
STRANGERS_S = 5.0
LOOK_AHEAD_S = 2.0
ONE_USER = "jobs run under their users' ids, and MPS serves one user at a time"


class Service(Reading):
    _snapshot_at = 0
    _snapshotting: asyncio.Task[None] | None = None
    _tasks: Sequence[asyncio.Task[None]] = ()

    @property
    def requests(self) -> Requests:
        """What users may change."""
        return self

    @property
    def queries(self) -> Reading:
        """What users may look at."""
        return self

    # ---- life ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Take the home, read the journal, find the workers that still run. Raises `InputError` where that fails."""
        self.home.create()
        self.home.acquire()
        try:
            await self._start()
        except BaseException:
            if machine := getattr(self, "_machine", None):
                await asyncio.to_thread(machine.leave)
            self._store.close()
            self.home.release()
            raise

    async def _start(self) -> None:
        try:
            self._store.open()
            self._users = self._store.users()
            self._machine = discover(
                self._gpus, self._gpu_memory, self.home, only=self._only, without_mps=self._why_without_mps()
            )
            machine = self._machine
            self._knowledge = Knowledge(
                len(machine.slots), machine.mechanism, machine.names.values(), self._perf, self._profile
            )
            loaded = await recovery.load(self._store, self._new_scheduler)
            scheduler = loaded.scheduler
        except StoreError as error:
            raise InputError(f"journal {self.home.journal}: {error}; see `carpool doctor`") from error
        self._driver = Driver(
            scheduler, self._store, self._executor, self._clock, self._launch_of, self._story_of, self._after_turn
        )
        self._faults = Faults(machine, self._driver, self._executor, self._clock)
        self._driver.may_launch = self._faults.may_launch
        self._snapshot_at = loaded.seq
        for text in (*self._store.notes, *loaded.notes):
            self._driver.note(text)
        self._resume_clock()
        self._read_jobs()
        self._outlook = Forecaster(
            lambda: self._state,
            lambda: policies.make(self.policy),
            lambda job: self._sources.get(job, {}),
            lambda job: self.specs[job].name if job in self.specs else "",
            lambda gpu: self._machine.slot(gpu).name,
            self._clock.now,
        )
        self._driver.on_plan = self._outlook.planned
        self._outlook.learn(self._store.estimates())
        self._executor.start(self)
        await recovery.reattach(self._driver)
        self._check_machine()
        await self._begin()

    def _why_without_mps(self) -> str:
        if not self._mps:
            return "switched off"
        return ONE_USER if any(self._uid(user) is not None for user in self._users) else ""

    def _uid(self, user: str) -> int | None:
        """The uid that a user's jobs run under; None: ours."""
        uid = self._users.get(user, {}).get("uid") if own_uid() == 0 else None
        return None if uid == 0 else uid

    def _new_scheduler(self, jobs_per_gpu: int | None = None) -> Scheduler:
        policy, perf = policies.make(self.policy), self._knowledge.fresh()
        return Scheduler(policy, perf, jobs_per_gpu or self.jobs_per_gpu, strict=False)

    def _resume_clock(self) -> None:
        last, boot = self._store.last_moment(), self._store.meta().get("boot", "")
        if last is not None and isinstance(self._clock, RealClock):
            busy = any(record.status in ALIVE for record in self._state.jobs.values())
            self._clock.resume(*last, boot, busy)

    def _read_jobs(self) -> None:
        """The specs of living jobs, and the stories of those that ended without one. What a damaged journal forgot
        is found beside it."""
        state, rows, known = self._state, self._store.living_jobs(), self._store.known_jobs()
        lost = list(recovery.forgotten(self.home, known))
        highest = max((*known, *(data["id"] for data in lost), *map(int, state.jobs)), default=0)
        self._next_id = highest + 1
        for row in rows:
            self.specs[str(row["id"])] = from_json(row["spec"])
            self._sources[str(row["id"])] = json.loads(row["source"]) if row["source"].startswith("{") else {}
        for row in rows:
            if str(row["id"]) not in state.jobs and str(row["id"]) not in state.ended:
                self._find(str(row["id"]), row["user"])
        for data in sorted(lost, key=lambda data: int(data["id"])):
            self.specs[str(data["id"])] = from_json(json.dumps(data["spec"]))
            self._find(str(data["id"]), data["user"], new=True)
        unwritten = {str(row["id"]) for row in rows}
        for name in [name for name in state.ended if name not in unwritten]:
            del state.ended[name]
        self._driver.remember(self._exit_code_on_disk)

    def _find(self, name: str, user: str, *, new: bool = False) -> None:
        """A job of which the journal has lost something: it ended, or it is queued again."""
        ending = recovery.ending_of(self.home, name)
        what = "it ended before" if ending else "it is queued again"
        self._driver.note(f"job {name}: the journal lost {'it' if new else 'what became of it'}; {what}")
        spec = self.specs[name] if ending is None else self.specs.pop(name)

        def prepare(now: float, batch: Batch) -> Sequence[ev.Event]:
            if new:
                batch.jobs.append(new_row(name, user, now, spec, {}))
            if ending is not None:
                batch.stories.append(ending)
                return ()
            job, _ = self._knowledge.job(self._state.perf, replace(spec, after=()), name, user, now)
            return () if name in self._state.jobs else (ev.Submitted(now, job),)

        self._driver.put(prepare)

    def _check_machine(self) -> None:
        """Tell the scheduler which GPUs there are, if they are not those that it knows."""
        state, node, now = self._state, self._machine.node, self._clock.now()
        number = state.topology.present.get(node.id)
        known = state.topology.nodes[number] if number is not None else None
        if known == node:
            return
        if known is not None:
            self._driver.note(f"the GPUs have changed: {len(known.gpus)} before, {len(node.gpus)} now")
            self._driver.tell(ev.NodeLost(now, node.id))
        self._driver.tell(ev.NodeJoined(now, node))

    async def _begin(self) -> None:
        """The first turn: what was found is written down."""
        now, state, meta = self._clock.now(), self._state, self._store.meta()
        if meta.get("policy", self.policy) != self.policy:
            self._driver.tell(*(ev.PriorityChanged(now, record.job.id) for record in list(state.queue)))
        start = {"policy": self.policy, "jobs_per_gpu": str(self.jobs_per_gpu), "boot": boot_id()}
        waiting = sum(record.status not in ALIVE for record in state.jobs.values())
        found = f"{len(self._executor.present())} gangs found running, {waiting} jobs waiting"
        self._driver.note(f"the service started under {self.policy}: {found}", logging.INFO)

        def prepare(now: float, batch: Batch) -> Sequence[ev.Event]:
            batch.meta.update(start)
            return ()

        self._driver.put(prepare)
        if not await self._driver.turn():
            raise InputError(f"the journal cannot be written ({self._driver.trouble_now}); make room and start again")

    async def run(self) -> None:
        """Schedule until `stop` is called."""
        work = (self._poll, self._faults.watch, self._look_for_strangers, self._look_ahead, self._prune)
        self._tasks = [asyncio.create_task(task()) for task in work]
        try:
            await self._driver.run()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def stop(self) -> None:
        """Leave; the workers go on and are found again by the next start."""
        driver = getattr(self, "_driver", None)
        if driver is None or driver.stopped:
            return
        for task in self._tasks:
            task.cancel()
        await driver.finish()
        await self._executor.close()
        if self._snapshotting is not None:
            await self._snapshotting
        if driver.quiet and not driver.trouble_now:
            with contextlib.suppress(StoreError):
                await self._store.keep_snapshot(snapshot.encode(self._state), self._store.seq, KEEP_EVENTS)
        if not any(record.status in ALIVE for record in self._state.jobs.values()):
            await asyncio.to_thread(self._machine.stop)
        self._store.close()
        self.home.release()

    async def _poll(self) -> None:
        """Hear what the workers say."""
        while True:
            await asyncio.sleep(EVERY_S)
            reports = self._watch.read(self._state)
            if reports:
                self._driver.put(lambda now, batch, reports=reports: self._watch.events(self._state, reports, now))  # type: ignore[misc]

    async def _look_for_strangers(self) -> None:
        ours = Ours(self.home, self._machine.mps)
        while self._machine.mechanism != "logical":
            for gpu, memory in await asyncio.to_thread(self._machine.taken_by_strangers, ours):
                self._driver.tell(ev.MemoryTaken(self._clock.now(), gpu, memory))
            for pid in await asyncio.to_thread(self._machine.outside_mps, ours):
                job, _ = gang_of(pid) or ("unknown", 0)
                self._driver.note(f"job {job}: process {pid} runs outside MPS, so it shares by time-slicing")
            await asyncio.sleep(STRANGERS_S)

    async def _look_ahead(self) -> None:
        """Forecast jobs that are new, so that it can be judged later how right that was."""
        while True:
            await asyncio.sleep(LOOK_AHEAD_S)
            try:
                self._outlook.look_ahead()
            except Exception:  # nobody waits for it, and nothing depends on it
                log.exception("no forecast could be made")

    async def _prune(self) -> None:
        await asyncio.sleep(prune.FIRST_S)
        while True:
            ends = await asyncio.to_thread(self._store.ends)
            gone = await asyncio.to_thread(prune.prune, self.home, ends, self._clock.now(), self.keep)
            if gone:
                self._driver.note(f"the files of {len(gone)} old jobs were removed", logging.INFO)
            await asyncio.sleep(prune.EVERY_S)

    def _after_turn(self, written: Sequence[Ending]) -> None:
        for ending in written:
            with contextlib.suppress(OSError):  # beside the journal, should that be damaged one day
                path = self.home.job(ending.record.job.id) / recovery.END_FILE
                write_private(path, json.dumps(self._story_of(ending)), sync=False)
            name = ending.record.job.id
            self.specs.pop(name, None)
            self._faults.pardons.pop(name, None)
            judged = self._outlook.judge(ending.record, self._sources.pop(name, {}))
            if judged:
                self._driver.put(lambda now, batch, rows=judged: batch.estimates.extend(rows) or ())  # type: ignore[misc]
            for waiter in self._waiters.pop(name, ()):
                if not waiter.done():
                    waiter.set_result(None)
        busy = self._snapshotting is not None and not self._snapshotting.done()
        if self._store.seq - self._snapshot_at >= SNAPSHOT_EVENTS and self._driver.quiet and not busy:
            self._snapshot_at = self._store.seq
            data = snapshot.encode(self._state)
            self._snapshotting = asyncio.create_task(self._keep(data, self._store.seq))

    async def _keep(self, data: Mapping[str, Any], seq: int) -> None:
        try:
            await self._store.keep_snapshot(data, seq, KEEP_EVENTS)
        except StoreError as error:  # the journal is whole without it
            self._driver.note(f"no snapshot could be kept: {error}")

    # ---- what the executor tells ------------------------------------------------------------------------------------

    def gang_up(self, job: str, attempt: int) -> None:
        self._driver.gang_up(job, attempt)

    def trouble(self, job: str, text: str) -> None:
        self._driver.trouble(job, text)

    def gang_ended(self, ended: Ended) -> None:
        self._faults.gang_ended(ended)

    # ---- what the driver asks --------------------------------------------------------------------------------------

    def _fence(self, record: JobRecord) -> int:
        """The memory beyond which a job must not go, to spare those it joins; 0: no limit. One that runs out of memory
        comes back alone, without a limit: the belief may be wrong."""
        return self._state.perf.memory(record.job, 1) if self._state.cluster.mates(record) else 0

    def _launch_of(self, record: JobRecord) -> Launch:
        spec, uid = self.specs[record.job.id], self._uid(record.job.user)
        extra: dict[str, str] = {}
        if uid is None and not record.job.exclusive:
            extra = self._machine.environment(self._fence(record), len(record.gpus))
        elif uid is not None and self._machine.mps is not None:  # the user has come since the start
            self._driver.note(f"job {record.job.id}: shares by time-slicing: {ONE_USER}; start the service again")
        if spec.array_index is not None:
            extra[ARRAY_VARIABLE] = str(spec.array_index)
        return Launch(
            record.job.id,
            record.attempt,
            tuple(self._machine.slot(gpu) for gpu in record.gpus),
            spec.command,
            spec.directory,
            spec.env,
            accumulation=record.accumulation,
            can_shrink=spec.can_shrink,
            cpus=spec.cpus,
            memory=spec.memory,
            grace_s=spec.grace_s,
            uid=uid,
            extra=extra,
        )

    def _exit_code_on_disk(self, record: JobRecord) -> int | None:
        """Of a job that ended just before the service did."""
        from carpool.live.executors.gang import open_gang

        gang = open_gang(self.home.attempt(record.job.id, record.attempt), (record.job.id, record.attempt))
        return gang.ended().exit_code if gang is not None else None
