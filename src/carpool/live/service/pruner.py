"""Retention: how long files of ended jobs are kept, and the background task that removes them.

Files of a job (logs, checkpoints, its code snapshot) are removed 30 days after its end. They are removed earlier,
oldest end first, while the files of ended jobs take more than 20 GiB together. The job's row in the history stays.
Files of jobs that have not ended are never touched.
"""

import asyncio
import logging
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from carpool.live.clock import Clock
from carpool.live.home import Home
from carpool.live.journal.store import Store
from carpool.live.service.inbox import Inbox

FIRST_S, EVERY_S = 60.0, 3600.0


@dataclass(frozen=True, slots=True)
class RetentionLimits:
    """Limits for the files of ended jobs."""

    seconds: float = 30 * 86_400.0
    size: int = 20 * 2**30
    """Total size in bytes."""


@dataclass
class Pruner:
    """Removes old files every hour."""

    home: Home
    store: Store
    inbox: Inbox
    clock: Clock
    limits: RetentionLimits

    async def run(self) -> None:
        await asyncio.sleep(FIRST_S)
        while True:
            ends = await asyncio.to_thread(self.store.ends)
            removed = await asyncio.to_thread(prune, self.home, ends, self.clock.now(), self.limits)
            if removed:
                self.inbox.note(f"the files of {len(removed)} old jobs were removed", logging.INFO)
            await asyncio.sleep(EVERY_S)


def prune(home: Home, ended: Sequence[tuple[str, float]], now: float, limits: RetentionLimits) -> list[str]:
    """Remove the files that the limits do not allow and return their jobs. `ended`: jobs and their ends. Blocks."""
    found = [(at, job) for job, at in ended if home.job(job).is_dir()]
    removed = [job for at, job in found if now - at > limits.seconds]
    rest = sorted((at, job) for at, job in found if now - at <= limits.seconds)
    sizes = {job: size_of(home.job(job)) for _, job in rest}
    total = sum(sizes.values())
    for _, job in rest:
        if total <= limits.size:
            break
        total -= sizes[job]
        removed.append(job)
    for job in removed:
        shutil.rmtree(home.job(job), ignore_errors=True)
    return removed


def size_of(path: Path) -> int:
    """Return the bytes on disk of everything below a directory."""
    return sum(_sizes([os.fspath(path)]))


def _sizes(folders: Iterable[str]) -> Iterable[int]:
    pending = list(folders)
    while pending:
        try:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
                    else:
                        yield entry.stat(follow_symlinks=False).st_blocks * 512
        except OSError:
            continue
