"""Retention: how long files of ended jobs are kept, and the background task that removes them.

The files of an ended job are its logs, its code snapshot and its checkpoints. Logs and code snapshots are removed after
a time, and earlier, oldest end first, while those of one user's ended jobs exceed a size. Checkpoints do not count
there: they are removed after a time of their own, or when their owner releases them with `carpool prune`. One user's
files never cause the removal of another's. Every removal is announced a day before, in the journal, by `show` and by
`doctor`, and noted afterwards. Age counts only while a service runs, so that a wrong clock removes nothing. The row in
the history stays, and files of jobs that have not ended are never touched.
"""

import asyncio
import logging
import os
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from carpool.live.clock import Clock
from carpool.live.home import Home
from carpool.live.journal.store import Store
from carpool.live.service.inbox import Inbox
from carpool.live.service.jobs import END_FILE, SPEC_FILE
from carpool.live.service.retention import Retained, RetentionLedger, RetentionLimits
from carpool.live.text import size, span

FIRST_S, EVERY_S = 60.0, 3600.0
CHECKPOINTS = "checkpoints"
FILES = "files"
"""What is removed together: the checkpoints, or everything else."""
SHOWN_JOBS = 10
"""Number of jobs that a note names."""


@dataclass(frozen=True, slots=True)
class Removal:
    """Files of a job that are to be removed."""

    job: str
    user: str
    what: str
    """`files` or `checkpoints`."""
    why: str
    """The limit of the operator that asks for it, last in brackets."""
    in_s: float
    """Seconds until then; 0 or less: now."""
    bytes: int


@dataclass
class Pruner:
    """Removes old files every hour."""

    home: Home
    store: Store
    inbox: Inbox
    clock: Clock
    limits: RetentionLimits
    ledger: RetentionLedger
    planned: list[Removal] = field(default_factory=list)
    """Removals that are announced and not carried out yet."""
    usage: dict[str, dict[str, int]] = field(default_factory=dict)
    """Bytes of files and checkpoints of every user's ended jobs, as they were at the latest look."""

    async def run(self) -> None:
        await asyncio.sleep(FIRST_S)
        last = monotonic() - FIRST_S
        while True:
            now = monotonic()
            try:
                await self.look(now - last)
            except Exception as error:  # a directory that cannot be read must not end the retention of all others
                self.inbox.note(f"old files could not be removed ({type(error).__name__}: {error}); tried again later")
            last = now
            await asyncio.sleep(EVERY_S)

    async def look(self, elapsed_s: float) -> None:
        """Announce and remove what is due. `elapsed_s`: seconds that the service ran since the look before."""
        ended = await asyncio.to_thread(self.store.ends)
        kept = await asyncio.to_thread(find_kept, self.home, ended)
        self.ledger.count(elapsed_s, [one.job for one in kept])
        wanted = due(kept, self.ledger, self.limits)
        self._announce([one for one in wanted if self.ledger.announce(one.job, one.what)])
        now = [one for one in wanted if one.in_s <= 0.0]
        await asyncio.to_thread(self._remove, now)
        self.planned = [one for one in wanted if one.in_s > 0.0]
        self.usage = _usage(kept)
        await asyncio.to_thread(self.ledger.write)

    def _announce(self, coming: Sequence[Removal]) -> None:
        for user, some in _by_user(coming):
            first = min(one.in_s for one in some)
            self.inbox.note(f"{_named(user, some)} will be removed in {span(max(first, 0.0))}: {some[0].why}")

    def _remove(self, removals: Sequence[Removal]) -> None:
        for one in removals:
            remove(self.home, one.job, one.what)
            self.ledger.removed(one.job, one.what, one.why, self.clock.now())
        for user, some in _by_user(removals):
            self.inbox.note(f"{_named(user, some)} were removed: {some[0].why}", logging.INFO)

    async def release(self, job: str, user: str) -> int:
        """Remove all files of an ended job because its owner releases them, and return their size."""
        place, why = self.home.job(job), f"released by {user}"
        freed = await asyncio.to_thread(size_of, place)
        await asyncio.to_thread(remove, self.home, job, FILES)
        await asyncio.to_thread(remove, self.home, job, CHECKPOINTS)
        for what in (FILES, CHECKPOINTS):
            self.ledger.removed(job, what, why, self.clock.now())
        self.planned = [one for one in self.planned if one.job != job]
        await asyncio.to_thread(self.ledger.write)
        self.inbox.note(f"the files of job {job} ({size(freed)}) were removed: {why}", logging.INFO)
        return freed

    def describe(self, job: str) -> dict[str, Any]:
        """Return how long the files of an ended job are kept, and what was removed: for `show`."""
        left = {FILES: self.limits.files_s, CHECKPOINTS: self.limits.checkpoints_s}
        age, gone = self.ledger.age(job), self.ledger.gone(job)
        found: dict[str, Any] = {"removed": gone}
        for what, limit in left.items():
            if what not in gone:
                found[f"{what}_kept_s"] = max(0.0, limit - age)
        for one in self.planned:
            if one.job == job:
                found[f"{one.what}_kept_s"], found[f"{one.what}_why"] = one.in_s, one.why
        return found

    def overview(self, user: str | None) -> dict[str, Any]:
        """Return limits, sizes and what happens next, of one user or (None) of all."""
        planned = [asdict(one) for one in self.planned if user in (None, one.user)]
        usage = {name: sizes for name, sizes in self.usage.items() if user in (None, name)}
        return {"limits": asdict(self.limits), "usage": usage, "planned": planned}


