"""The files of `carpool simulate --out` and `compare --out`: tables as CSV, the event log, and pictures."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from carpool.core import events as ev
from carpool.core.codec import encode
from carpool.core.record import JobRecord
from carpool.files import write_csv, write_json
from carpool.report import plots
from carpool.report.tables import Bounds, by_case, comparison_json
from carpool.sim.metrics import Summary, jct
from carpool.sim.run import Result
from carpool.sim.sweep import CaseResult, mean
from carpool.sim.timeline import segments

JOB_COLUMNS = (
    "job", "model", "user", "gpus", "batch", "accumulation",
    "submitted_s", "started_s", "finished_s", "jct_s", "queue_s", "ran_s", "alone_s",
    "slowdown", "joined", "was_joined", "preemptions", "pauses", "paused_s",
)  # fmt: skip


def write_run(folder: Path, result: Result, events: Sequence[ev.Event]) -> None:
    """Write one simulation: summary.json, jobs.csv, events.jsonl, and three pictures."""
    write_json(folder / "summary.json", asdict(result.summary))
    write_csv(folder / "jobs.csv", JOB_COLUMNS, (_job_row(record) for record in result.jobs))
    with open(folder / "events.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps(encode(event)) + "\n" for event in events)
    if not _can_draw():
        return
    policy = result.summary.policy
    plots.jct_cdf(folder / "jct_cdf.png", {policy: [jct(record) for record in result.jobs]})
    queues = {model: part.mean_queue_s for model, part in result.summary.models.items()}
    plots.queue_by_model(folder / "queue_by_model.png", {policy: queues})
    models = {record.job.id: record.job.model for record in result.jobs}
    title = f"{policy}, {result.summary.jobs} jobs"
    plots.gantt(folder / "gantt.png", segments(events), models, result.state.topology.total(), title)


def _job_row(record: JobRecord) -> list[object]:
    job = record.job
    slowdown = record.ran_s / record.alone_s if record.alone_s else 1.0
    times = (
        job.submitted,
        record.first_start,
        record.ended,
        jct(record),
        record.waited_s,
        record.ran_s,
        record.alone_s,
    )
    described = [job.id, job.model, job.user, job.gpus, job.batch, record.accumulation]
    counted = [record.shares, record.hosted, record.preemptions, record.pauses]
    return [*described, *(f"{time:.3f}" for time in times), f"{slowdown:.4f}", *counted, f"{record.paused_s:.3f}"]


def write_comparison(folder: Path, outcomes: Sequence[CaseResult], bounds: Bounds | None = None) -> None:
    """Write a comparison: all runs and the means over seeds as JSON, all runs as CSV, and three pictures."""
    write_json(folder / "comparison.json", comparison_json(outcomes, bounds))
    flat = [field.name for field in fields(Summary) if field.name not in ("policy", "large", "small", "models")]
    parts = [f"{part}_{name}" for part in ("large", "small") for name in ("jobs", "mean_jct_s", "mean_queue_s")]
    write_csv(folder / "runs.csv", ["policy", "case", "seed", *flat, *parts], (_run_row(o, flat) for o in outcomes))
    if not _can_draw():
        return
    cases = by_case(outcomes)
    policies = list(dict.fromkeys(outcome.policy for outcome in outcomes))
    jcts = {p: [t for o in outcomes if o.policy == p for t in o.jcts_s] for p in policies}
    plots.jct_cdf(folder / "jct_cdf.png", jcts, f"all {len(cases)} cases together" if len(cases) > 1 else "")
    queues = {p: _mean_queues([o.summary for o in outcomes if o.policy == p]) for p in policies}
    plots.queue_by_model(folder / "queue_by_model.png", queues)
    bars = {}
    for case, of_policy in cases.items():
        means = {policy: mean([o.summary.mean_jct_s for o in some]) for policy, some in of_policy.items()}
        bars[case] = {policy: (value.value, value.error) for policy, value in means.items()}
    plots.mean_jct(folder / "mean_jct.png", bars)


def _run_row(outcome: CaseResult, flat: Sequence[str]) -> list[object]:
    row: list[object] = [outcome.policy, outcome.case, outcome.seed]
    row += [getattr(outcome.summary, name) for name in flat]
    for part in (outcome.summary.large, outcome.summary.small):
        row += [part.jobs, part.mean_jct_s, part.mean_queue_s]
    return row


def _mean_queues(summaries: Sequence[Summary]) -> dict[str, float]:
    """Return the mean wait by model, over all its jobs in all runs."""
    waited: dict[str, list[float]] = {}
    for summary in summaries:
        for model, part in summary.models.items():
            total = waited.setdefault(model, [0.0, 0.0])
            total[0] += part.mean_queue_s * part.jobs
            total[1] += part.jobs
    return {model: seconds / jobs for model, (seconds, jobs) in waited.items()}


def _can_draw() -> bool:
    if not plots.available():
        print("no pictures: they need matplotlib, pip install 'carpool[plots]'", file=sys.stderr)
        return False
    return True
