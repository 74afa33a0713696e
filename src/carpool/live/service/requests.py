"""What users may change: submit, cancel, hold, release, pause, resume, requeue, priorities, limits, users.

Each method returns when the change is durable and applied. A request is checked against the state when its turn comes,
not before, because a job may end in between. The HTTP API decides which user may call what.
"""

import asyncio
import contextlib
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from carpool.core import events as ev
from carpool.core.model import WORKING, Closure, FairShare, Limits, UserGroup
from carpool.core.state import State
from carpool.errors import InputError
from carpool.live.accounts import check_directory
from carpool.live.errors import Unavailable, WrongStatus
from carpool.live.foreign_files import give_tree
from carpool.live.home import Home, folder_mode, write_private
from carpool.live.insight.explain import never_starts
from carpool.live.insight.forecaster import alone_s
from carpool.live.journal.store import Commit
from carpool.live.service.cancellations import UnwrittenCancels
from carpool.live.service.estimator import JobEstimator, JobKind
from carpool.live.service.inbox import Inbox
from carpool.live.service.jobs import SPEC_FILE, JobBook, new_row
from carpool.live.service.notices import NoticeSettings
from carpool.live.service.operator_settings import OperatorSettings
from carpool.live.service.pruner import Pruner
from carpool.live.service.snapshot_quota import RECORDED, SnapshotQuota
from carpool.live.service.users import Users, recorded_uid
from carpool.live.spec import MAX_GRACE_S, Spec
from carpool.live.statuses import shown_status
from carpool.live.text import span