# ---- what is there, what is due --------------------------------------------------------------------------------------


def find_kept(home: Home, ended: Iterable[tuple[str, str, float]]) -> list[Retained]:
    """Return the ended jobs that have files, the oldest end first. `ended`: jobs, users and ends. Blocks."""
    kept = []
    for job, user, at in ended:
        place = home.job(job)
        if place.is_dir():
            checkpoints = size_of(home.checkpoints(job))
            kept.append(Retained(job, user, at, size_of(place) - checkpoints, checkpoints, _has_files(place)))
    return sorted(kept, key=lambda one: (one.ended, int(one.job)))


def due(kept: Sequence[Retained], ledger: RetentionLedger, limits: RetentionLimits) -> list[Removal]:
    """Return the removals that are announced now or were before. `kept`: oldest end first."""
    found: list[Removal] = []
    held: dict[str, int] = {}
    for one in kept:
        held[one.user] = held.get(one.user, 0) + one.files
    for one in kept:
        age = ledger.age(one.job)
        old = f"they are kept {span(limits.files_s)} after the job's end (--keep-files)"
        if one.has_files:
            left = limits.files_s - age
            total = held[one.user]
            if left > 0.0 and total > limits.size:
                old = f"the files of {one.user}'s ended jobs take {size(total)}, the limit is {size(limits.size)}"
                old, left = f"{old} (--keep-size)", 0.0
                held[one.user] -= one.files
            found += _removal(one, FILES, old, left, min(limits.notice_s, limits.files_s), ledger)
        if one.checkpoints:
            old = f"they are kept {span(limits.checkpoints_s)} after the job's end (--keep-checkpoints)"
            left, notice = limits.checkpoints_s - age, min(limits.notice_s, limits.checkpoints_s)
            found += _removal(one, CHECKPOINTS, old, left, notice, ledger)
    return found


def _removal(
    one: Retained, what: str, why: str, left: float, notice_s: float, ledger: RetentionLedger
) -> Iterator[Removal]:
    """Yield a removal that is due within the time of its notice: never before it was announced for that time."""
    if left <= notice_s:
        announced = ledger.announced_for(one.job, what)
        in_s = max(left, notice_s if announced is None else notice_s - announced)
        yield Removal(one.job, one.user, what, why, in_s, one.checkpoints if what == CHECKPOINTS else one.files)


def _has_files(place: Path) -> bool:
    return any(name not in (CHECKPOINTS, SPEC_FILE, END_FILE) for name in os.listdir(place))


def _usage(kept: Iterable[Retained]) -> dict[str, dict[str, int]]:
    usage: dict[str, dict[str, int]] = {}
    for one in kept:
        sizes = usage.setdefault(one.user, {"jobs": 0, FILES: 0, CHECKPOINTS: 0})
        sizes["jobs"] += 1
        sizes[FILES] += one.files
        sizes[CHECKPOINTS] += one.checkpoints
    return usage


def _by_user(removals: Sequence[Removal]) -> Iterator[tuple[str, list[Removal]]]:
    """Yield the removals of each user that the same limit asks for together."""
    groups: dict[tuple[str, str, str], list[Removal]] = {}
    for one in removals:
        groups.setdefault((one.user, one.what, one.why.rpartition("(")[2]), []).append(one)
    for (user, _, _), some in groups.items():
        yield user, some


def _named(user: str, some: Sequence[Removal]) -> str:
    jobs = ", ".join(one.job for one in some[:SHOWN_JOBS])
    more = f" and {len(some) - SHOWN_JOBS} more" if len(some) > SHOWN_JOBS else ""
    return f"the {some[0].what} of {user}'s jobs {jobs}{more} ({size(sum(one.bytes for one in some))})"


# ---- on disk ---------------------------------------------------------------------------------------------------------


def remove(home: Home, job: str, what: str) -> None:
    """Remove the checkpoints of a job, or everything else; the last one removes the job's directory. Blocks."""
    place = home.job(job)
    if what == CHECKPOINTS:
        _remove_tree(home.checkpoints(job))
    elif place.is_dir():
        keep = (CHECKPOINTS, SPEC_FILE, END_FILE)
        for name in os.listdir(place):
            if name not in keep:
                _remove_tree(place / name)
    if place.is_dir() and not _has_files(place) and not size_of(home.checkpoints(job)):
        _remove_tree(place)


def _remove_tree(path: Path) -> None:
    """Remove a file or a tree. `rm` follows no link and takes any depth, where `shutil.rmtree` recurses."""
    subprocess.run(["rm", "-rf", "--", str(path)], stderr=subprocess.DEVNULL, check=False)


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
