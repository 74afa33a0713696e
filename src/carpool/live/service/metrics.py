"""Metrics for Prometheus: what the service counts, and what it finds in the state when it is asked.

Counters and histograms follow the turns of the driver and begin at zero with every start of the service, as Prometheus
expects. Everything else is read from the state at a scrape. No label holds a job or a user, so that the number of time
series stays the same however long the service runs. `http.service_routes` answers `/metrics` with it.
"""

from collections import Counter as Tally
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric

from carpool import __version__
from carpool.core import events as ev
from carpool.core.model import PAUSE, Status
from carpool.core.record import JobRecord
from carpool.live.insight.receipt import receipt
from carpool.live.service.driver import Driver
from carpool.live.service.inventory import Inventory
from carpool.live.service.turns import TurnDone
from carpool.live.statuses import ENDED, SHOWN, shown_status

TIMES_S = (1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 12 * 3600, 86_400, 7 * 86_400)
"""Buckets for waiting and completion times and for errors of forecasts."""
SLOWDOWNS = (1.0, 1.05, 1.1, 1.2, 1.3, 1.5, 1.75, 2.0, 2.5, 3.0, 5.0)
ANSWER_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 30)
DECISION_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
STATUSES = tuple(status for status in SHOWN if status not in ENDED)
FAULTS = {ev.NodeLost: "node lost", ev.SwapFailed: "swap failed"}


