"""What users may change: submit, cancel, hold, release, requeue, priorities, limits, users.

Every method returns when the change is durable and applied. A request is checked against the state at the moment its
turn comes, not before: in between, a job may end.
"""

import asyncio
import contextlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from carpool.core import events as ev
from carpool.core.model import Limits, Status
from carpool.errors import InputError
from carpool.live.accounts import account
from carpool.live.errors import WrongStatus
from carpool.live.home import write_private
from carpool.live.insight import views
from carpool.live.insight.forecaster import alone_s
from carpool.live.journal.store import Batch
from carpool.live.service import recovery
from carpool.live.service.inside import Inside, new_row
from carpool.live.spec import Spec


class Requests(Inside):
    async def submit(self, specs: Sequence[Spec], user: str) -> list[str]:
        """The new jobs' ids, durable on return. All or none: raises `InputError` for what could never run."""
        names = [str(self._next_id + number) for number in range(len(specs))]
        self._next_id += len(specs)
        kept = await self._keep_snapshots(dict(zip(names, specs, strict=True)), user)

        def prepare(now: float, batch: Batch) -> Sequence[ev.Event]:
            events, rows, sources = [], [], {}
            for name, spec in kept.items():
                wanted = replace(spec, after=self._unmet(spec))
                job, source = self._knowledge.job(self._state.perf, wanted, name, user, now)
                refusal = self._state.refusal(job)
                if refusal:
                    raise InputError(refusal.replace(f"job {name} ", "it "))
                events.append(ev.Submitted(now, job))
                believed = alone_s(self._state.perf, job)
                sources[name] = {"kind": source.kind, "detail": source.detail, "alone_s": believed}
                rows.append(new_row(name, user, now, spec, sources[name]))
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
                raise WrongStatus(f"job {job} is not on hold")
            return (ev.Released(now, job),)

        await self._driver.ask(prepare)

    async def requeue(self, job: str) -> None:
        """Stop a running job (it saves first) and put it back into the queue."""

        def prepare(now: float, batch: Batch) -> Sequence[ev.Event]:
            record = self._living(job)
            if record.status not in (Status.STARTING, Status.RUNNING):
                raise WrongStatus(
                    f"job {job} is {views.shown_status(record.status)}; only a running one can be requeued"
                )
            return (ev.Requeued(now, job, record.attempt),)

        await self._driver.ask(prepare)

    async def set_priority(self, job: str, priority: int) -> None:
        await self._driver.ask(lambda now, batch: (ev.PriorityChanged(now, self._living(job).job.id, priority),))

    async def set_limits(self, user: str, limits: Limits) -> None:
        """`user` "" stands for everybody without limits of their own."""
        await self._driver.ask(lambda now, batch: (ev.LimitsChanged(now, user, limits),))

    async def put_user(self, name: str, row: Mapping[str, Any]) -> None:
        """Keep a user's row: `token_hash`, `role`, `uid`, `revoked` and whatever else the HTTP API wants (JSON)."""

        def prepare(now: float, batch: Batch) -> Sequence[ev.Event]:
            batch.users[name] = json.dumps(dict(row))
            return ()

        await self._driver.ask(prepare)
        self._users[name] = dict(row)
