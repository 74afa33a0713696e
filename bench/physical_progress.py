"""Compare the jobs' progress in the physical experiment with the profile: speeds alone, and beside one mate.

    python bench/physical_progress.py docs/experiments/h200                   (needs no GPU)
    python bench/physical_progress.py docs/experiments/h200 --profile h200    (another profile than the service's)

Only intervals count in which no other job iterated, or the same one throughout. Other jobs may have been starting.
"""

import argparse
import gzip
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from physical import PROFILE, WORKLOAD, in_one_line, jobs_of, read
from physical_work import table

from carpool.profile.matrix import cells
from carpool.profile.measure.raw import Setting
from carpool.profile.schema import Profile, load

MARGIN_S = 0.2
"""Uncertainty of a job's first and last iteration: 0.1 s, and an iteration may take as long."""
LEAST_S = 1.0
"""Minimum time in seconds that two jobs must have shared a GPU to be counted."""
Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class ReportInterval:
    """The time between two reports of a job."""

    mechanism: str
    job: Setting
    mate: Setting | None
    seconds: float
    iterations: int


def report_intervals(folder: Path) -> list[ReportInterval]:
    if (read(folder / WORKLOAD)["asked"]["gpus"] or 1) > 1:
        raise SystemExit(f"{folder}: ran on several slots, which the progress does not name; run it with --gpus 1")
    settings = [job.setting for job in jobs_of(folder)]
    found: list[ReportInterval] = []
    for path in sorted(folder.glob("*.progress.gz")):
        result = read(folder / path.name.replace(".progress.gz", ".json"))
        reports: dict[int, list[tuple[float, int]]] = {}
        for line in gzip.decompress(path.read_bytes()).decode().splitlines():
            report = json.loads(line)
            reports.setdefault(int(report["job"]) - 1, []).append((report["at"], report["iteration"]))
        found += _of_one_run(result["case"]["mechanism"], result["jobs"], reports, settings)
    return found


def _of_one_run(
    mechanism: str,
    rows: Sequence[Mapping[str, Any]],
    reports: Mapping[int, Sequence[tuple[float, int]]],
    settings: Sequence[Setting],
) -> Iterator[ReportInterval]:
    """Yield usable intervals. Preempted jobs and their mates are left out: their times are not known exactly."""
    spans = [_span(row) for row in rows]
    for number, own in reports.items():
        if rows[number]["preemptions"]:
            continue
        for (since, before), (until, after) in pairwise(own):
            others = [i for i, span in enumerate(spans) if i != number and _meets(span, since, until)]
            whole = [i for i in others if _covers(spans[i], since, until) and not rows[i]["preemptions"]]
            if after > before > 1 and len(others) < 2 and others == whole:
                mate = settings[others[0]] if others else None
                yield ReportInterval(mechanism, settings[number], mate, until - since, after - before)


def _span(row: Mapping[str, Any]) -> Span:
    """Return the time from a job's first iteration to its last; for a preempted job, from start to end."""
    return row["started"] + (0.0 if row["preemptions"] else row["launch_s"]), row["finished"] - row["exit_s"]


def _meets(span: Span, since: float, until: float) -> bool:
    return span[0] - MARGIN_S < until and span[1] + MARGIN_S > since


def _covers(span: Span, since: float, until: float) -> bool:
    return span[0] + MARGIN_S < since and span[1] - MARGIN_S > until


def iteration_times(some: Iterable[ReportInterval]) -> dict[tuple[Setting, Setting | None], tuple[float, float]]:
    """Return the observed seconds and the seconds per iteration, by job and mate."""
    seen: dict[tuple[Setting, Setting | None], tuple[float, int]] = {}
    for one in some:
        seconds, iterations = seen.get((one.job, one.mate), (0.0, 0))
        seen[one.job, one.mate] = seconds + one.seconds, iterations + one.iterations
    return {pair: (seconds, seconds / iterations) for pair, (seconds, iterations) in seen.items()}


