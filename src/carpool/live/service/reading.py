"""What users may look at: jobs, GPUs, logs, history. Results are plain lists and dictionaries, ready for JSON.

Living jobs come from the state, ended ones from the journal's table of jobs. Who may see what is the API's business.
"""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

from carpool.core.record import JobRecord
from carpool.errors import InputError
from carpool.live.insight import views
from carpool.live.insight.forecaster import accuracy
from carpool.live.insight.receipt import receipt
from carpool.live.service.inside import Row
from carpool.live.service.requests import Requests
from carpool.live.spec import Spec, from_json


class Reading(Requests):
    def users(self) -> dict[str, Row]:
        return {name: dict(row) for name, row in self._users.items()}

    def owner(self, job: str) -> str:
        """Whose job it is; raises `NoSuchJob`."""
        record = self._state.jobs.get(job)
        return record.job.user if record is not None else str(self._known_row(job)["user"])

    def jobs(self, all: bool = False, *, limit: int | None = None, before: str | None = None) -> list[Row]:
        """Jobs in order of submission, with `all` also those that ended; the last `limit` of them before a job id.

        Keys: job, name, user, status, gpus, submitted, started, finished, exit_code, and reason, priority, held,
        model, attempt, ran_s (in all attempts), progress (0 to 1), measured (or estimated), on (GPUs as node:index),
        mates.
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
        report, now = self._watch.latest(record), self._clock.now()
        return views.job_row(self._state, record, spec, self._machine.slots, report, now)

    def _ended_rows(self, limit: int | None, before: str | None = None, user: str | None = None) -> list[Row]:
        """Ended jobs, the latest first: those whose story is still to be written, then those on disk."""
        rows = self._store.ended_jobs(limit, int(before) if before is not None else None, user)
        known = {row["id"] for row in rows}
        fresh = [e for e in self._driver.endings if int(e.record.job.id) not in known]
        fresh = [e for e in fresh if (before is None or int(e.record.job.id) < int(before))]
        fresh = [e for e in fresh if user is None or e.record.job.user == user]
        return [self._fresh_row(ending) for ending in reversed(fresh)] + rows

    def _story(self, row: Row) -> Row:
        story = views.read_story(row["story"])
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
            spec, row = from_json(known["spec"]), views.read_story(known["story"])
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
        return {**row, "sentences": [f"Job {job} has {row['status']}{why}.", *row["receipt"]["sentences"]]}

    def dry_run(self, spec: Spec, user: str) -> Row:
        """What would happen: `where` (GPUs or None), `mates`, `start` and `end` estimates with a range and source."""
        wanted, now = replace(spec, after=self._unmet(spec)), self._clock.now()
        job, source = self._knowledge.job(self._state.perf, wanted, "0", user, now)
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
        record, last = self._state.jobs.get(job), self.last_attempt(job)
        number = attempt if attempt is not None else last
        gpus = record.job.gpus if record is not None else from_json(self._known_row(job)["spec"]).gpus
        if not (1 <= number <= last or last == 0) or not 0 <= rank < gpus:
            raise InputError(f"job {job} has {last} attempts and {gpus} workers, numbered from 0")
        return self.home.rank(job, max(1, number), rank) / f"{stream}.log"

    def last_attempt(self, job: str) -> int:
        """The number of its latest launch; 0: it was never launched."""
        record = self._state.jobs.get(job)
        return record.attempt if record is not None else int(json.loads(self._known_row(job)["story"])["attempt"])

    def is_over(self, job: str, attempt: int) -> bool:
        """Will the workers of that launch write nothing more?"""
        record = self._state.jobs.get(job)
        return record is None or (attempt < record.attempt and (job, attempt) not in self._executor.present())

    def history(self, *, limit: int = 100, before: str | None = None, user: str | None = None) -> list[Row]:
        """Ended jobs, the latest first, with their receipts."""
        return [views.read_story(row["story"]) for row in self._ended_rows(limit, before, user)[:limit]]

    def accuracy(self) -> Row:
        """How right the estimates were."""
        return accuracy(self._store.estimates())

    def workload(self) -> list[Row]:
        """The jobs of the history as the simulator wants them, for `carpool replay`."""
        return [views.workload_row(row) for row in reversed(self._ended_rows(None)) if row["state"] == "finished"]

    async def wait(self, job: str) -> str:
        """The job's status once it has ended: finished, failed or cancelled."""
        while job in self.specs:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            waiters = self._waiters.setdefault(job, [])
            waiters.append(waiter)
            try:
                await waiter
            finally:
                waiters.remove(waiter)  # also when whoever waited has gone
        return str(self._known_row(job)["state"])
