"""The live service: `Scheduler.step` with a real clock, a journal on disk and an executor of real processes.

One asyncio process. What happens comes in as events (submits, reports, exits); they are durable in the journal before
anything is done about them. The HTTP API calls the methods of `Service`; who may call which is decided there, not here.
All results are plain lists and dictionaries, ready for JSON.
"""

import asyncio
import contextlib
import json
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from carpool import policies
from carpool.core import events as ev
from carpool.core import snapshot
from carpool.core.model import Limits, Status
from carpool.core.perf import PerformanceModel
from carpool.core.record import JobRecord
from carpool.core.scheduler import Scheduler
from carpool.core.state import ALIVE, State
from carpool.errors import InputError
from carpool.live import recovery, views
from carpool.live.accounts import account
from carpool.live.clock import Clock, RealClock
from carpool.live.driver import Driver, Ending
from carpool.live.errors import NoSuchJob, WrongState
from carpool.live.executors.base import Executor, Launch
from carpool.live.executors.local import LocalExecutor
from carpool.live.home import Home, write_private
from carpool.live.knowledge import Knowledge
from carpool.live.machine import Machine, Ours, discover
from carpool.live.outlook import Outlook, accuracy, alone_s
from carpool.live.processes import boot_id
from carpool.live.receipt import receipt
from carpool.live.spec import ARRAY_VARIABLE, Spec, from_json
from carpool.live.store import Batch, Store, StoreError
from carpool.live.watch import EVERY_S, Watch

log = logging.getLogger("carpool.live")

Row = dict[str, Any]
SNAPSHOT_EVENTS = 20_000
"""So many events after the last snapshot, there is another one."""
KEEP_EVENTS = 200_000
"""So many events before the older snapshot stay in the journal, for those who want to look back."""
STRANGERS_S = 5.0
LOOK_AHEAD_S = 2.0


