"""Restart: the state from snapshot and journal, then the gangs that the executor finds.

Called once by `open_service`, before any request is accepted. The journal decides which jobs there are, and the
executor which processes. A tail of the journal that cannot be read is set aside, and what it said is found elsewhere:
jobs in their table or in their directories, ends in the wrappers' records. Workers that the journal does not know are
killed. An event of an unknown kind is no damage: it stops the start.
"""

import contextlib
import json
import os
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from carpool.core import events as ev
from carpool.core import snapshot
from carpool.core.model import ALIVE, Status
from carpool.core.record import JobRecord
from carpool.core.scheduler import Scheduler
from carpool.core.state import State
from carpool.errors import InputError
from carpool.live.accounts import ADMIN, NOBODY
from carpool.live.clock import Clock
from carpool.live.executors.base import Executor, ExecutorListener, GangKey, StopMode
from carpool.live.home import OWN_JSON_BYTES, Home, read_json, read_own_json
from carpool.live.journal.store import DAMAGE, Commit, Store
from carpool.live.service.dispatcher import Dispatcher, stop_mode
from carpool.live.service.estimator import JobEstimator
from carpool.live.service.inbox import Inbox
from carpool.live.service.jobs import END_FILE, SPEC_FILE, JobBook, new_row, read_source
from carpool.live.service.users import Users
from carpool.live.spec import Spec, from_json, unreadable


class JobsPerGpu(NamedTuple):
    """How many jobs may compute on a GPU, and how many may be there, paused ones included."""

    jobs_per_gpu: int
    resident_per_gpu: int


MakeScheduler = Callable[[JobsPerGpu | None], Scheduler]
"""Makes a fresh scheduler for numbers of jobs per GPU; None: the configured numbers."""


@dataclass
class LoadedState:
    """A scheduler at the journal's end, and what is to be noted about the loading."""

    scheduler: Scheduler
    seq: int = 0
    """Event after which the snapshot was taken."""
    notes: list[str] = field(default_factory=list)


async def load(store: Store, make: MakeScheduler) -> LoadedState:
    """Return a scheduler whose state is that of the journal's end."""
    notes: list[str] = []
    while True:
        loaded = LoadedState(make(None), notes=notes)
        damaged = _replay(store, make, loaded)
        if damaged is None:
            return loaded
        await store.set_aside(damaged)
        notes.append(f"the journal cannot be read from event {damaged} on; that part was set aside")


def _replay(store: Store, make: MakeScheduler, loaded: LoadedState) -> int | None:
    """Replay snapshot and events; return the number of the first event that cannot be applied, or None."""
    fresh, meta = loaded.scheduler.state, store.meta()
    wanted = JobsPerGpu(fresh.jobs_per_gpu, fresh.resident_per_gpu)
    before = JobsPerGpu(*(_count(meta.get(name), value) for name, value in wanted._asdict().items()))
    widest = JobsPerGpu(*map(max, wanted, before))  # gangs of before may be more
    scheduler = loaded.scheduler = make(widest)
    for seq, data in store.snapshots():
        try:
            perf, policy = scheduler.state.perf, scheduler.policy
            scheduler.state = snapshot.restore(data, perf, policy.key, *widest)
            loaded.seq = seq
            break
        except DAMAGE as error:
            scheduler = loaded.scheduler = make(widest)  # the belief may be half restored
            loaded.notes.append(f"the snapshot after event {seq} cannot be read ({error!r}); an older one is used")
    state = scheduler.state
    for seq, event in store.events_after(loaded.seq):
        try:
            if event is None:
                return seq
            state.apply(event)
        except DAMAGE as error:
            loaded.notes.append(f"event {seq} of the journal contradicts the events before it: {error!r}")
            return seq
    state.jobs_per_gpu, state.resident_per_gpu = wanted
    state.needs_decision = True
    return None


def _count(text: str | None, default: int) -> int:
    """Return a number from the journal's meta table; the default if it is missing or damaged."""
    return int(text) if text and text.isdecimal() and len(text) < 10 else default


# ---- jobs ------------------------------------------------------------------------------------------------------------


