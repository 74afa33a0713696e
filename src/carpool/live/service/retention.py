"""The operator's limits for the files of ended jobs, and the ledger of how long each was kept.

The ledger is a file beside the journal. It counts the seconds that a service ran, and notes at which count a job was
first seen ended, announced and removed. No wall clock is involved. A lost ledger starts again from 0, which keeps files
longer. `pruner.py` uses both.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from carpool.live.home import OWN_JSON_BYTES, read_json, write_private

DAY_S = 86_400.0
REMEMBERED = 10_000
"""Number of removals that the ledger remembers."""


@dataclass(frozen=True, slots=True)
class RetentionLimits:
    """Limits for the files of ended jobs."""

    files_s: float = 30 * DAY_S
    """Seconds after a job's end for which its logs and its code snapshot are kept."""
    checkpoints_s: float = 90 * DAY_S
    """Seconds after a job's end for which checkpoints are kept that their owner has not released."""
    size: int = 20 * 2**30
    """Bytes of logs and code snapshots of each user's ended jobs."""
    notice_s: float = DAY_S
    """Seconds between the announcement of a removal and the removal."""


@dataclass(frozen=True, slots=True)
class Retained:
    """An ended job that has files. Sizes are bytes on disk."""

    job: str
    user: str
    ended: float
    files: int
    checkpoints: int
    has_files: bool
    """There is more than checkpoints and the job's record."""


class RetentionLedger:
    """How long files were kept, by the time that services ran."""

    def __init__(self, path: Path) -> None:
        self._path = path
        found = read_json(path, OWN_JSON_BYTES)
        data: dict[str, Any] = found if isinstance(found, dict) else {}
        self._counted = _number(data.get("counted_s"))
        self._ended = {job: _number(at) for job, at in _table(data, "ended").items()}
        self._announced = {key: _number(at) for key, at in _table(data, "announced").items()}
        self._removed: dict[str, dict[str, Any]] = {
            job: whats for job, whats in _table(data, "removed").items() if isinstance(whats, dict)
        }

    def count(self, elapsed_s: float, kept: Iterable[str]) -> None:
        """Count seconds that the service ran, and note the ended jobs that have files now."""
        self._counted += max(0.0, elapsed_s)
        self._ended = {job: min(self._ended.get(job, self._counted), self._counted) for job in kept}
        self._announced = {key: at for key, at in self._announced.items() if key.partition(" ")[0] in self._ended}

    def age(self, job: str) -> float:
        """Return the seconds that services ran since a job was first seen ended."""
        return self._counted - self._ended.get(job, self._counted)

    def announce(self, job: str, what: str) -> bool:
        """Note that a removal is announced; return whether it was not before."""
        key = f"{job} {what}"
        new = key not in self._announced
        self._announced.setdefault(key, self._counted)
        return new

    def announced_for(self, job: str, what: str) -> float | None:
        """Return the seconds since a removal was announced; None: it was not."""
        at = self._announced.get(f"{job} {what}")
        return None if at is None else self._counted - at

    def removed(self, job: str, what: str, why: str, at: float) -> None:
        self._removed.setdefault(job, {})[what] = {"at": at, "why": why}
        while len(self._removed) > REMEMBERED:
            del self._removed[next(iter(self._removed))]

    def gone(self, job: str) -> dict[str, Any]:
        """Return what was removed of a job, when and why."""
        return self._removed.get(job, {})

    def write(self) -> None:
        data = {
            "counted_s": self._counted,
            "ended": self._ended,
            "announced": self._announced,
            "removed": self._removed,
        }
        write_private(self._path, json.dumps(data, separators=(",", ":")), sync=False)


def _table(data: dict[str, Any], name: str) -> dict[str, Any]:
    found = data.get(name)
    return found if isinstance(found, dict) else {}


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and 0.0 <= value < 1e15 else 0.0
