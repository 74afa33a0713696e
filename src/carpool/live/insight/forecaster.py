"""The service's forecasts, and its record of how accurate they were.

`Forecaster` answers `explain` and `submit --dry-run`. It remembers the first forecast of every job and judges it, and
the believed duration, when the job has ended. Judged estimates narrow or widen the ranges of later ones.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import median
from time import thread_time
from typing import Any

from carpool.belief.estimate import ASSUMED, Estimate, run_time, slowdown
from carpool.belief.model import Belief
from carpool.core.healing import guessed_length
from carpool.core.model import GpuId, Job, JobId, Status
from carpool.core.perf import Placement
from carpool.core.record import JobRecord
from carpool.core.scheduler import Policy
from carpool.core.state import State
from carpool.live.insight import explain, forecast
from carpool.live.insight.guesses import guess_of
from carpool.live.insight.places import Place, PlaceBook
from carpool.live.text import clock, span
from carpool.sim.metrics import percentile

Row = dict[str, Any]
SPREADS = {"measured": 1.1, "profile": 1.3, "history": 1.5, "time": 2.0, "default": 10.0}
"""Factors by which an estimate from each source may be too small or too large, until enough of them were judged."""
ENOUGH = 10
"""Number of judged estimates from which ranges are derived."""
KEPT = 1000
MAX_FORECAST_JOBS = 200
"""Number of jobs above which forecasts are made only on request."""
MOST_ROWS = 100
"""Number of jobs of a dry run whose times are listed."""
FRESH_S = 2.0
"""Seconds for which a forecast is reused: the scheduler waits while one is made."""

FORECAST_SHARE = 0.01
"""Share of a core that forecasts of all jobs may take."""


@dataclass(frozen=True, slots=True)
class FirstForecast:
    """The first forecast of a job."""

    at: float
    times: forecast.Forecast
    waiting: bool


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is expected of all jobs."""

    made: float
    times: Mapping[JobId, forecast.Forecast]
    places: list[Place]
    cost_s: float
    """CPU seconds that it took to make."""


