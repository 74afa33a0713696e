"""What the jobs' own progress in the physical experiment says of the profile: their speed alone, and beside one other.

    python bench/physical_progress.py docs/experiments/h200                   (needs no GPU)
    python bench/physical_progress.py docs/experiments/h200 --profile h200    (instead of the one that was believed)

Only stretches count in which nobody else iterated, or the same other job all the while; more may have been starting up.
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
"""When a job began and ended is known to 0.1 s, and an iteration may take as long."""
LEAST_S = 1.0
"""Two jobs that were together for less say nothing."""
Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Stretch:
    """A job between two of its reports."""

    mechanism: str
    job: Setting
    mate: Setting | None
    seconds: float
    iterations: int


def stretches(folder: Path) -> list[Stretch]:
    if (read(folder / WORKLOAD)["asked"]["gpus"] or 1) > 1:
        raise SystemExit(f"{folder}: ran on several slots, and who shared one is not kept; run it with --gpus 1")
    settings = [job.setting for job in jobs_of(folder)]
    found: list[Stretch] = []
    for path in sorted(folder.glob("*.progress.gz")):
        result = read(folder / path.name.replace(".progress.gz", ".json"))
        reports: dict[int, list[tuple[float, int]]] = {}
        for line in gzip.decompress(path.read_bytes()).decode().splitlines():
            told = json.loads(line)
            reports.setdefault(int(told["job"]) - 1, []).append((told["at"], told["iteration"]))
        found += _of_one_run(result["case"]["mechanism"], result["jobs"], reports, settings)
    return found


def _of_one_run(
    mechanism: str,
    rows: Sequence[Mapping[str, Any]],
    reports: Mapping[int, Sequence[tuple[float, int]]],
    settings: Sequence[Setting],
) -> Iterator[Stretch]:
    """Preempted jobs iterated at times that are not known so exactly: they are left out, and so is who met them."""
    spans = [_span(row) for row in rows]
    for number, told in reports.items():
        if rows[number]["preemptions"]:
            continue
        for (since, before), (until, after) in pairwise(told):
            others = [i for i, span in enumerate(spans) if i != number and _meets(span, since, until)]
            whole = [i for i in others if _covers(spans[i], since, until) and not rows[i]["preemptions"]]
            if after > before > 1 and len(others) < 2 and others == whole:
                mate = settings[others[0]] if others else None
                yield Stretch(mechanism, settings[number], mate, until - since, after - before)


def _span(row: Mapping[str, Any]) -> Span:
    """From its first iteration to its last; of a preempted job, its whole life."""
    return row["started"] + (0.0 if row["preemptions"] else row["launch_s"]), row["finished"] - row["exit_s"]


def _meets(span: Span, since: float, until: float) -> bool:
    return span[0] - MARGIN_S < until and span[1] + MARGIN_S > since


def _covers(span: Span, since: float, until: float) -> bool:
    return span[0] + MARGIN_S < since and span[1] - MARGIN_S > until


def paces(some: Iterable[Stretch]) -> dict[tuple[Setting, Setting | None], tuple[float, float]]:
    """Seconds seen, and seconds an iteration, by job and mate."""
    seen: dict[tuple[Setting, Setting | None], tuple[float, int]] = {}
    for one in some:
        seconds, iterations = seen.get((one.job, one.mate), (0.0, 0))
        seen[one.job, one.mate] = seconds + one.seconds, iterations + one.iterations
    return {who: (seconds, seconds / iterations) for who, (seconds, iterations) in seen.items()}


def show_alone(seen: Sequence[Stretch]) -> None:
    alone = [one for one in seen if one.mate is None]
    by = {m: paces(one for one in alone if one.mechanism == m) for m in sorted({one.mechanism for one in alone})}
    print("alone, ms an iteration (seconds seen)")
    print(f"{'':20}" + "".join(f"{mechanism:>20}" for mechanism in by))
    for who in sorted({who for known in by.values() for who in known}, key=lambda who: who[0]):
        told = [f"{1000 * known[who][1]:.1f} ({known[who][0]:.0f})" if who in known else "–" for known in by.values()]
        print(f"{who[0].task + ' ' + str(who[0].batch):20}" + "".join(f"{text:>20}" for text in told))
    print(f"{'seconds in all':20}" + "".join(f"{sum(s for s, _ in known.values()):>20.0f}" for known in by.values()))
    if len(by) == 2:
        (first, one), (second, other) = by.items()
        both = [(math.log(one[who][1] / other[who][1]), min(one[who][0], other[who][0])) for who in one.keys() & other]
        mean, rms = _bias_and_rms(both)
        print(f"{first} against {second}: {100 * math.expm1(mean):+.1f} % in the mean, {100 * rms:.1f} % rms\n")


@dataclass(frozen=True, slots=True)
class Met:
    """Two jobs that were beside each other, as the first fared."""

    job: Setting
    mate: Setting
    seconds: float
    xi: float
    believed: float
    measured: bool
    """Has the profile this very pair, or do the nearest batches stand for it?"""

    @property
    def error(self) -> float:
        return math.log(self.xi / self.believed)


def meetings(seen: Iterable[Stretch], alone: Mapping[Setting, float], profile: Profile, known_as: str) -> Iterator[Met]:
    """All that the profile has an opinion of."""
    believe, measured = profile.interference(known_as), cells(profile, known_as)
    for (job, mate), (seconds, pace) in paces(seen).items():
        if mate is not None and seconds >= LEAST_S and job in alone and (job.task, mate.task) in believe.cells:
            known = ((job.task, job.batch), (mate.task, mate.batch)) in measured
            believed = believe.pair(job.task, job.batch, mate.task, mate.batch)
            yield Met(job, mate, seconds, pace / alone[job], believed, known)


def show_pairs(seen: Sequence[Stretch], profile: Profile) -> None:
    """ξ as it was, against what the profile makes the simulator believe."""
    alone = {job: pace for (job, _), (_, pace) in paces(one for one in seen if one.mate is None).items()}
    print("beside one other, ξ seen against the profile's (seconds; mean and rms of log)")
    for mechanism in sorted({one.mechanism for one in seen if one.mate}):
        known_as = table(mechanism, profile)
        if known_as not in profile.pair_mechanisms():
            print(f"  {mechanism:14}the profile has no pairs")
            continue
        met = [*meetings((one for one in seen if one.mechanism == mechanism), alone, profile, known_as)]
        for measured, label in ((True, "measured at these batches"), (False, "the nearest batches' instead")):
            errors = [(one.error, one.seconds) for one in met if one.measured == measured]
            if errors:
                mean, rms = _bias_and_rms(errors)
                total = sum(seconds for _, seconds in errors)
                print(f"  {mechanism:14}{label:32}{total:5.0f} s{mean:+8.3f}{rms:8.3f}")
        for one in sorted(met, key=lambda one: -abs(one.error) * one.seconds)[:4]:
            what = f"{one.job.task} {one.job.batch} beside {one.mate.task} {one.mate.batch}"
            unsure = "" if one.measured else ", not measured"
            print(f"      {what:44}{one.xi:5.2f} seen, {one.believed:.2f} believed{unsure}")


def _bias_and_rms(weighted: Sequence[tuple[float, float]]) -> tuple[float, float]:
    total = sum(weight for _, weight in weighted)
    mean = sum(error * weight for error, weight in weighted) / total
    return mean, math.sqrt(sum(error**2 * weight for error, weight in weighted) / total)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="results of bench/physical.py")
    parser.add_argument("--profile", help="a profile to judge  [default: the one that the service believed]")
    options = parser.parse_args()
    seen = stretches(options.folder)
    if not seen:
        raise SystemExit(f"{options.folder}: holds no jobs' progress; run bench/physical.py with this --out first")
    show_alone(seen)
    show_pairs(seen, load(options.profile or str(options.folder / PROFILE)))


if __name__ == "__main__":
    in_one_line(main)