class Metrics:
    """The metrics of one service."""

    def __init__(self, driver: Driver, inventory: Inventory, policy: str) -> None:
        self._driver, self._inventory, self._policy = driver, inventory, policy
        self._state = driver.scheduler.state
        registry = self.registry = CollectorRegistry()
        made: dict[str, Any] = {"registry": registry}
        self._submitted = Counter("carpool_jobs_submitted", "Jobs that were submitted.", **made)
        self._ended = Counter("carpool_jobs_ended", "Jobs that have ended, by how.", ["status"], **made)
        self._wait = Histogram(
            "carpool_job_wait_seconds", "Time that ended jobs waited in the queue.", buckets=TIMES_S, **made
        )
        self._completion = Histogram(
            "carpool_job_completion_seconds",
            "Time from submission to the end of finished jobs.",
            buckets=TIMES_S,
            **made,
        )
        self._plans = Counter("carpool_plans", "Plans that the policy made.", **made)
        self._decisions = Counter("carpool_decisions", "Decisions in these plans.", ["kind"], **made)
        self._deciding = Histogram(
            "carpool_decision_seconds",
            "Time of a step in which the policy decides: events applied, plan checked and applied.",
            buckets=DECISION_S,
            **made,
        )
        self._believed = Histogram(
            "carpool_slowdown_believed_ratio",
            "Slow-down that was expected of jobs when they were put beside others.",
            buckets=SLOWDOWNS,
            **made,
        )
        self._seen = Histogram(
            "carpool_slowdown_seen_ratio",
            "Slow-down of ended jobs that shared, measured from their reports.",
            buckets=SLOWDOWNS,
            **made,
        )
        self._errors = Histogram(
            "carpool_forecast_error_seconds",
            "Difference between an estimate and what happened.",
            ["kind"],
            buckets=TIMES_S,
            **made,
        )
        self._within = Counter("carpool_forecasts_within_range", "Estimates whose range held.", ["kind"], **made)
        self._faults = Counter("carpool_faults", "Faults of jobs and nodes.", ["kind"], **made)
        self._requests = Counter("carpool_http_requests", "Answers of the HTTP API.", ["route", "status"], **made)
        self._answering = Histogram(
            "carpool_http_request_seconds", "Time to answer requests.", ["route"], buckets=ANSWER_S, **made
        )
        self._touch_labels()
        ProcessCollector(registry=registry)
        registry.register(self)

    def _touch_labels(self) -> None:
        """Begin with zeros: a rate over a series that did not exist is not known."""
        for status in ("finished", "failed", "cancelled"):
            self._ended.labels(status)
        for kind in ("place", "pause", "stop"):
            self._decisions.labels(kind)
        for kind in ("job failed", "job restarted", *FAULTS.values()):
            self._faults.labels(kind)
        for kind in ("start", "end", "duration"):
            self._errors.labels(kind)
            self._within.labels(kind)

    def text(self) -> bytes:
        """Return all metrics as Prometheus reads them."""
        return generate_latest(self.registry)

    # ---- what happens ----------------------------------------------------------------------------------------------

    def turned(self, turn: TurnDone) -> None:
        for event in turn.events:
            if isinstance(event, ev.Submitted):
                self._submitted.inc()
            elif isinstance(event, ev.Failed):
                self._faults.labels("job restarted" if event.again else "job failed").inc()
            elif type(event) in FAULTS:
                self._faults.labels(FAULTS[type(event)]).inc()
        if turn.decision_s is not None:
            self._deciding.observe(turn.decision_s)
        if turn.planned is not None:
            self._count_plan(turn.planned)
        for ended in turn.ended:
            self._count_end(ended.record)

    def _count_plan(self, planned: ev.Planned) -> None:
        self._plans.inc()
        for decision in planned.decisions:
            place, record = decision.allocation, self._state.jobs.get(decision.job)
            self._decisions.labels("stop" if place is None else "place" if place.active else "pause").inc()
            if place is not None and place.active and record is not None:
                beside = any(mate.active for mate in self._state.cluster.mates(record))
                if beside:
                    self._believed.observe(self._believed_slowdown(record))

    def _believed_slowdown(self, record: JobRecord) -> float:
        """Return the slow-down of a job once it and its active mates compute; so far some of them may start up."""
        worst = 1.0
        for cell in self._state.cluster.shared_cells(record):
            mates = [(mate.job, mate.accumulation) for mate in cell if mate is not record and mate.active]
            if mates:
                worst = max(worst, self._state.perf.slowdown(record.job, record.accumulation, mates))
        return worst

    def _count_end(self, record: JobRecord) -> None:
        self._ended.labels(str(record.status)).inc()
        self._wait.observe(record.waited_s)
        if record.status is Status.FINISHED:
            self._completion.observe(record.ended - record.job.submitted)
        account = receipt(record, record.ended)
        if account["measured"] and account["slowdown"] and (account["shares"] or account["hosted"]):
            self._seen.observe(account["slowdown"])

    def judged(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Count estimates that were compared with what happened."""
        for row in rows:
            self._errors.labels(row["kind"]).observe(abs(row["actual"] - row["value"]))
            if row["low"] <= row["actual"] <= row["high"]:
                self._within.labels(row["kind"]).inc()

    def answered(self, route: str, status: int, seconds: float) -> None:
        """Count an answer of the HTTP API. `route` is the path with names for its parts."""
        self._requests.labels(route, str(status)).inc()
        self._answering.labels(route).observe(seconds)

    # ---- what is -----------------------------------------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        """Yield what the state holds now."""
        state, driver = self._state, self._driver
        yield InfoMetricFamily("carpool", "This service.", value={"version": __version__, "policy": self._policy})
        statuses = Tally(_status(record) for record in state.jobs.values())
        jobs = GaugeMetricFamily("carpool_jobs", "Jobs that have not ended, by status.", labels=["status"])
        for status in STATUSES:
            jobs.add_metric([status], statuses[status])
        yield jobs
        now = max(driver.clock.now(), state.now)
        oldest = max((record.waited(now) for record in state.queue), default=0.0)
        yield GaugeMetricFamily(
            "carpool_queue_longest_wait_seconds", "Wait of the job that waits longest.", value=oldest
        )
        yield from self._gpus()
        trials = state.trials
        yield CounterMetricFamily("carpool_trials", "Trials of unknown pairs that began.", value=trials.begun)
        yield CounterMetricFamily("carpool_trials_kept", "Trials after which the pair stayed.", value=trials.kept)
        yield CounterMetricFamily("carpool_trials_cost_seconds", "Time that trials cost jobs.", value=trials.cost_s)
        yield GaugeMetricFamily(
            "carpool_journal_writable", "Whether the journal can be written.", value=not driver.journal_problem()
        )
        yield GaugeMetricFamily(
            "carpool_policy_failing", "Whether a fallback decides.", value=bool(driver.policy_failure())
        )

    def _gpus(self) -> Iterator[Metric]:
        """Yield the use of GPUs. A GPU is in exactly one state: shared if several jobs compute on it."""
        state, states = self._state, Tally[str]()
        reserved = GaugeMetricFamily("carpool_gpu_reserved_bytes", "Memory reserved for jobs.", labels=["gpu"])
        foreign = GaugeMetricFamily("carpool_gpu_foreign_bytes", "Memory that other processes hold.", labels=["gpu"])
        for node in self._inventory.nodes:
            for slot in node.slots:
                if slot.id not in state.topology.node_of:
                    continue
                residents = state.jobs_on(slot.id)
                computing = sum(record.status not in PAUSE for record in residents)
                used = "shared" if computing > 1 else "busy" if computing else "paused" if residents else "free"
                states["closed" if used == "free" and node.closed else used] += 1
                reserved.add_metric([slot.label], state.memory_used(slot.id))
                foreign.add_metric([slot.label], state.topology.taken.get(slot.id, 0))
        gpus = GaugeMetricFamily("carpool_gpus", "GPUs by their use.", labels=["state"])
        for used in ("busy", "shared", "paused", "free", "closed"):
            gpus.add_metric([used], states[used])
        yield from (gpus, reserved, foreign)


def _status(record: JobRecord) -> str:
    """Return the status of a job; one that is on hold is not waiting for GPUs."""
    return "held" if record.status is Status.HELD else shown_status(record.status)