class Forecaster:
    def __init__(
        self,
        state: Callable[[], State],
        policy: Callable[[], Policy],
        source: Callable[[JobId], Mapping[str, str]],
        name: Callable[[JobId], str],
        gpu: Callable[[GpuId], str],
        now: Callable[[], float],
    ) -> None:
        """`source` returns how a job's duration is known: `kind`, a key of `SPREADS`, and `detail` in words."""
        self._state = state
        self._policy = policy
        self._source = source
        self._name = name
        self._gpu = gpu
        self._now = now
        self._why: dict[JobId, str] = {}
        self._pause_why: dict[JobId, str] = {}
        self._first_forecasts: dict[JobId, FirstForecast] = {}
        self._ratios: dict[str, list[float]] = {}
        self._outlook: Outlook | None = None
        self.on_judged: Callable[[list[Row]], None] = lambda rows: None
        """Is called with estimates that were compared with what happened."""
        self._latest: tuple[float, dict[JobId, forecast.Forecast]] = (-inf, {})

    def planned(self, decisions: Iterable[Any]) -> None:
        """Remember the policy's reasons for the places of jobs, and for pausing them."""
        jobs = self._state().jobs
        for decision in decisions:
            record = jobs.get(decision.job)
            if decision.allocation is not None and not decision.allocation.active:
                self._pause_why[decision.job] = decision.why
                if record is not None and record.status is Status.STARTING:  # it starts up and waits for its turn
                    self._why[decision.job] = decision.why
            elif record is None or record.status is not Status.RESUMING:
                self._why[decision.job] = decision.why

    # ---- estimates -------------------------------------------------------------------------------------------------

    def estimate(self, job: Job, source: Mapping[str, str] | None = None) -> Estimate:
        """Return the duration of a whole job alone. `source`: how it is known, for a job that is not submitted."""
        state = self._state()
        record = state.jobs.get(job.id)
        if record is not None and getattr(record, "alone_seen", False):
            value, kind = job.iterations * record.alone_iteration_s, "measured"
            detail = "its own reports of seconds per iteration"
        else:
            found = run_time(state.perf, job) if isinstance(state.perf, Belief) else None
            if found is not None and found.kind not in ("time", "default"):
                return Estimate(found.value, found.low, found.high, found.source, found.kind)
            source = self._source(job.id) if source is None else source
            kind, detail = source.get("kind", "default"), source.get("detail", ASSUMED)
            value = alone_s(state, job)
            guessed = guess_of(state, job)
            if kind == "time" and guessed is not None and guessed.jobs:
                return Estimate(value, guessed.low, guessed.high, f"{detail}, corrected by earlier guesses", kind)
        low, high = self._spread(kind)
        return Estimate(value, value * low, value * high, detail, kind)

    def _spread(self, kind: str) -> tuple[float, float]:
        """Return the factors between which four out of five judged estimates lie; stated ones if too few exist."""
        ratios = sorted(self._ratios.get(kind, ()))
        if len(ratios) >= ENOUGH:
            return min(1.0, percentile(ratios, 0.1)), max(1.0, percentile(ratios, 0.9))
        factor = SPREADS.get(kind, SPREADS["default"])
        return 1.0 / factor, factor

    def _context(self) -> explain.ExplainContext:
        return explain.ExplainContext(
            self._state(),
            self._policy,
            self.estimate,
            name=self._name,
            gpu=self._gpu,
            why=lambda job: self._why.get(job, ""),
            pause_why=lambda job: self._pause_why.get(job, ""),
            now=self._now(),
            pair=self._pair,
        )

    def _pair(self, record: JobRecord, mate: JobRecord) -> tuple[float, float, str]:
        """Return the range of ξ of a job beside a mate, and its source."""
        perf = self._state().perf
        if not isinstance(perf, Belief):
            xi = perf.slowdown(record.job, record.accumulation, [(mate.job, mate.accumulation)])
            return xi, xi, "a model that was given"
        found = slowdown(perf, record.job, record.accumulation, mate.job, mate.accumulation)
        return found.low, found.high, found.source

    # ---- answers ---------------------------------------------------------------------------------------------------

    def explain(self, job: JobId) -> Row:
        """Explain a job that has not ended."""
        context = self._context()
        made, ahead = self._latest
        if not 0.0 <= context.now - made <= FRESH_S or job not in ahead:
            ahead = forecast.forecast(context.state, self._policy, context.spread, now=context.now)
            self._latest = context.now, ahead
        return explain.explain(context, job, ahead)

    def ahead(self) -> "Outlook":
        """Return the forecasts of all jobs and their places to come. It is reused for long enough that making it takes
        at most a hundredth of a core."""
        now, latest = self._now(), self._outlook
        if latest is None or not 0.0 <= now - latest.made <= max(FRESH_S, latest.cost_s / FORECAST_SHARE):
            began, context, places = thread_time(), self._context(), PlaceBook()
            found = forecast.forecast(context.state, self._policy, context.spread, now=now, places=places)
            self._latest = now, found
            latest = self._outlook = Outlook(now, found, places.since(now), thread_time() - began)
        return latest

    def dry_run(self, jobs: Sequence[Job], sources: Mapping[JobId, Mapping[str, str]]) -> Row:
        """Return what would happen to jobs that are submitted now, `sources` being those of their estimates: the
        fields of the first job, and of several also `starts_now`, `first_end`, `last_end` and `each`."""
        context = replace(self._context(), estimate=lambda one: self.estimate(one, sources.get(one.id)))
        now = self._now()
        found = forecast.dry_run(self._state(), self._policy, jobs, context.spread, now)
        each = [self._dry_row(context.estimate(job), one) for job, one in zip(jobs, found, strict=True)]
        if len(each) == 1:
            return {**each[0], "sentences": _dry_sentences(each[0], now)}
        ends = sorted((row["end"] for row in each if row["end"]), key=lambda end: float(end["value"]))
        whole = {
            "starts_now": sum(row["where"] is not None for row in each),
            "first_end": ends[0] if ends else None,
            "last_end": ends[-1] if len(ends) == len(each) else None,
        }
        return {**each[0], **whole, "each": each[:MOST_ROWS], "sentences": _dry_sentences_of_several(each, whole, now)}

    def _dry_row(self, own: Estimate, found: forecast.DryRun) -> Row:
        return {
            "where": [self._gpu(gpu) for gpu in found.gpus] or None,
            "mates": list(found.mates),
            "run": {"value": own.value, "low": own.low, "high": own.high, "source": own.source},
            **explain.times_of(found.forecast, own.source),
        }

    # ---- accuracy --------------------------------------------------------------------------------------------------

    def look_ahead(self) -> None:
        """Make the first forecast of jobs that have none, so that it can be judged later."""
        state = self._state()
        if len(state.jobs) > MAX_FORECAST_JOBS or all(name in self._first_forecasts for name in state.jobs):
            return
        context, now = self._context(), self._now()
        for name, times in forecast.forecast(state, self._policy, context.spread, now=now).items():
            if name not in self._first_forecasts:
                waiting = state.jobs[name].first_start < 0.0
                self._first_forecasts[name] = FirstForecast(now, times, waiting)

    def judge(self, record: JobRecord, source: Mapping[str, Any]) -> list[Row]:
        """Compare the estimates of an ended job with what happened. Return rows for the table of estimates."""
        name = record.job.id
        self._why.pop(name, None)
        self._pause_why.pop(name, None)
        seen = self._first_forecasts.pop(name, None)
        if record.status is not Status.FINISHED:
            return []
        rows = []
        if seen is not None:
            kinds = [("start", record.first_start)] if seen.waiting else []
            for kind, actual in (*kinds, ("end", record.ended)):
                value, low, high = (
                    getattr(times, kind) - seen.at for times in (seen.times.believed, seen.times.early, seen.times.late)
                )
                if value < inf:
                    rows.append(
                        _row(record, kind, seen.at, (value, low, min(high, 1e12)), actual - seen.at, "forecast")
                    )
        believed, kind = source.get("alone_s"), str(source.get("kind", "default"))
        if believed and record.alone_s > 0.0:
            low, high = self._spread(kind)
            estimate = (believed, believed * low, believed * high)
            rows.append(_row(record, "duration", record.job.submitted, estimate, record.alone_s, kind))
        self.learn(rows)
        self.on_judged(rows)
        return rows

    def learn(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Learn how accurate durations were, by their source; also from rows that earlier services wrote."""
        for row in rows:
            if row["kind"] == "duration" and row["value"] > 0.0:
                ratios = self._ratios.setdefault(row["source"], [])
                ratios.append(row["actual"] / row["value"])
                del ratios[:-KEPT]


def alone_s(state: State, job: Job) -> float:
    """Return the believed duration of a job alone, with the correction of its guess."""
    record, perf = state.jobs.get(job.id), state.perf
    if record is not None:
        return record.job.iterations * record.whole_iteration_s
    guessed = guessed_length(state, job)
    seconds = job.iterations * perf.iteration_time(job, 1, Placement(job.gpus, perf.fewest_nodes(job.gpus)))
    return seconds if guessed is None else seconds * guessed.factor


def _row(
    record: JobRecord, kind: str, at: float, estimate: tuple[float, float, float], actual: float, source: str
) -> Row:
    value, low, high = estimate
    return {
        "job": int(record.job.id),
        "kind": kind,
        "at": at,
        "source": source,
        "value": value,
        "low": low,
        "high": high,
        "actual": actual,
    }


def accuracy(rows: Iterable[Mapping[str, Any]]) -> dict[str, Row]:
    """Return how accurate estimates were, by kind; durations also by their source."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        name = f"duration, from {row['source']}" if row["kind"] == "duration" else str(row["kind"])
        groups.setdefault(name, []).append(row)
    return {name: _summary(group) for name, group in sorted(groups.items())}


def _summary(rows: list[Mapping[str, Any]]) -> Row:
    errors_s = sorted(abs(row["actual"] - row["value"]) for row in rows)
    within = [row["low"] <= row["actual"] <= row["high"] for row in rows]
    relative = [abs(row["actual"] - row["value"]) / row["actual"] for row in rows if row["actual"] > 0.0]
    return {
        "judged": len(rows),
        "median_error_s": median(errors_s),
        "p90_error_s": percentile(errors_s, 0.9),
        "median_error": median(relative) if relative else None,
        "within_range": sum(within) / len(within),
    }


def _dry_sentences(answer: Row, now: float) -> list[str]:
    if answer["where"]:
        beside = f", sharing with job {', '.join(answer['mates'])}" if answer["mates"] else ""
        lines = [f"The job would start now on {' '.join(answer['where'])}{beside}."]
    else:
        lines = ["The job would wait."]
    lines.append(f"Duration alone: {explain.ranged(answer['run'], span)}, from {answer['run']['source']}.")
    for key in ("start", "end") if not answer["where"] else ("end",):
        if answer[key]:
            lines.append(f"Expected {key}: {explain.ranged(answer[key], lambda at: clock(at, now))}.")
    return lines


def _dry_sentences_of_several(each: list[Row], whole: Row, now: float) -> list[str]:
    now_too = whole["starts_now"]
    lines = [f"These are {len(each)} jobs: {now_too} would start now, {len(each) - now_too} would wait."]
    runs = sorted((row["run"] for row in each), key=lambda run: float(run["value"]))
    if span(runs[0]["value"]) == span(runs[-1]["value"]):
        lines.append(f"Duration of each alone: {explain.ranged(runs[0], span)}, from {runs[0]['source']}.")
    else:
        lines.append(f"Durations alone: {span(runs[0]['value'])} to {span(runs[-1]['value'])}.")
    for which in ("first", "last"):
        if end := whole[f"{which}_end"]:
            lines.append(f"{which.capitalize()} end expected: {explain.ranged(end, lambda at: clock(at, now))}.")
    return lines
