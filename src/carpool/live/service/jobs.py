"""The book of jobs: what the service keeps about them besides the scheduler's state.

For jobs that have not ended, that is what was submitted and where the estimate of their duration came from. Jobs that
ended stay here until their last row, the story, is in the journal. Requests, queries and the driver all use it.
"""

import asyncio
import contextlib
import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from carpool.core.record import JobRecord
from carpool.core.state import State
from carpool.errors import InputError
from carpool.live.errors import NoSuchJob, Unavailable, WrongStatus
from carpool.live.executors.base import Executor
from carpool.live.home import Home, read_own_json, write_private
from carpool.live.insight import views
from carpool.live.journal.store import Store
from carpool.live.spec import Spec
from carpool.live.text import how_it_ended

Row = dict[str, Any]
KEPT_ROWS = 1000
"""Number of rows of ended jobs that stay in memory."""
SPEC_FILE, END_FILE = "job.json", "ended.json"
"""Copies in a job's directory of what was submitted and how it ended, for when the journal is damaged."""


@dataclass(slots=True)
class EndedJob:
    """A job that has ended and whose story is not in the journal yet."""

    record: JobRecord
    exit_code: int | None

    @property
    def id(self) -> str:
        return self.record.job.id


class JobBook:
    """Specs, estimates' sources, stories and ids of jobs."""

    def __init__(self, home: Home, store: Store, state: State) -> None:
        self._home, self._store, self._state = home, store, state
        self.specs: dict[str, Spec] = {}
        """Specs of the jobs that have not ended, or whose story is not written."""
        self.sources: dict[str, Row] = {}
        """Where the estimates of these jobs' durations came from."""
        self.ended: list[EndedJob] = []
        """Jobs whose story is still to be written."""
        self.exit_codes: dict[str, int | None] = {}
        """Exit codes of gangs that ended, until their jobs' stories are written."""
        self.faults: dict[str, int] = {}
        """Number of node faults that hit each job."""
        self._next_id = 1
        self._read: OrderedDict[str, Row | None] = OrderedDict()
        """Rows of ended jobs that were read from the journal, which do not change any more; None: there is no row."""
        self.picture: Callable[[JobRecord], Row] = lambda record: {}
        """Return what the story of an ended job has for its picture."""
        self._copying = ThreadPoolExecutor(1, "stories")
        self._waiters: dict[str, list[asyncio.Future[None]]] = {}

    # ---- jobs that have not ended ----------------------------------------------------------------------------------

    def new_ids(self, number: int) -> list[str]:
        names = [str(self._next_id + index) for index in range(number)]
        self._next_id += number
        return names

    def ids_start_after(self, highest: int) -> None:
        self._next_id = highest + 1

    def discard(self, names: Sequence[str]) -> None:
        """Forget jobs that were not accepted."""
        for name in names:
            self.specs.pop(name, None)
            self.sources.pop(name, None)

    def record(self, job: str) -> JobRecord:
        """Return the record of a job that has not ended; raise `WrongStatus` if it has, `NoSuchJob` if unknown."""
        record = self._state.jobs.get(job)
        if record is not None:
            return record
        raise WrongStatus(f"{how_it_ended(job, self.ended_row(job)['state'])}; submit it again to run it again")

    def name(self, job: str) -> str:
        return self.specs[job].name if job in self.specs else ""

    def source(self, job: str) -> Row:
        return self.sources.get(job, {})

    def recorded_uid(self, job: str) -> int | None:
        """Return the uid under which a job was submitted, from the record beside it; None: there is none to trust."""
        record = read_own_json(self._home.job(job) / SPEC_FILE)
        uid = record.get("uid") if isinstance(record, dict) else None
        return uid if isinstance(uid, int) else None

    def counts_iterations(self, job: str) -> bool:
        """Return whether the owner gave the number of iterations. If not, reports count in other units than the
        state."""
        return job in self.specs and self.specs[job].iterations is not None

    # ---- jobs that have ended --------------------------------------------------------------------------------------

    def ended_row(self, job: str) -> Row:
        """Return the row of a job that has ended; raise `NoSuchJob` if there is none."""
        row = self.find_row(job)
        if row is None or row["state"] is None:
            raise NoSuchJob(job)
        return row

    def find_row(self, job: str) -> Row | None:
        """Return a job's row as it is in the journal or will be written. `read_ahead` makes it quick."""
        for ended in self.ended:
            if ended.id == job:
                return self._unwritten_row(ended)
        if job in self._read:
            return self._read[job]
        return self._store.job(int(job)) if self._may_have_row(job) else None

    def _may_have_row(self, job: str) -> bool:
        return job.isascii() and job.isdigit() and len(job) < 19 and int(job) < self._next_id

    async def read_ahead(self, jobs: Iterable[str]) -> None:
        """Read the rows of jobs that have ended in the background, so that nothing waits for a database on the loop."""
        unknown = {job for job in jobs if job not in self.specs and job not in self._read and self._may_have_row(job)}
        if not unknown:
            return
        rows = {str(row["id"]): row for row in await asyncio.to_thread(self._store.jobs, sorted(map(int, unknown)))}
        for job in unknown - self.specs.keys():
            if job not in rows or rows[job]["state"] is not None:
                self._read[job] = rows.get(job)
        while len(self._read) > KEPT_ROWS:
            self._read.popitem(last=False)

    def ended_rows(self, limit: int | None, before: str | None = None) -> list[Row]:
        """Return the rows of ended jobs, the latest submitted first: those still to be written, then those on disk."""
        fresh = self._unwritten_rows(before)
        return _together(fresh, self._store.ended_jobs(limit, int(before) if before is not None else None))

    async def read_ended(self, limit: int | None, before: str | None = None) -> list[Row]:
        """Return the same as `ended_rows`, without waiting for a database on the loop."""
        fresh = self._unwritten_rows(before)  # first: one that is written meanwhile is found in the journal
        last = int(before) if before is not None else None
        return _together(fresh, await asyncio.to_thread(self._store.ended_jobs, limit, last))

    async def read_latest_ended(self, limit: int, before: str | None, user: str | None) -> list[Row]:
        """Return the rows of ended jobs, the latest end first; with `before`, those that ended before this job did."""
        last = None
        if before is not None:
            await self.read_ahead([before])
            row = None if before in self._state.jobs else self.find_row(before)
            if row is None or row["state"] is None:
                raise InputError(f"before: job {before} has not ended, or there is none; give the id of an ended job")
            last = _end(row)
        fresh = [row for row in self._unwritten_rows() if user is None or row["user"] == user]
        written = await asyncio.to_thread(self._store.latest_ended, limit, last, user)
        rows = _together([row for row in fresh if last is None or _end(row) < last], written)
        return sorted(rows, key=_end, reverse=True)[:limit]

    def _unwritten_rows(self, before: str | None = None) -> list[Row]:
        """Return the rows of ended jobs that are still to be written, the latest first."""
        fresh = [ended for ended in self.ended if before is None or int(ended.id) < int(before)]
        return [self._unwritten_row(ended) for ended in reversed(fresh)]

    def _unwritten_row(self, ended: EndedJob) -> Row:
        job = ended.record.job
        return {
            **new_row(job.id, job.user, job.submitted, self.specs[job.id], self.source(job.id)),
            **self.story(ended),
        }

    def story(self, ended: EndedJob) -> Row:
        """Return the columns that a job's row gets at its end."""
        record = ended.record
        row = views.ended_row(self._state, record, self.specs[ended.id], ended.exit_code)
        row["alone_estimate_s"] = record.job.iterations * record.whole_iteration_s
        row |= self.picture(record)
        counted = self.specs[ended.id].iterations is not None
        row["batch"], row["iterations"] = record.job.batch, record.job.iterations if counted else None
        return {"id": int(ended.id), "state": row["status"], "ended": record.ended, "story": json.dumps(row)}

    def collect_ended(self) -> None:
        """List the jobs that the state has marked as ended."""
        self.ended = [EndedJob(record, self.exit_codes.get(name)) for name, record in self._state.ended.items()]

    def read_exit_codes(self, executor: Executor) -> None:
        """After a restart, ask the executor for the exit codes of jobs whose story was not written."""
        for name, record in self._state.ended.items():
            self.exit_codes[name] = executor.exit_code((name, record.attempt))

    def release(self, written: Sequence[EndedJob]) -> None:
        """Drop ended jobs from the state, because their stories are in the journal."""
        for ended in written:
            del self._state.ended[ended.id]
            self.exit_codes.pop(ended.id, None)
        self.collect_ended()

    def close(self, ended: EndedJob, story: Row) -> None:
        """Write an ended job's story beside the journal, in the background, because thousands may end at once. Forget
        the job, and wake the queries that wait for it."""
        self._copying.submit(self._copy_story, ended.id, story)
        self.specs.pop(ended.id, None)
        self.sources.pop(ended.id, None)
        self.faults.pop(ended.id, None)
        self._read.pop(ended.id, None)
        for waiter in self._waiters.pop(ended.id, ()):
            if not waiter.done():
                waiter.set_result(None)

    def _copy_story(self, job: str, story: Row) -> None:
        with contextlib.suppress(OSError):
            write_private(self._home.job(job) / END_FILE, json.dumps(story), sync=False)

    def finish(self) -> None:
        """Wait until all stories are written beside the journal. Blocks."""
        self._copying.shutdown()

    def end_waiting(self) -> None:
        """Tell all queries that wait for a job that the service ends; clients ask the next one."""
        for waiter in [waiter for waiters in self._waiters.values() for waiter in waiters]:
            if not waiter.done():
                waiter.set_exception(Unavailable("the service is stopping; try again when it runs again"))

    async def wait(self, job: str) -> str:
        """Wait until a job has ended and return how: finished, failed or cancelled."""
        while job in self.specs:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            waiters = self._waiters.setdefault(job, [])
            waiters.append(waiter)
            try:
                await waiter
            finally:
                waiters.remove(waiter)  # also when the query was given up
        await self.read_ahead([job])
        return str(self.ended_row(job)["state"])


def _end(row: Row) -> tuple[float, int]:
    """Return when a job ended, and its id: the order of the history."""
    return row["ended"] or 0.0, row["id"]


def _together(fresh: Sequence[Row], written: Sequence[Row]) -> list[Row]:
    """Return rows still to be written and rows of the journal, each once."""
    known = {row["id"] for row in written}
    return [row for row in fresh if row["id"] not in known] + list(written)


def new_row(name: str, user: str, submitted: float, spec: Spec, source: Mapping[str, Any]) -> Row:
    """Return a job's row for the table of jobs."""
    row = {"id": int(name), "user": user, "name": spec.name, "spec": spec.to_json(), "submitted": submitted}
    return {**row, "source": json.dumps(dict(source))}


def read_source(text: Any) -> dict[str, Any]:
    """Return where an estimate came from, as a job's row says; nothing if that cannot be read."""
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        found = json.loads(text)
        return found if isinstance(found, dict) else {}
    return {}