@dataclass
class JobRecovery:
    """Fills the book of jobs, and finds jobs about which a damaged journal has lost something."""

    home: Home
    store: Store
    state: State
    book: JobBook
    users: Users
    inbox: Inbox
    estimator: JobEstimator

    def run(self, executor: Executor) -> None:
        state, rows, known = self.state, self.store.living_jobs(), self.store.known_jobs()
        lost = list(self._forgotten(known))
        self.book.ids_start_after(max((*known, *(data["id"] for data in lost), *map(int, state.jobs)), default=0))
        for row in rows:
            self.book.specs[str(row["id"])] = self._spec(row)
            self.book.sources[str(row["id"])] = read_source(row["source"])
        for row in rows:
            if str(row["id"]) not in state.jobs and str(row["id"]) not in state.ended:
                self._find(str(row["id"]), row["user"])
        for data in sorted(lost, key=lambda data: int(data["id"])):
            self.book.specs[str(data["id"])] = data["spec"]
            self._find(str(data["id"]), data["user"], new=True, doubt=self._owner_doubt(data["user"], data["uid"]))
        for name in [name for name in state.jobs if name not in self.book.specs]:
            self._restore_spec(name, is_known=int(name) in known)
        unwritten = {str(row["id"]) for row in rows}
        for name in [name for name in state.ended if name not in unwritten]:
            del state.ended[name]
        self.book.read_exit_codes(executor)
        self.book.collect_ended()

    def _spec(self, row: Mapping[str, Any]) -> Spec:
        """Return the spec in a job's row or, if that is damaged, its copy in the job's directory. A job with neither
        is kept, and never launched."""
        name = str(row["id"])
        try:
            return from_json(row["spec"])
        except InputError as error:
            copy = read_own_json(self.home.job(name) / SPEC_FILE)
            with contextlib.suppress(InputError):
                spec = from_json(json.dumps(copy["spec"] if isinstance(copy, dict) and "spec" in copy else None))
                self.inbox.note(f"job {name}: its row in the journal is damaged ({error}); the copy beside it is used")
                return spec
            self.inbox.note(f"job {name}: its row in the journal is damaged ({error}); it does not start again")
            return unreadable()

    def _restore_spec(self, name: str, is_known: bool) -> None:
        """Find the spec of a job whose row is lost or says that it has ended. Without one the job is kept, too, so that
        its owner sees it and can cancel it."""
        row = self.store.job(int(name)) or {}
        self.book.specs[name] = spec = self._spec({"id": name, "spec": row.get("spec")})
        record = self.state.jobs[name]

        def prepare(now: float, commit: Commit) -> Sequence[ev.Event]:
            if not is_known:
                commit.jobs.append(new_row(name, record.job.user, record.job.submitted, spec, {}))
            return ()

        self.inbox.add(prepare)

    def _owner_doubt(self, user: str, uid: int | None) -> str:
        """Return why the owner of a job that is only in its record is not certain; empty: it is. A user that the
        journal lost is restored by the uid in the record, which only the service can write."""
        if user not in self.users.rows and uid and os.getuid() == 0 and user != ADMIN:
            self.users.restore(user, uid)
        doubt = self.users.doubt(user, uid)
        return f"its owner is not certain: {doubt}" if doubt else ""

    def _find(self, name: str, user: str, *, new: bool = False, doubt: str = "") -> None:
        """Recover a job from its directory: it ended, or it is queued again. `new`: the journal has no row of it;
        `doubt`: why it must not start."""
        story = _story_on_disk(self.home, name)
        what = "it had ended" if story else f"it is on hold: {doubt}" if doubt else "it is queued again"
        self.inbox.note(f"job {name}: the journal lost {'it' if new else 'its events'}; {what}")
        spec = self.book.specs[name] if story is None else self.book.specs.pop(name)

        def prepare(now: float, commit: Commit) -> Sequence[ev.Event]:
            if user in self.users.rows:  # the journal may have lost the user, too
                commit.users[user] = json.dumps(self.users.rows[user])
            if new:
                commit.jobs.append(new_row(name, user, now, spec, {}))
            if story is not None:
                commit.stories.append(story)
                return ()
            unsure = doubt or self.users.doubt(user)
            (kind,) = self.estimator.kinds([spec], NOBODY if unsure else self.users.uid_of(user))
            job, _ = self.estimator.job(self.state.perf, replace(spec, after=()), kind, name, user, now)
            job = replace(job, group=self._group(name, user))
            held = (ev.Held(now, name, doubt, for_good=True),) if doubt else ()
            return () if name in self.state.jobs else (ev.Submitted(now, job), *held)

        self.inbox.add(prepare)

    def _group(self, name: str, user: str) -> str:
        """Return the group of a job: that of its record, else that of its user. Caps and limits hold for it."""
        copy = read_own_json(self.home.job(name) / SPEC_FILE)
        group = copy.get("group") if isinstance(copy, dict) else None
        return group if isinstance(group, str) else self.users.group_of(user)

    def _forgotten(self, known: Container[int]) -> Iterator[dict[str, Any]]:
        """Yield the jobs that were accepted but that the journal does not know, from their directories."""
        for path in self.home.jobs.iterdir():
            record = path / SPEC_FILE
            if not path.name.isdigit() or int(path.name) in known or not record.exists():
                continue
            try:
                data = read_own_json(record)
                user, uid, spec = data["user"], data.get("uid"), from_json(json.dumps(data["spec"]))
                if not isinstance(user, str) or not isinstance(uid, int | None):
                    raise TypeError
                yield {"id": int(path.name), "user": user, "uid": uid, "spec": spec}
            except (AttributeError, InputError, KeyError, TypeError):
                self.inbox.note(f"job {path.name}: its record {record} cannot be trusted or read; it does not start")


