"""The accounts of a state as rows: by user, group, project or day, or by several of these.

`carpool usage` asks the service for it, and `carpool simulate --usage` the state at the end of a run. The columns are
defined in `docs/reference/usage.md`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from carpool.core.accounts import EARLIER, USAGE, GpuTime, JobUsage
from carpool.core.state import State

BY = ("user", "group", "project", "day")
"""What usage can be added up by."""
COUNTS = ("jobs", "failed")
"""Columns that are numbers of jobs; the others are GPU-seconds."""


def day_number(day: int) -> str:
    """Return a day of a simulation as text: its number, from 0."""
    return "earlier" if day == EARLIER else str(day)


@dataclass
class UsageReport:
    """Usage by some keys, and the time of all GPUs."""

    by: tuple[str, ...]
    rows: dict[tuple[Any, ...], JobUsage] = field(default_factory=dict)
    """Usage by the values of the keys; a day is its number."""
    gpus: GpuTime = field(default_factory=GpuTime)

    def total(self) -> JobUsage:
        """Return the usage of all rows together."""
        total = JobUsage()
        for usage in self.rows.values():
            total.add(usage)
        return total

    def plain(self, day_text: Callable[[int], str] = day_number) -> dict[str, Any]:
        """Return the report as plain data; `day_text` makes a text of a day's number."""
        rows = []
        for key, usage in sorted(self.rows.items()):
            names = {
                name: day_text(value) if name == "day" else value for name, value in zip(self.by, key, strict=True)
            }
            rows.append({**names, **plain_usage(usage)})
        return {"by": list(self.by), "rows": rows, "total": plain_usage(self.total()), "gpus": self._plain_gpus()}

    def _plain_gpus(self) -> dict[str, float]:
        gpus = self.gpus
        return {
            "existed_gpu_s": gpus.existed,
            "idle_gpu_s": gpus.idle,
            "closed_gpu_s": gpus.closed,
            "away_gpu_s": gpus.away,
        }


def plain_usage(usage: JobUsage) -> dict[str, Any]:
    """Return the columns of a row. What sharing saved is None where jobs shared and nothing is known of it."""
    row = {name if name in COUNTS else f"{name}_gpu_s": getattr(usage, name) for name in USAGE}
    if usage.unjudged and not usage.judged:
        row["saved_gpu_s"] = None
    return row


def report_usage(
    state: State, by: Sequence[str], now: float, first: int | None = None, last: int | None = None
) -> UsageReport:
    """Return the usage up to now, of the days from `first` to `last`. Without `first`, all that was counted."""
    found = UsageReport(tuple(by))
    picks = tuple(BY.index(name) for name in found.by)
    accounts, now = state.accounts, max(now, state.now)
    rest = accounts.open_items(state.cluster, state.jobs, state.now, now) if accounts.on else accounts
    for part in (accounts, rest) if rest is not accounts else (accounts,):
        for number, day in part.days.items():
            if (first is not None and number < first) or (last is not None and number > last):
                continue
            found.gpus.add(day.gpus)
            for (group, user, project), usage in day.usage.items():
                values = (user, group, project, number)
                key = tuple([values[pick] for pick in picks])
                row = found.rows.get(key)
                if row is None:
                    row = found.rows[key] = JobUsage()
                row.add(usage)
    return found