def show_alone(seen: Sequence[ReportInterval]) -> None:
    alone = [one for one in seen if one.mate is None]
    by = {
        m: iteration_times(one for one in alone if one.mechanism == m) for m in sorted({one.mechanism for one in alone})
    }
    print("alone, ms per iteration (seconds observed)")
    print(f"{'':20}" + "".join(f"{mechanism:>20}" for mechanism in by))
    for pair in sorted({pair for known in by.values() for pair in known}, key=lambda pair: pair[0]):
        shown = [
            f"{1000 * known[pair][1]:.1f} ({known[pair][0]:.0f})" if pair in known else "–" for known in by.values()
        ]
        print(f"{pair[0].task + ' ' + str(pair[0].batch):20}" + "".join(f"{text:>20}" for text in shown))
    print(f"{'seconds in total':20}" + "".join(f"{sum(s for s, _ in known.values()):>20.0f}" for known in by.values()))
    if len(by) == 2:
        (first, one), (second, other) = by.items()
        both = [
            (math.log(one[pair][1] / other[pair][1]), min(one[pair][0], other[pair][0])) for pair in one.keys() & other
        ]
        mean, rms = _bias_and_rms(both)
        print(f"{first} relative to {second}: {100 * math.expm1(mean):+.1f} % in the mean, {100 * rms:.1f} % rms\n")


@dataclass(frozen=True, slots=True)
class PairObservation:
    """The slow-down of a job beside a mate, observed and believed."""

    job: Setting
    mate: Setting
    seconds: float
    xi: float
    believed: float
    measured: bool
    """Whether the profile has this pair; otherwise the nearest batches stand in for it."""

    @property
    def error(self) -> float:
        return math.log(self.xi / self.believed)


def pair_observations(
    seen: Iterable[ReportInterval], alone: Mapping[Setting, float], profile: Profile, known_as: str
) -> Iterator[PairObservation]:
    """Yield the pairs for which the profile has a slow-down."""
    believe, measured = profile.interference(known_as), cells(profile, known_as)
    for (job, mate), (seconds, pace) in iteration_times(seen).items():
        if mate is not None and seconds >= LEAST_S and job in alone and (job.task, mate.task) in believe.cells:
            known = ((job.task, job.batch), (mate.task, mate.batch)) in measured
            believed = believe.pair(job.task, job.batch, mate.task, mate.batch)
            yield PairObservation(job, mate, seconds, pace / alone[job], believed, known)


def show_pairs(seen: Sequence[ReportInterval], profile: Profile) -> None:
    """Print the observed ξ and the ξ of the profile."""
    alone = {job: pace for (job, _), (_, pace) in iteration_times(one for one in seen if one.mate is None).items()}
    print("beside one mate, ξ observed relative to the profile's (seconds; mean and rms of log)")
    for mechanism in sorted({one.mechanism for one in seen if one.mate}):
        known_as = table(mechanism, profile)
        if known_as not in profile.pair_mechanisms():
            print(f"  {mechanism:14}the profile has no pairs")
            continue
        met = [*pair_observations((one for one in seen if one.mechanism == mechanism), alone, profile, known_as)]
        for measured, label in ((True, "measured at these batches"), (False, "from the nearest batches")):
            errors = [(one.error, one.seconds) for one in met if one.measured == measured]
            if errors:
                mean, rms = _bias_and_rms(errors)
                total = sum(seconds for _, seconds in errors)
                print(f"  {mechanism:14}{label:32}{total:5.0f} s{mean:+8.3f}{rms:8.3f}")
        for one in sorted(met, key=lambda one: -abs(one.error) * one.seconds)[:4]:
            what = f"{one.job.task} {one.job.batch} beside {one.mate.task} {one.mate.batch}"
            unsure = "" if one.measured else ", not measured"
            print(f"      {what:44}{one.xi:5.2f} observed, {one.believed:.2f} believed{unsure}")


def _bias_and_rms(weighted: Sequence[tuple[float, float]]) -> tuple[float, float]:
    total = sum(weight for _, weight in weighted)
    mean = sum(error * weight for error, weight in weighted) / total
    return mean, math.sqrt(sum(error**2 * weight for error, weight in weighted) / total)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="results of bench/physical.py")
    parser.add_argument("--profile", help="profile to compare with  [default: the one that the service believed in]")
    options = parser.parse_args()
    seen = report_intervals(options.folder)
    if not seen:
        raise SystemExit(f"{options.folder}: has no progress of jobs; run bench/physical.py with this --out first")
    show_alone(seen)
    show_pairs(seen, load(options.profile or str(options.folder / PROFILE)))


if __name__ == "__main__":
    in_one_line(main)