@dataclass
class Requests:
    """The changes that users ask for."""

    home: Home
    state: State
    inbox: Inbox
    book: JobBook
    users: Users
    estimator: JobEstimator
    pruner: Pruner
    unwritten: UnwrittenCancels
    settings: OperatorSettings
    quota: SnapshotQuota
    max_grace_s: float = MAX_GRACE_S
    """Longest time that a job may ask for to save and to leave: it holds its GPUs meanwhile, at its limit and where
    GPUs are drained, too."""
    notices: NoticeSettings = field(default_factory=NoticeSettings)
    """Which notices can be sent."""

    async def submit(self, specs: Sequence[Spec], user: str) -> list[str]:
        """Submit jobs, all or none, and return their ids. Raise `InputError` for a job that could never run."""
        doubt = self.users.doubt(user)
        if doubt:
            raise InputError(doubt)
        self.check(specs)
        for directory in {spec.directory for spec in specs if not spec.snapshot}:
            await self.users.files.look(user, partial(check_directory, directory, self.users.uid_of(user)))
        group = self.users.group_of(user)
        await self.book.read_ahead({name for spec in specs for name in spec.after})
        names = self.book.new_ids(len(specs))
        copied = {name: Path(spec.directory) for name, spec in zip(names, specs, strict=True) if spec.snapshot}
        with self.quota.room(user, await self.quota.measure(user, copied)):
            await self._submit(names, specs, user, group)
            await asyncio.to_thread(self._write_specs, names, user, group)
        return names

    async def _submit(self, names: Sequence[str], specs: Sequence[Spec], user: str, group: str) -> None:
        numbered = [replace(spec, array_job=names[0]) if spec.array_index is not None else spec for spec in specs]
        kept = dict(zip(names, numbered, strict=True))
        kinds: dict[str, JobKind] = {}
        prepared = False

        def prepare(now: float, commit: Commit) -> Sequence[ev.Event]:
            nonlocal prepared
            prepared = True
            events, rows, sources = [], [], {}
            for name, spec in kept.items():
                wanted = replace(spec, after=unmet_dependencies(self.book, spec))
                job, source = self.estimator.job(self.state.perf, wanted, kinds[name], name, user, now)
                job = replace(job, group=group)
                refusal = self.state.refusal(job)
                if refusal:
                    raise InputError(refusal.replace(f"job {name} ", "it "))
                events.append(ev.Submitted(now, job))
                expected = alone_s(self.state, job)
                sources[name] = {"kind": source.kind, "detail": source.detail, "alone_s": expected}
                rows.append(new_row(name, user, now, spec, sources[name]))
            commit.jobs += rows
            self.book.specs.update(kept)
            self.book.sources.update(sources)
            return events

        try:
            kept = await self._copy_directories(kept, user)
            kinds = await self.users.files.look(user, partial(self._kinds, kept, self.users.uid_of(user)))
            await self.inbox.request(prepare)
        except BaseException as error:
            if isinstance(error, Exception) or not prepared:  # else the journal may have them, and the answer is lost
                self.book.discard(names)
                for name in names:
                    shutil.rmtree(self.home.job(name), ignore_errors=True)
            raise

    def check(self, specs: Sequence[Spec]) -> None:
        """Raise `InputError` for jobs that ask for too long a time to save and to leave, or for notices that could
        never be sent."""
        self.notices.check(specs[0].notify or {})  # all jobs of an array have the same
        longest = max(spec.grace_s for spec in specs)
        if longest > self.max_grace_s:
            most = span(self.max_grace_s)
            raise InputError(
                f"grace: {span(longest)} is longer than this service allows ({most}); ask for at most that"
            )

    def _kinds(self, specs: Mapping[str, Spec], uid: int | None) -> dict[str, JobKind]:
        return dict(zip(specs, self.estimator.kinds(specs.values(), uid), strict=True))

    async def _copy_directories(self, specs: Mapping[str, Spec], user: str) -> dict[str, Spec]:
        """Give each job that asked for a code snapshot its own copy of its directory."""
        kept = dict(specs)
        for name, spec in specs.items():
            if spec.snapshot:
                copy = self.home.snapshot(name)
                await asyncio.to_thread(self._copy, Path(spec.directory), copy, user)
                kept[name] = replace(spec, directory=str(copy))
        return kept

    def _copy(self, directory: Path, copy: Path, user: str) -> None:
        uid = self.users.uid_of(user)
        copy.parent.mkdir(mode=0o700 if uid is None else 0o711, parents=True, exist_ok=True)
        private = Path(tempfile.mkdtemp(prefix=".copying-", dir=copy.parent))
        try:
            shutil.copytree(directory, private / "files", symlinks=True)
            if uid is not None:
                give_tree(private / "files", uid)
            (private / "files").rename(copy)
        finally:
            shutil.rmtree(private, ignore_errors=True)

    def _write_specs(self, names: Sequence[str], user: str, group: str) -> None:
        """Write the specs beside the journal, so that a damaged journal loses no job."""
        for name in names:
            spec = self.book.specs.get(name)
            with contextlib.suppress(OSError):
                self.home.job(name).mkdir(mode=folder_mode(), exist_ok=True)
                if spec is not None:
                    uid = recorded_uid(user, self.users)
                    record = {"user": user, "uid": uid, "group": group, "spec": spec.plain()}
                    if spec.snapshot:
                        record[RECORDED] = self.quota.size(name)
                    write_private(self.home.job(name) / SPEC_FILE, json.dumps(record), sync=False)

    async def cancel(self, job: str) -> None:
        """End a job for good."""
        refused = await self.cancel_all([job])
        if refused:
            raise refused[job]

    async def cancel_all(self, jobs: Sequence[str]) -> dict[str, InputError]:
        """End jobs for good, and return why some cannot be. Works also where the journal cannot be written."""
        refused: dict[str, InputError] = {}

        def known() -> list[str]:
            refused.clear()
            for job in dict.fromkeys(jobs):
                try:
                    self.book.record(job)
                except InputError as error:
                    refused[job] = error
            return [job for job in dict.fromkeys(jobs) if job not in refused]

        try:
            await self.inbox.request(lambda now, commit: [ev.Cancelled(now, job) for job in known()])
        except Unavailable:
            if self.inbox.closed or not self.unwritten.leads():
                raise
            self.unwritten.cancel(known())
        return refused

    async def hold(self, job: str) -> None:
        """Keep a waiting job from starting until `release`."""
        await self.inbox.request(lambda now, commit: (ev.Held(now, self.book.record(job).job.id),))

    async def release(self, job: str) -> None:
        """Let a held job start again."""

        def prepare(now: float, commit: Commit) -> Sequence[ev.Event]:
            record = self.book.record(job)
            if not record.on_hold:
                raise WrongStatus(f"job {job} is not on hold")
            if record.held_for_good:
                raise WrongStatus(f"job {job} never starts: {never_starts(record)}")
            return (ev.Released(now, job),)

        await self.inbox.request(prepare)

    async def pause(self, job: str) -> None:
        """Let a running job stand still on its GPUs until `resume`. It keeps its memory."""

        def prepare(now: float, commit: Commit) -> Sequence[ev.Event]:
            record = self.book.record(job)
            if record.status not in WORKING:
                shown = shown_status(record.status)
                raise WrongStatus(f"job {job} is {shown}; only a running job can be paused; see `carpool hold`")
            return () if record.paused_by_owner else (ev.PausedByOwner(now, job),)

        await self.inbox.request(prepare)

    async def resume(self, job: str) -> None:
        """Let a job that its owner paused go on, as soon as its GPUs have room for it."""

        def prepare(now: float, commit: Commit) -> Sequence[ev.Event]:
            record = self.book.record(job)
            if record.kept_paused:
                raise WrongStatus(f"job {job} is paused while its GPUs are drained or reserved")
            if not record.paused_by_owner:
                why = "the policy paused it and resumes it" if record.paused_since >= 0.0 else "it is not paused"
                raise WrongStatus(f"job {job} was not paused with `carpool pause`: {why}")
            return (ev.ResumedByOwner(now, job),)

        await self.inbox.request(prepare)

    async def requeue(self, job: str) -> None:
        """Suspend a running job: it saves, stops, and goes back into the queue."""

        def prepare(now: float, commit: Commit) -> Sequence[ev.Event]:
            record = self.book.record(job)
            if record.status not in WORKING:
                shown = shown_status(record.status)
                raise WrongStatus(f"job {job} is {shown}; only a running or paused job can be requeued")
            return (ev.Requeued(now, job, record.attempt),)

        await self.inbox.request(prepare)

    async def prune(self, job: str, user: str) -> int:
        """Remove the files of a job that has ended, which its owner releases. Return their size in bytes."""
        if job in self.book.specs:
            raise WrongStatus(f"job {job} has not ended; only files of jobs that have ended can be removed")
        self.book.ended_row(job)
        return await self.pruner.release(job, user)

    async def set_priority(self, job: str, priority: int) -> None:
        """Change a job's priority: higher goes first."""
        await self.inbox.request(lambda now, commit: (ev.PriorityChanged(now, self.book.record(job).job.id, priority),))

    async def set_limits(self, user: str, limits: Limits) -> None:
        """Limit what a user may hold at a time. `user` "" stands for all users without limits of their own."""
        await self.inbox.request(lambda now, commit: (ev.LimitsChanged(now, user, limits),))

    async def set_group(self, group: UserGroup) -> None:
        """Describe a group of users: its weight, its guarantee and its cap."""
        await self.settings.change(self.inbox, lambda now: ev.GroupChanged(now, group))

    async def set_closure(self, closure: Closure) -> None:
        """Drain GPUs, or reserve them for a group."""
        await self.settings.change(self.inbox, lambda now: ev.ClosureSet(now, closure))

    async def remove_closure(self, name: str) -> None:
        """Take back a drain or a reservation."""
        await self.settings.change(self.inbox, lambda now: ev.ClosureRemoved(now, name), name=name)

    async def set_fair_share(self, fair_share: FairShare) -> None:
        """Choose how strongly groups and users that used less than their share go first."""
        await self.settings.change(self.inbox, lambda now: ev.FairShareChanged(now, fair_share))

    async def put_user(self, name: str, row: Mapping[str, Any]) -> None:
        """Replace a user's row: `token_hash`, `role`, `uid`, `revoked` and other JSON that the HTTP API keeps."""
        async with self.users.changing:
            before, new = dict(self.users.rows), self.users.next_row(name, row)
            await self._write_users({**before, name: new})

            def prepare(now: float, commit: Commit) -> Sequence[ev.Event]:
                commit.users[name] = json.dumps(new)
                return ()

            try:
                await self.inbox.request(prepare)
            except BaseException:
                with contextlib.suppress(Unavailable):
                    await self._write_users(before)
                raise
            self.users.rows[name] = new

    async def _write_users(self, rows: Mapping[str, dict[str, Any]]) -> None:
        """Write the copy of the users beside the journal."""
        try:
            await asyncio.to_thread(self.users.write, rows)
        except OSError as error:
            raise Unavailable(
                f"the list of users cannot be written ({error.strerror}); make room and try again"
            ) from None


def unmet_dependencies(book: JobBook, spec: Spec) -> tuple[str, ...]:
    """Return the jobs of `after` that have not finished. Raise `InputError` if one of them never will."""
    unmet = []
    for name in spec.after:
        if name in book.specs:
            unmet.append(name)
            continue
        row = book.find_row(name)
        if row is None:
            raise InputError(f"after: there is no job {name!r}; `carpool jobs --all` lists them")
        if row["state"] != "finished":
            raise InputError(f"after: job {name} {row['state']}, so this one would never start")
    return tuple(unmet)
