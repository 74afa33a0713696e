"""What users may look at: jobs, GPUs, logs, history. Results are plain lists and dictionaries, ready for JSON.

Jobs that have not ended come from the state, ended ones from the journal's table of jobs. The HTTP API decides which
user may see what.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date, timedelta
from functools import partial

from carpool.belief.model import Belief
from carpool.core.accounts import EARLIER
from carpool.core.model import Status
from carpool.core.record import JobRecord
from carpool.core.state import State
from carpool.core.trial import Trial
from carpool.core.usage_report import report_usage
from carpool.errors import InputError
from carpool.live.clock import Clock
from carpool.live.executors.base import Executor, FetchesCheckpoints, LogChunk, TellsDelays
from carpool.live.insight import views
from carpool.live.insight.closures import closed_why, closure_row
from carpool.live.insight.forecaster import Forecaster, accuracy
from carpool.live.insight.receipt import receipt
from carpool.live.journal.store import Store
from carpool.live.service.cancellations import REASON, UnwrittenCancels
from carpool.live.service.estimator import JobEstimator
from carpool.live.service.inventory import Inventory
from carpool.live.service.jobs import JobBook, Row, read_source
from carpool.live.service.progress import ProgressWatch
from carpool.live.service.pruner import Pruner
from carpool.live.service.records import Recorder
from carpool.live.service.requests import unmet_dependencies
from carpool.live.service.users import Users
from carpool.live.spec import Spec, stored
from carpool.live.statuses import shown_status
from carpool.live.text import clock as clock_text
from carpool.live.text import demand_text, how_it_ended, span

MAX_LOG_BYTES = 1 << 20
"""Largest part of a log that one query returns."""
SHOWN_ATTEMPTS = 10
MOST_DRY = 1000
"""Number of jobs that a dry run forecasts: the scheduler waits meanwhile, half a second for so many."""
EPOCH = date(1970, 1, 1)


def _date(day: int) -> str:
    """Return a day of the accounts as a date."""
    return "earlier" if day == EARLIER else (EPOCH + timedelta(days=day)).isoformat()


@dataclass
class Queries:
    """The questions that users ask."""

    state: State
    store: Store
    clock: Clock
    executor: Executor
    inventory: Inventory
    book: JobBook
    user_book: Users
    progress: ProgressWatch
    estimator: JobEstimator
    forecaster: Forecaster
    pruner: Pruner
    unwritten: UnwrittenCancels
    recorder: Recorder
    policy: str = ""
    """The policy as the operator named it."""
    policy_failure: Callable[[], str] = lambda: ""
    """How the policy failed lately, and what decides instead; empty: it did not."""
    undelivered: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Why notices did not arrive, by job."""

    # ---- jobs ------------------------------------------------------------------------------------------------------

    def jobs(self, all: bool = False, *, limit: int | None = None, before: str | None = None) -> list[Row]:
        """Return jobs in order of submission, with `all` also ended ones; the last `limit` of them before a job id.

        Keys: job, name, user, status, gpus, submitted, started, finished, exit_code, and reason, priority, held,
        model, attempt, ran_s (in all attempts), progress (0 to 1), measured (or estimated), on (GPUs as node:index),
        mates.
        """
        living = list(self.state.jobs.values())
        if before is not None:
            living = [record for record in living if int(record.job.id) < int(before)]
        rows = self._rows(living if limit is None else living[-limit:], self.clock.now())
        return self._with_ended(rows, self.book.ended_rows(limit, before), limit) if all else rows

    async def page(self, all: bool, *, limit: int, before: str | None) -> list[Row]:
        """Return the same as `jobs`, without waiting for a database on the loop."""
        rows = self.jobs(limit=limit, before=before)  # first: a job that ends meanwhile is found in the journal
        return self._with_ended(rows, await self.book.read_ended(limit, before), limit) if all else rows

    async def some(self, jobs: Sequence[str]) -> list[Row]:
        """Return the rows of these jobs, ended or not, as far as there are any."""
        await self.book.read_ahead(jobs)
        living = [self.state.jobs[job] for job in jobs if job in self.state.jobs]
        ended = [row for job in jobs if job not in self.state.jobs and (row := self.book.find_row(job)) is not None]
        return self._with_ended(self._rows(living, self.clock.now()), [row for row in ended if row["state"]], None)

    def _with_ended(self, living: list[Row], ended: list[Row], limit: int | None) -> list[Row]:
        stories = map(_without_receipt, views.read_stories(ended))
        found = {row["job"]: row for row in (*living, *stories)}
        rows = sorted(found.values(), key=lambda row: int(row["job"]))
        return rows if limit is None else rows[-limit:]

    def _rows(self, records: list[JobRecord], now: float) -> list[Row]:
        labels = self.inventory.labels()
        rows = [
            views.job_row(
                self.state,
                record,
                self.book.specs[record.job.id],
                labels,
                now,
                done=self.progress.done(record),
                report=self.progress.latest(record),
            )
            for record in records
        ]
        for row in rows:
            if row["job"] in self.unwritten.jobs:
                row["status"], row["reason"] = "stopping", REASON
            if row["status"] == "pending" and (doubt := self.user_book.doubt(row["user"])):
                row["reason"] = f"its owner is not certain: {doubt}"
            if row["status"] == "starting":
                row["reason"] = row["reason"] or self._delay(row["job"])
        return rows

    def _delay(self, job: str) -> str:
        """Return why a job's workers could not be started so far, if the executor can say it."""
        attempt = self.state.jobs[job].attempt
        return self.executor.delay((job, attempt)) if isinstance(self.executor, TellsDelays) else ""

    def show(self, job: str) -> Row:
        """Return everything about a job: the keys of `jobs`, and spec (with env: hide it from other users), attempts
        with their ranks, receipt, and the source of the estimate."""
        record = self.state.jobs.get(job)
        if record is not None:
            spec, source = self.book.specs[job], self.book.source(job)
            now = max(self.clock.now(), self.state.now)
            row = {**self._rows([record], now)[0], "receipt": receipt(record, now)}
            row["report_dropped"] = self.progress.dropped(record)
            row["demand"] = self._demand(record)
            row["checkpoint_left"] = self._checkpoint_left(job)
        else:
            known = self.book.ended_row(job)
            spec, row = stored(known["spec"]), views.read_story(known)
            row["files"] = self.pruner.describe(job)
            source = read_source(known["source"])
        row["undelivered"] = list(self.undelivered.get(job, ()))
        return {**row, "spec": spec.plain(), "attempts": self._attempts(job, row["attempt"]), "source": source}

    def _checkpoint_left(self, job: str) -> str:
        """Say why a job cannot go on everywhere from where it stopped; empty: it can."""
        return self.executor.checkpoint_left(job) if isinstance(self.executor, FetchesCheckpoints) else ""

    def _demand(self, record: JobRecord) -> Row | None:
        """Return what jobs of a job's family use of a GPU; None: it was never measured."""
        perf = self.state.perf
        demand = perf.demand_of(record.job, record.accumulation) if isinstance(perf, Belief) else None
        return None if demand is None else asdict(demand)

    def _trial_text(self, job: str, trial: Trial) -> str:
        """Say that a job is tried beside another, and what that may cost it."""
        own = next(side for side in trial.sides if side.job == job)
        others = trial.hosts if own is trial.guest else (trial.guest,)
        named = f"job{'s' if len(others) > 1 else ''} {', '.join(side.job for side in others)}"
        most = f" It may cost this job {span(own.budget_s)}." if own.budget_s else ""
        return f"It is tried beside {named}, because nothing is known of them together.{most}"

    def _attempts(self, job: str, last: int) -> list[Row]:
        numbers = range(max(1, last - SHOWN_ATTEMPTS + 1), last + 1)
        return [{"attempt": number, "ranks": self.executor.ranks((job, number))} for number in numbers]

    def status(self, job: str) -> Row:
        """Return a job's id and status, and whether it is on hold: what a change answers with."""
        record = self.state.jobs.get(job)
        if record is None:
            return {"job": job, "status": self.book.ended_row(job)["state"], "held": False}
        status = "stopping" if job in self.unwritten.jobs else shown_status(record.status)
        return {"job": job, "status": status, "held": record.on_hold}

    def explain(self, job: str) -> Row:
        """Explain a job: position, reason, mates with expected and measured slow-downs, start and end with a range."""
        if job in self.state.jobs:
            answer = self.forecaster.explain(job)
            doubt, failure = self.user_book.doubt(answer["user"]), self.policy_failure()
            dropped = self.progress.dropped(self.state.jobs[job])
            more = [f"A report of it was dropped, because it cannot be true: {dropped}."] if dropped else []
            report = self.progress.latest(self.state.jobs[job])
            if report is not None and report.watched and report.seconds > 0.0:
                more.append(f"It is watched: an iteration takes {report.seconds:.3g} s now.")
            demand = self._demand(self.state.jobs[job])
            if demand is not None:
                more.append(f"Jobs like it use {demand_text(demand)} when they run alone.")
            running = self.state.trials.running.values()
            more += [self._trial_text(job, one) for one in running if any(side.job == job for side in one.sides)]
            if self.state.jobs[job].warming_up:
                more.append("It starts up: it has made no step, and slows no other job down so far.")
            more += [f"It cannot start: {doubt}."] if doubt else []
            more += [f"{delay[0].upper()}{delay[1:]}."] if (delay := self._delay(job)) else []
            more += self._absent_nodes(job)
            left = self._checkpoint_left(job)
            more += [f"{left[0].upper()}{left[1:]}."] if left else []
            more += [f"{failure[0].upper()}{failure[1:]}."] if failure else []
            return {**answer, "sentences": [*answer["sentences"], *more]}
        row = {key: value for key, value in self.show(job).items() if key not in ("spec", "attempts", "undelivered")}
        why = f": {row['reason']}" if row["reason"] else ""
        how = how_it_ended(job, row["status"])
        return {**row, "sentences": [f"{how[0].upper()}{how[1:]}{why}.", *row["receipt"]["sentences"]]}

    def _absent_nodes(self, job: str) -> list[str]:
        """Say which nodes a waiting job cannot use now, and whether those that are here suffice for it."""
        record = self.state.jobs[job]
        if record.status is not Status.PENDING:
            return []
        lines = [f"Node {node.id} takes no new job: {node.closed}." for node in self.inventory.nodes if node.closed]
        now = max(self.clock.now(), self.state.now)
        for closure in self.state.closures.values():
            if not closure.is_for(record.job) and self.state.latest_end(record) > closure.start:
                what = "drained" if closure.group is None else f"reserved for {closure.group}"
                moment = "" if closure.start <= now else f" from {clock_text(closure.start, now)} on"
                many = f"{len(closure.gpus)} GPU{'s are' if len(closure.gpus) > 1 else ' is'}"
                lines.append(f"{many} {what}{moment} ({closure.id}), and it would run into that.")
        here = sum(len(node.slots) for node in self.inventory.nodes)
        if record.job.gpus > here:
            lines.append(f"It needs {record.job.gpus} GPUs, and the nodes that are here have {here}.")
        return lines

    async def dry_run(self, specs: Sequence[Spec], user: str) -> Row:
        """Return what would happen to jobs: `where` (GPUs or None), `mates`, `start`, `end` of the first with range and
        source; their number in `jobs`; and of several, what `Forecaster.dry_run` adds."""
        doubt = self.user_book.doubt(user)
        if doubt:
            raise InputError(doubt)
        number, specs = len(specs), specs[:MOST_DRY]
        kinds = await self.user_book.files.look(user, partial(self.estimator.kinds, specs, self.user_book.uid_of(user)))
        await self.book.read_ahead(specs[0].after)  # one request, one list
        after, now = unmet_dependencies(self.book, specs[0]), self.clock.now()
        jobs, sources = [], {}
        for index, (spec, kind) in enumerate(zip(specs, kinds, strict=True)):
            name = f"0.{index}" if index else "0"  # no job has such an id
            job, source = self.estimator.job(self.state.perf, replace(spec, after=after), kind, name, user, now)
            refusal = self.state.refusal(job)
            if refusal:
                raise InputError(refusal.replace(f"job {name} ", "it "))
            jobs.append(job)
            sources[name] = {"kind": source.kind, "detail": source.detail}
        answer = self.forecaster.dry_run(jobs, sources)
        if number > len(jobs):
            note = f"These are {number} jobs. The forecast is that of the first {len(jobs)}, without the others:"
            answer["sentences"] = [note, *answer["sentences"]]
        return {**answer, "jobs": number}

    async def wait(self, job: str) -> str:
        """Wait until a job has ended and return how: finished, failed or cancelled."""
        return await self.book.wait(job)

    def owner(self, job: str) -> str:
        """Return the user that a job belongs to; raise `NoSuchJob` if there is none."""
        record = self.state.jobs.get(job)
        return record.job.user if record is not None else str(self.book.ended_row(job)["user"])

    # ---- logs ------------------------------------------------------------------------------------------------------

    async def read_log(
        self,
        job: str,
        rank: int = 0,
        stream: str = "stdout",
        *,
        attempt: int | None = None,
        offset: int = 0,
        limit: int = MAX_LOG_BYTES,
        tail: int | None = None,
    ) -> LogChunk:
        """Read a part of a worker's output; `attempt` None: of the latest attempt. `stream`: stdout or stderr."""
        if stream not in ("stdout", "stderr"):
            raise InputError(f"stream {stream!r}: must be stdout or stderr")
        record, last = self.state.jobs.get(job), self.last_attempt(job)
        number = attempt if attempt is not None else last
        gpus = record.job.gpus if record is not None else stored(self.book.ended_row(job)["spec"]).gpus
        if not (1 <= number <= last or last == 0):
            numbers = "1" if last == 1 else f"1 to {last}"
            raise InputError(f"--attempt {number}: job {job} had {last} attempt{'s' * (last != 1)}; give {numbers}")
        if not 0 <= rank < gpus:
            numbers = "0" if gpus == 1 else f"0 to {gpus - 1}"
            raise InputError(f"--rank {rank}: job {job} has {gpus} worker{'s' * (gpus != 1)}; give {numbers}")
        key = (job, max(1, number))
        return await self.executor.read_log(key, rank, stream, offset=offset, limit=limit, tail=tail)

    def last_attempt(self, job: str) -> int:
        """Return the number of a job's latest attempt; 0: it never started."""
        record = self.state.jobs.get(job)
        return record.attempt if record is not None else int(views.read_story(self.book.ended_row(job))["attempt"])

    def is_over(self, job: str, attempt: int) -> bool:
        """Return whether the workers of an attempt will write nothing more."""
        record = self.state.jobs.get(job)
        return record is None or (attempt < record.attempt and (job, attempt) not in self.executor.present())

    # ---- the cluster and the past ----------------------------------------------------------------------------------

    def groups(self) -> Row:
        """Return the groups with what they hold and used, and how strongly shares count."""
        members: dict[str, list[str]] = {}
        for name in sorted(self.user_book.rows):
            if group := self.user_book.group_of(name):
                members.setdefault(group, []).append(name)
        tenants = self.state.tenants
        names = sorted({*members, *tenants.settings, *tenants.groups})
        rows = views.group_rows(self.state, names, max(self.clock.now(), self.state.now))
        for row in rows:
            row["users"] = members.get(row["name"], [])
        return {"groups": rows, "fair_share": asdict(tenants.fair_share)}

    def usage(self, by: Sequence[str], since: date | None = None, until: date | None = None) -> Row:
        """Return what jobs used of the GPUs up to now, by some keys, of the days from `since` to `until` in UTC."""
        first, last = (None if day is None else (day - EPOCH).days for day in (since, until))
        now = max(self.clock.now(), self.state.now)
        found = report_usage(self.state, by, now, first, last).plain(_date)
        return {
            "since": None if since is None else since.isoformat(),
            "until": None if until is None else until.isoformat(),
            "counted_since": self.state.accounts.opened,
            "now": now,
            **found,
        }

    def closures(self) -> list[Row]:
        """Return what is drained or reserved, the earliest first."""
        labels = self.inventory.labels()
        ordered = sorted(self.state.closures.values(), key=lambda closure: (closure.start, closure.id))
        return [closure_row(self.state, closure, labels) for closure in ordered]

    def closed_on(self, node: str) -> str:
        """Return why GPUs of a node are closed; empty: none is."""
        now = max(self.clock.now(), self.state.now)
        gpus = [slot.id for one in self.inventory.nodes if one.id == node for slot in one.slots]
        found = {why: None for gpu in gpus if (why := closed_why(self.state, gpu, now))}
        return "; ".join(found)

    def users(self) -> dict[str, Row]:
        return {name: dict(row) for name, row in self.user_book.rows.items()}

    def gpus(self) -> Row:
        """Return nodes with their GPUs, residents and memory, and how jobs share: mps, time-slicing or logical."""
        nodes = [
            {
                "node": node.id,
                "gpus": views.gpu_rows(self.state, node, self.book.specs, max(self.clock.now(), self.state.now)),
                "mechanism": node.mechanism,
                "why": node.why,
            }
            for node in self.inventory.by_name
        ]
        first = {key: nodes[0][key] if nodes else "" for key in ("mechanism", "why")}
        return {"nodes": nodes, **first, "jobs_per_gpu": self.state.jobs_per_gpu}

    async def history(self, *, limit: int = 100, before: str | None = None, user: str | None = None) -> list[Row]:
        """Return ended jobs, the latest end first, with their receipts; those that ended before the job `before`."""
        return list(views.read_stories(await self.book.read_latest_ended(limit, before, user)))

    def retention(self, user: str | None) -> Row:
        """Return how long files of ended jobs are kept and what is removed next; `user` None: of all users."""
        return self.pruner.overview(user)

    def accuracy(self) -> Row:
        """Return how accurate the estimates were, by kind, and in `trials` what trying unknown pairs cost."""
        trials = self.state.trials
        tried = {"begun": trials.begun, "running": len(trials.running), "kept": trials.kept, "cost_s": trials.cost_s}
        return {**accuracy(self.store.estimates()), "trials": tried}

    async def workload(self) -> list[Row]:
        """Return the finished jobs as the simulator reads them, for `carpool replay`."""
        rows = reversed(await self.book.read_ended(None))
        return list(views.workload_rows(row for row in rows if row["state"] == "finished"))


def _without_receipt(story: Row) -> Row:
    return {key: value for key, value in story.items() if key != "receipt"}
