"""What the ledger of jobs tells: whether a job ran twice at a time, or more jobs than allowed on a GPU."""

from collections import defaultdict
from itertools import pairwise

SLACK_S = 0.02


def spans(lines: list[dict]) -> dict[tuple, tuple[float, float]]:
    """Return from when to when each worker ran, by job, attempt, rank and process."""
    found: dict[tuple, tuple[float, float]] = {}
    for line in lines:
        key = (line["job"], line["attempt"], line["rank"], line["pid"], line["gpu"])
        first, last = found.get(key, (line["at"], line["at"]))
        found[key] = min(first, line["at"]), max(last, line["at"])
    return found


def double_runs(lines: list[dict]) -> list[str]:
    """Return the moments at which a rank of a job ran twice, or two attempts of a job ran together."""
    by_rank, by_attempt, broken = defaultdict(list), defaultdict(dict), []
    for (job, attempt, rank, pid, _), span in spans(lines).items():
        by_rank[job, attempt, rank].append((span, pid))
        first, last = by_attempt[job].get(attempt, span)
        by_attempt[job][attempt] = min(first, span[0]), max(last, span[1])
    for key, runs in by_rank.items():
        if len(runs) > 1:
            broken.append(f"{key} was started {len(runs)} times")
    for job, attempts in by_attempt.items():
        for (one, before), (two, after) in pairwise(sorted(attempts.items())):
            if after[0] < before[1] - SLACK_S:
                broken.append(f"job {job}: attempt {two} ran {before[1] - after[0]:.2f} s beside attempt {one}")
    return broken


def over_committed(lines: list[dict], jobs_per_gpu: int = 1) -> list[str]:
    """Return the GPUs on which more jobs ran at a time than are allowed."""
    by_gpu, broken = defaultdict(list), []
    for (job, attempt, _, _, gpu), span in spans(lines).items():
        by_gpu[gpu].append((*span, job, attempt))
    for gpu, runs in by_gpu.items():
        moments = sorted([(first, 1) for first, *_ in runs] + [(last - SLACK_S, -1) for _, last, *_ in runs])
        running = 0
        for _, change in moments:
            running += change
            if running > jobs_per_gpu:
                broken.append(f"{gpu}: {running} jobs at a time")
                break
    return broken


def violations(lines: list[dict]) -> list[str]:
    return double_runs(lines) + over_committed(lines)
