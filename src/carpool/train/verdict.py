"""The verdict on a job: whether splitting its batch leaves the training the same. Plain values, without torch.

`check` makes a verdict, `carpool check` prints and stores it, and the report carries it to the scheduler.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from carpool.channel import Shrinking

Level = Literal["refuse", "warn", "note"]


@dataclass(frozen=True, slots=True)
class Finding:
    level: Level
    where: str
    """The module's name and class, or the loss function's."""
    words: str

    def __str__(self) -> str:
        return f"{self.where}: {self.words}"


@dataclass(frozen=True, slots=True)
class SplitMeasurement:
    """The same steps on the same data in float64, whole batch against micro-batches."""

    accumulation: int
    steps: int
    difference: float
    """Largest absolute difference of any weight after those steps."""
    scale: float
    """Largest absolute weight, to judge the difference by."""

    @property
    def same(self) -> bool:
        return self.difference <= 1e-9 * max(1.0, self.scale)

    def __str__(self) -> str:
        return (
            f"after {self.steps} steps in float64, weights with accumulation 1 and {self.accumulation} "
            f"differ by at most {self.difference:.1e}"
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a job's batch may be split, and why. The scheduler uses `can_shrink`; people read the findings."""

    findings: tuple[Finding, ...] = ()
    measurement: SplitMeasurement | None = None

    @property
    def shrinking(self) -> Shrinking:
        levels = {finding.level for finding in self.findings}
        if "refuse" in levels:
            return Shrinking.REFUSED
        if self.measurement is None:
            return Shrinking.UNKNOWN  # no module forbids it, but the loss was not tried
        return Shrinking.WARNED if "warn" in levels else Shrinking.CERTIFIED

    @property
    def can_shrink(self) -> bool:
        return self.shrinking in (Shrinking.CERTIFIED, Shrinking.WARNED)

    @property
    def sentence(self) -> str:
        """One line with the decision and its first reason."""
        first = next((str(f) for level in ("refuse", "warn") for f in self.findings if f.level == level), "")
        match self.shrinking:
            case Shrinking.REFUSED:
                return f"refused: splitting the batch would change this training; {first}"
            case Shrinking.WARNED:
                return f"certified with a warning; {first}"
            case Shrinking.CERTIFIED:
                return "certified: splitting the batch leaves this training the same"
        return "not checked: no module forbids splitting the batch, but the loss was not tried"

    def __str__(self) -> str:
        lines = [self.sentence]
        lines += [f"  {finding.level:6} {finding}" for finding in self.findings]
        if self.measurement is not None:
            lines.append(f"  measured: {self.measurement}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        return {"shrinking": self.shrinking.name.lower(), "can_shrink": self.can_shrink, **asdict(self)}

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.as_dict(), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Verdict:
        raw = json.loads(Path(path).read_text())
        measured = raw.get("measurement")
        return cls(
            tuple(Finding(**finding) for finding in raw.get("findings", ())),
            SplitMeasurement(**measured) if measured else None,
        )