def _story_on_disk(home: Home, job: str) -> dict[str, Any] | None:
    """Return a job's story as it was to be written to the journal; None: the job had not ended."""
    data = read_json(home.job(job) / END_FILE, OWN_JSON_BYTES)
    return data if isinstance(data, dict) and {"id", "state", "ended", "story"} <= data.keys() else None


# ---- gangs -----------------------------------------------------------------------------------------------------------


@dataclass
class GangRecovery:
    """Finds the gangs of all jobs that should have one, and continues from there."""

    state: State
    executor: Executor
    dispatcher: Dispatcher
    inbox: Inbox
    clock: Clock

    async def run(self, listener: ExecutorListener) -> None:
        alive = [record for record in self.state.jobs.values() if record.status in ALIVE]
        found = await self.executor.recover(_gangs(alive), listener)
        for record in alive:
            self._continue(record, found)

    def _continue(self, record: JobRecord, found: Collection[GangKey]) -> None:
        """Continue with a job. A gang that was found and is not present has ended, and its end is reported."""
        key = (record.job.id, record.attempt)
        before = (record.job.id, record.attempt - 1)
        present = self.executor.present()
        if record.status in (Status.STOPPING, Status.CANCELLING):
            if key in present or before in present or not {key, before}.intersection(found):
                self.dispatcher.stop_workers(record, stop_mode(record))
        elif key in present:
            if record.status is Status.RUNNING:
                self.executor.retune(key, record.accumulation)
            if record.status in (Status.STARTING, Status.RUNNING):
                self.dispatcher.compute_later(record)
            elif record.status is Status.PAUSED:  # it may have gone on while no service ran
                self.executor.pause(key, swap=record.swapped)
        elif key in found:
            return
        elif record.status is Status.STARTING:
            self.dispatcher.launch_later(record)
            if before in present:
                self.executor.stop(before, StopMode.SAVE)
        else:
            self.inbox.add_events(ev.Failed(self.clock.now(), *key, "its directory is gone", True))


def _gangs(records: Sequence[JobRecord]) -> list[GangKey]:
    """Return the gangs that these jobs may have: the present attempt's, and the one before of a job that moves."""
    keys = [(record.job.id, record.attempt) for record in records]
    moved = [(r.job.id, r.attempt - 1) for r in records if r.leaving and r.gpus and r.attempt > 1]
    return keys + moved
