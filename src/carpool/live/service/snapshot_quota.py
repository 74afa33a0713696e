"""How much room the code snapshots of a user's jobs that have not ended take, and the bound for it.

Every job has a copy of its own, so that a small upload can fill the disk. `requests.py` asks before it makes copies.
What counts is the size at submission, which is recorded beside the job: what the job writes into its copy is not part
of it. Snapshots of ended jobs are bounded by `retention.py`.
"""

import asyncio
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from carpool.core.state import State
from carpool.errors import InputError
from carpool.live.home import Home, read_own_json
from carpool.live.service.jobs import SPEC_FILE, JobBook
from carpool.live.text import size

MOST = 16 << 30
"""Bytes of one user's snapshots, unless the operator says otherwise."""
BLOCK = 4096
RECORDED = "snapshot_bytes"
"""Field of a job's record with the size of its snapshot."""


class SnapshotQuota:
    """The sizes of code snapshots of jobs that have not ended."""

    def __init__(self, home: Home, state: State, book: JobBook, most: int = MOST) -> None:
        self._home, self._state, self._book, self._most = home, state, book, most
        self._sizes: dict[str, int] = {}
        self._coming: dict[str, str] = {}
        """Users of jobs that are being submitted."""

    def size(self, job: str) -> int | None:
        """Return the size of a job's snapshot as it was submitted; None: the job has none, or has ended."""
        return self._sizes.get(job)

    async def measure(self, user: str, directories: Mapping[str, Path]) -> dict[str, int]:
        """Return what copies of these directories take. Also find out what jobs of an earlier service have."""
        known = {path: await asyncio.to_thread(disk_size, path) for path in set(directories.values())}
        unknown = [job for job in self._jobs(user) if job not in self._sizes]
        self._sizes |= await asyncio.to_thread(lambda: {job: self._recorded(job) for job in unknown})
        return {job: known[path] for job, path in directories.items()}

    @contextmanager
    def room(self, user: str, sizes: Mapping[str, int]) -> Iterator[None]:
        """Hold room for jobs while they are submitted. Raise `InputError` if the user has not enough of it."""
        taken = sum(self._sizes.get(job, 0) for job in self._jobs(user))
        wanted = sum(sizes.values())
        if sizes and taken + wanted > self._most:
            raise InputError(
                f"snapshot: every job gets a copy, {size(wanted)} here, and your jobs that have not ended have "
                f"{size(taken)} of {size(self._most)}; wait for some to end, leave large files out, or do without "
                "--snapshot"
            )
        self._coming |= dict.fromkeys(sizes, user)
        self._sizes |= sizes
        try:
            yield
        finally:
            for job in sizes:
                del self._coming[job]
            self._sizes = {
                job: own for job, own in self._sizes.items() if job in self._state.jobs or job in self._coming
            }

    def _jobs(self, user: str) -> list[str]:
        coming = [job for job, owner in self._coming.items() if owner == user]
        specs = self._book.specs
        own = (job for job, record in self._state.jobs.items() if record.job.user == user and job not in self._coming)
        return coming + [job for job in own if job in specs and specs[job].snapshot]

    def _recorded(self, job: str) -> int:
        """Return the size that was recorded when a job was submitted; 0: none was, as in earlier releases."""
        record = read_own_json(self._home.job(job) / SPEC_FILE)
        found = record.get(RECORDED) if isinstance(record, dict) else None
        return found if isinstance(found, int) and found > 0 else 0


def disk_size(path: Path) -> int:
    """Return the room that a copy of a directory takes, in whole blocks; each file and folder has at least one."""
    return sum(
        max(1, -(-os.lstat(os.path.join(folder, name)).st_size // BLOCK)) * BLOCK
        for folder, folders, names in os.walk(path)
        for name in (*folders, *names)
    )