class Service:
    def __init__(
        self,
        home: Home,
        policy: str = "sjf-bsbf",
        *,
        gpus: int | None = None,
        jobs_per_gpu: int = 2,
        gpu_memory: int | None = None,
        mps: bool = True,
        executor: Executor | None = None,
        clock: Clock | None = None,
        perf: PerformanceModel | None = None,
    ) -> None:
        """`gpus`: so many logical slots; None: the GPUs that NVML finds."""
        self.home = home
        self.policy = policy
        self.jobs_per_gpu = jobs_per_gpu
        self.specs: dict[str, Spec] = {}
        """Of the jobs that have not ended."""
        self._options = (gpus, gpu_memory, mps)
        self._executor = executor or LocalExecutor(home)
        self._clock = clock or RealClock()
        self._perf = perf
        self._store = Store(home.journal)
        self._users: dict[str, Row] = {}
        self._watch = Watch(self._executor)
        self._waiters: dict[str, list[asyncio.Future[None]]] = {}
        self._next_id = 1
        self._snapshot_at = 0
        self._snapshotting: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._sources: dict[str, Row] = {}
        self._driver: Driver
        self._machine: Machine
        self._knowledge: Knowledge
        self._outlook: Outlook

    # ---- life ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Take the home, read the journal, find the workers that still run. Raises `InputError` where that fails."""
        self.home.create()
        self.home.acquire()
        try:
            await self._start()
        except BaseException:
            self._store.close()
            self.home.release()
            raise

    async def _start(self) -> None:
        policy = policies.make(self.policy)
        self._machine = discover(self._options[0], self._options[1], self.home, mps=self._options[2])
        self._knowledge = Knowledge(len(self._machine.slots), self._perf)
        try:
            self._store.open()
            scheduler = Scheduler(policy, self._knowledge.perf, self.jobs_per_gpu, strict=False)
            loaded = await recovery.load(self._store, scheduler, self.jobs_per_gpu)
        except StoreError as error:
            raise InputError(f"journal {self.home.journal}: {error}; see `carpool doctor`") from error
        self._driver = Driver(
            scheduler, self._store, self._executor, self._clock, self._launch_of, self._story_of, self._after_turn
        )
        self._snapshot_at = loaded.seq
        for text in loaded.notes:
            self._driver.note(text)
        self._resume_clock()
        self._read_jobs()
        self._users = self._store.users()
        self._outlook = Outlook(
            lambda: self._state,
            lambda: policies.make(self.policy),
            lambda job: self._sources.get(job, {}),
            lambda job: self.specs[job].name if job in self.specs else "",
            lambda gpu: self._machine.slot(gpu).name,
            self._clock.now,
        )
        self._driver.on_plan = self._outlook.planned
        self._outlook.learn(self._store.estimates())
        self._executor.start(self._driver)
        await recovery.reattach(self._driver)
        self._check_machine()
        await self._begin()

    def _resume_clock(self) -> None:
        last, boot = self._store.last_moment(), self._store.meta().get("boot", "")
        if last is not None and isinstance(self._clock, RealClock):
            busy = any(record.status in ALIVE for record in self._state.jobs.values())
            self._clock.resume(*last, boot, busy)

    def _read_jobs(self) -> None:
        """The specs of living jobs, and the stories of those that ended without one. What a damaged journal forgot
        is submitted again."""
        state, driver = self._state, self._driver
        rows = self._store.living_jobs()
        self._next_id = 1 + max(self._store.highest_job(), *(int(name) for name in state.jobs if name.isdigit()), 0)
        lost = list(recovery.forgotten(self.home, self._next_id - 1))
        for row in rows:
            name = str(row["id"])
            self.specs[name] = from_json(row["spec"])
            self._sources[name] = json.loads(row["source"]) if row["source"].startswith("{") else {}
            if name not in state.jobs and name not in state.ended:
                driver.note(f"job {name}: the journal lost its submission; it is queued again")
                driver.put(lambda now, batch, name=name, row=row: self._queued_again(name, row["user"], now))  # type: ignore[misc]
        for data in lost:
            name = str(data["id"])
            self._next_id = max(self._next_id, data["id"] + 1)
            self.specs[name] = from_json(json.dumps(data["spec"]))
            driver.note(f"job {name}: the journal lost it; it is queued again")
            driver.put(lambda now, batch, name=name, data=data: self._found(name, data["user"], now, batch))  # type: ignore[misc]
        unwritten = {str(row["id"]) for row in rows}
        for name in [name for name in state.ended if name not in unwritten]:
            del state.ended[name]
        driver.remember(self._exit_code_on_disk)

    def _queued_again(self, name: str, user: str, now: float) -> Sequence[ev.Event]:
        job, _ = self._knowledge.job(replace(self.specs[name], after=()), name, user, now)
        return () if name in self._state.jobs else (ev.Submitted(now, job),)

    def _found(self, name: str, user: str, now: float, batch: Batch) -> Sequence[ev.Event]:
        batch.jobs.append(_row_of(name, user, now, self.specs[name], {}))
        return self._queued_again(name, user, now)

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
            self._driver.tell(*(ev.Rekeyed(now, record.job.id) for record in list(state.queue)))
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
        self._tasks = [asyncio.create_task(task()) for task in (self._poll, self._look_for_strangers, self._look_ahead)]
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
        driver.stopped = True
        driver.wake()
        for task in self._tasks:
            task.cancel()
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
            await asyncio.sleep(STRANGERS_S)

    async def _look_ahead(self) -> None:
        """Forecast jobs that are new, so that it can be judged later how right that was."""
        while True:
            await asyncio.sleep(LOOK_AHEAD_S)
            try:
                self._outlook.look_ahead()
            except Exception:  # nobody waits for it, and nothing depends on it
                log.exception("no forecast could be made")

    def _after_turn(self, written: Sequence[Ending]) -> None:
        for ending in written:
            name = ending.record.job.id
            self.specs.pop(name, None)
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

    # ---- what the driver asks --------------------------------------------------------------------------------------

    @property
    def _state(self) -> State:
        return self._driver.scheduler.state

    def _launch_of(self, record: JobRecord) -> Launch:
        spec = self.specs[record.job.id]
        extra = self._machine.environment()
        if spec.array_index is not None:
            extra[ARRAY_VARIABLE] = str(spec.array_index)
        return Launch(
            record.job.id,
            record.attempt,
            tuple(self._machine.slot(gpu) for gpu in record.gpus),
            spec.command,
            spec.directory,
            spec.env,
            accum=record.accum,
            may_shrink=spec.can_shrink,
            cpus=spec.cpus,
            memory=spec.memory,
            grace_s=spec.grace_s,
            uid=self._users.get(record.job.user, {}).get("uid") if os.getuid() == 0 else None,
            extra=extra,
        )

    def _story_of(self, ending: Ending) -> dict[str, Any]:
        record = ending.record
        row = views.ended_row(self._state, record, self.specs[record.job.id], ending.exit_code)
        row["alone_estimate_s"] = record.job.iterations * record.whole_iteration_s
        row["batch"], row["iterations"] = record.job.batch, record.job.iterations
        return {"id": int(record.job.id), "state": row["state"], "ended": record.ended, "story": json.dumps(row)}

    def _exit_code_on_disk(self, record: JobRecord) -> int | None:
        """Of a job that ended just before the service did."""
        from carpool.live.executors.gang import open_gang

        gang = open_gang(self.home.attempt(record.job.id, record.attempt), (record.job.id, record.attempt))
        return gang.ended().exit_code if gang is not None else None

    # ---- changing --------------------------------------------------------------------------------------------------

    async def submit(self, specs: Sequence[Spec], user: str) -> list[str]:
        """The new jobs' ids, durable on return. All or none: raises `InputError` for what could never run."""
        names = [str(self._next_id + number) for number in range(len(specs))]
        self._next_id += len(specs)
        kept = await self._keep_snapshots(dict(zip(names, specs, strict=True)), user)

        def prepare(now: float, batch: Batch) -> Sequence[ev.Event]:
            events, rows, sources = [], [], {}
            for name, spec in kept.items():
                job, source = self._knowledge.job(replace(spec, after=self._unmet(spec)), name, user, now)
                refusal = self._state.refusal(job)
                if refusal:
                    raise InputError(refusal.replace(f"job {name} ", "it "))
                events.append(ev.Submitted(now, job))
                believed = alone_s(self._state.perf, job)
                sources[name] = {"kind": source.kind, "detail": source.detail, "alone_s": believed}
                rows.append(_row_of(name, user, now, spec, sources[name]))
            batch.jobs += rows
            self.specs.update(kept)
            self._sources.update(sources)
            return events

        try:
            await self._driver.ask(prepare)
        except BaseException:
            for name in names:
                self.specs.pop(name, None)
                self._sources.pop(name, None)
                shutil.rmtree(self.home.job(name), ignore_errors=True)
            raise
        await asyncio.to_thread(self._write_specs, names, user)
        return names

    def _unmet(self, spec: Spec) -> tuple[str, ...]:
        """The jobs it has to wait for, without those that are through."""
        unmet = []
        for name in spec.after:
            if name in self.specs:
                unmet.append(name)
                continue
            row = self._ended_row(name)
            if row is None:
                raise InputError(f"after: there is no job {name!r}; `carpool jobs --all` lists them")
            if row["state"] != "finished":
                raise InputError(f"after: job {name} {row['state']}, so this one would never start")
        return tuple(unmet)

    async def _keep_snapshots(self, specs: Mapping[str, Spec], user: str) -> dict[str, Spec]:
        """Each job that asked for it gets its own copy of its directory."""
        kept = dict(specs)
        for name, spec in specs.items():
            if spec.snapshot:
                copy = self.home.snapshot(name)
                await asyncio.to_thread(self._copy, Path(spec.directory), copy, user)
                kept[name] = replace(spec, directory=str(copy))
        return kept

    def _copy(self, directory: Path, copy: Path, user: str) -> None:
        copy.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        shutil.copytree(directory, copy, symlinks=True)
        uid = self._users.get(user, {}).get("uid")
        if uid is not None and os.getuid() == 0:
            owner = account(uid)
            for path, _, files in os.walk(copy):
                for place in (path, *(os.path.join(path, file) for file in files)):
                    os.chown(place, owner.pw_uid, owner.pw_gid, follow_symlinks=False)

    def _write_specs(self, names: Sequence[str], user: str) -> None:
        """Beside the journal: should its tail be damaged, the jobs are still there."""
        for name in names:
            spec = self.specs.get(name)
            with contextlib.suppress(OSError):
                self.home.job(name).mkdir(mode=0o700, exist_ok=True)
                if spec is not None:
                    text = json.dumps({"user": user, "spec": spec.plain()})
                    write_private(self.home.job(name) / recovery.SPEC_FILE, text, sync=False)

    async def cancel(self, job: str) -> None:
        await self._driver.ask(lambda now, batch: (ev.Cancelled(now, self._living(job).job.id),))

    async def hold(self, job: str) -> None:
        """Keep a waiting job from starting until `release`."""
        await self._driver.ask(lambda now, batch: (ev.Held(now, self._living(job).job.id),))

    async def release(self, job: str) -> None:
        def prepare(now: float, batch: Batch) -> Sequence[ev.Event]:
            if not self._living(job).on_hold:
                raise WrongState(f"job {job} is not on hold")
            return (ev.Released(now, job),)

        await self._driver.ask(prepare)

    async def requeue(self, job: str) -> None:
        """Stop a running job (it saves first) and put it back into the queue."""

        def prepare(now: float, batch: Batch) -> Sequence[ev.Event]:
            record = self._living(job)
            if record.status not in (Status.STARTING, Status.RUNNING):
                raise WrongState(f"job {job} is {views.shown_state(record.status)}; only a running one can be requeued")
            return (ev.Requeued(now, job, record.attempt),)

        await self._driver.ask(prepare)

    async def set_priority(self, job: str, priority: int) -> None:
        await self._driver.ask(lambda now, batch: (ev.Rekeyed(now, self._living(job).job.id, priority),))

    async def set_limits(self, user: str, limits: Limits) -> None:
        """`user` "" stands for everybody without limits of their own."""
        await self._driver.ask(lambda now, batch: (ev.LimitsChanged(now, user, limits),))

    async def put_user(self, name: str, row: Mapping[str, Any]) -> None:
        """Keep a user's row: `token_hash`, `role`, `uid`, `revoked` and whatever else auth.py wants (JSON)."""

        def prepare(now: float, batch: Batch) -> Sequence[ev.Event]:
            batch.users[name] = json.dumps(dict(row))
            return ()

        await self._driver.ask(prepare)
        self._users[name] = dict(row)

    # ---- reading ---------------------------------------------------------------------------------------------------

    def users(self) -> dict[str, Row]:
        return {name: dict(row) for name, row in self._users.items()}

    def owner(self, job: str) -> str:
        """Whose job it is; raises `NoSuchJob`."""
        record = self._state.jobs.get(job)
        return record.job.user if record is not None else str(self._known_row(job)["user"])

    def jobs(self, all: bool = False, *, limit: int | None = None, before: str | None = None) -> list[Row]:
        """Jobs in order of submission, with `all` also those that ended; the last `limit` of them before a job id.

        Keys: job, name, user, state, gpus, submitted, started, finished, exit_code, and reason, priority, held,
        model, attempt, progress (0 to 1), measured (or estimated), on (GPUs as node:index), mates.
        """
        living = list(self._state.jobs.values())
        if before is not None:
            living = [record for record in living if int(record.job.id) < int(before)]
        rows = [self._row(record) for record in (living if limit is None else living[-limit:])]
        if all:
            rows += [self._story(row) for row in self._ended_rows(limit, before)]
            rows.sort(key=lambda row: int(row["job"]))
        return rows if limit is None else rows[-limit:]

    def _row(self, record: JobRecord) -> Row:
        spec = self.specs[record.job.id]
        return views.job_row(self._state, record, spec, self._machine.slots, self._watch.latest(record))

    def _ended_rows(self, limit: int | None, before: str | None = None, user: str | None = None) -> list[Row]:
        """Ended jobs, the latest first: those whose story is still to be written, then those on disk."""
        rows = self._store.ended_jobs(limit, int(before) if before is not None else None, user)
        known = {row["id"] for row in rows}
        fresh = [e for e in self._driver.endings if int(e.record.job.id) not in known]
        fresh = [e for e in fresh if (before is None or int(e.record.job.id) < int(before))]
        fresh = [e for e in fresh if user is None or e.record.job.user == user]
        return [self._story_of(ending) for ending in reversed(fresh)] + rows

    def _story(self, row: Row) -> Row:
        story: Row = json.loads(row["story"])
        return {key: value for key, value in story.items() if key != "receipt"}

    def show(self, job: str) -> Row:
        """All that is known: the keys of `jobs`, and spec (with env: leave it out for other users), attempts with
        their ranks, receipt, estimates with their source."""
        record = self._state.jobs.get(job)
        if record is not None:
            spec, source = self.specs[job], self._sources.get(job, {})
            row = {**self._row(record), "receipt": receipt(record, self._clock.now())}
        else:
            known = self._known_row(job)
            spec, row = from_json(known["spec"]), json.loads(known["story"])
            source = json.loads(known["source"]) if known["source"].startswith("{") else {}
        return {**row, "spec": spec.plain(), "attempts": self._attempts(job, row["attempt"]), "source": source}

    def _attempts(self, job: str, last: int) -> list[Row]:
        attempts = []
        for number in range(max(1, last - 9), last + 1):
            ranks = self._executor.ranks((job, number))
            attempts.append({"attempt": number, "ranks": ranks})
        return attempts

    def explain(self, job: str) -> Row:
        """position, reason, mates with predicted and measured slow-down of both, start and end with a range."""
        if job in self._state.jobs:
            return self._outlook.explain(job)
        row = {key: value for key, value in self.show(job).items() if key not in ("spec", "attempts")}
        why = f": {row['reason']}" if row["reason"] else ""
        return {**row, "sentences": [f"Job {job} has {row['state']}{why}.", *row["receipt"]["sentences"]]}

    def dry_run(self, spec: Spec, user: str) -> Row:
        """What would happen: `where` (GPUs or None), `mates`, `start` and `end` estimates with a range and source."""
        job, source = self._knowledge.job(replace(spec, after=self._unmet(spec)), "0", user, self._clock.now())
        refusal = self._state.refusal(job)
        if refusal:
            raise InputError(refusal.replace("job 0 ", "it "))
        return self._outlook.dry_run(job, {"kind": source.kind, "detail": source.detail})

    def gpus(self) -> Row:
        """nodes → GPUs with their residents, memory, foreign memory; `mechanism`: mps, time-slicing or logical."""
        machine = self._machine
        rows = views.gpu_rows(self._state, machine.slots, machine.names, self.specs)
        return {
            "nodes": [{"node": machine.node.id, "gpus": rows}],
            "mechanism": machine.mechanism,
            "why": machine.why,
            "jobs_per_gpu": self.jobs_per_gpu,
        }

    def log_file(self, job: str, rank: int = 0, stream: str = "stdout", attempt: int | None = None) -> Path:
        """The file a worker writes to; `stream` is stdout or stderr. It may not exist yet."""
        if stream not in ("stdout", "stderr"):
            raise InputError(f"stream {stream!r}: must be stdout or stderr")
        record = self._state.jobs.get(job)
        last = record.attempt if record is not None else int(json.loads(self._known_row(job)["story"])["attempt"])
        number = attempt if attempt is not None else last
        gpus = record.job.gpus if record is not None else from_json(self._known_row(job)["spec"]).gpus
        if not (1 <= number <= last or last == 0) or not 0 <= rank < gpus:
            raise InputError(f"job {job} has {last} attempts and {gpus} workers, numbered from 0")
        return self.home.rank(job, max(1, number), rank) / f"{stream}.log"

    def history(self, *, limit: int = 100, before: str | None = None, user: str | None = None) -> list[Row]:
        """Ended jobs, the latest first, with their receipts."""
        return [json.loads(row["story"]) for row in self._ended_rows(limit, before, user)[:limit]]

    def accuracy(self) -> Row:
        """How right the estimates were."""
        return accuracy(self._store.estimates())

    def workload(self) -> list[Row]:
        """The jobs of the history as the simulator wants them, for `carpool replay`."""
        return [views.workload_row(row) for row in reversed(self._ended_rows(None)) if row["state"] == "finished"]

    async def wait(self, job: str) -> str:
        """The job's state once it has ended: finished, failed or cancelled."""
        while job in self.specs:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.setdefault(job, []).append(waiter)
            await waiter
        return str(self._known_row(job)["state"])

    def _living(self, job: str) -> JobRecord:
        record = self._state.jobs.get(job)
        if record is not None:
            return record
        raise WrongState(f"job {job} has {self._known_row(job)['state']}; submit it again to run it again")

    def _ended_row(self, job: str) -> Row | None:
        for ending in self._driver.endings:
            if ending.record.job.id == job:
                spec = self.specs[job]
                known = ending.record.job
                row = _row_of(job, known.user, known.submitted, spec, self._sources.get(job, {}))
                return {**row, **self._story_of(ending)}
        return self._store.job(int(job)) if job.isdigit() and len(job) < 19 else None

    def _known_row(self, job: str) -> Row:
        row = self._ended_row(job)
        if row is None or row["state"] is None:
            raise NoSuchJob(job)
        return row


def _row_of(name: str, user: str, submitted: float, spec: Spec, source: Row) -> Row:
    """A job's row in the table of jobs."""
    row = {"id": int(name), "user": user, "name": spec.name, "spec": spec.to_json(), "submitted": submitted}
    return {**row, "source": json.dumps(source)}
