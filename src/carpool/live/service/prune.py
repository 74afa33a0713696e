"""What is kept of jobs that have ended, and for how long: the rule, and who carries it out.

Files of a job (logs, checkpoints, its snapshot) go 30 days after its end, and earlier, oldest end first, where the
files of ended jobs take more than 20 GiB together. Its row in the history stays. Jobs that have not ended are never
touched.
"""

import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from carpool.live.home import Home

FIRST_S, EVERY_S = 60.0, 3600.0


@dataclass(frozen=True, slots=True)
class Keep:
    """How long, and how much at most."""

    seconds: float = 30 * 86_400.0
    size: int = 20 * 2**30


def prune(home: Home, ended: Sequence[tuple[str, float]], now: float, keep: Keep) -> list[str]:
    """Remove what the rule says; `ended` names ended jobs and when. Returns the jobs whose files went. Slow."""
    there = [(at, job) for job, at in ended if home.job(job).is_dir()]
    removed = [job for at, job in there if now - at > keep.seconds]
    rest = sorted((at, job) for at, job in there if now - at <= keep.seconds)
    sizes = {job: size_of(home.job(job)) for _, job in rest}
    total = sum(sizes.values())
    for _, job in rest:
        if total <= keep.size:
            break
        total -= sizes[job]
        removed.append(job)
    for job in removed:
        shutil.rmtree(home.job(job), ignore_errors=True)
    return removed


def size_of(path: Path) -> int:
    """Bytes on disk of everything below a directory."""
    return sum(_sizes([os.fspath(path)]))


def _sizes(folders: Iterable[str]) -> Iterable[int]:
    waiting = list(folders)
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    else:
                        yield entry.stat(follow_symlinks=False).st_blocks * 512
        except OSError:
            continue
