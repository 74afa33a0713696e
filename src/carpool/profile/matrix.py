"""Measured slow-downs as a square matrix: every task at every batch, slowed by every other.

`carpool profiles show` prints it as a table and draws it as a picture.
"""

from dataclasses import dataclass

from carpool.profile.values import Profile


@dataclass(frozen=True, slots=True)
class Matrix:
    labels: tuple[str, ...]
    """Every task with its batch; all tasks at their smallest batch first, then at the next."""
    rows: tuple[tuple[float | None, ...], ...]
    """ξ of the row's job beside the column's, at least 1; None if the pair was not measured."""


Job = tuple[str, int]
"""A task at a batch (0: any)."""


def cells(profile: Profile, mechanism: str) -> dict[tuple[Job, Job], float]:
    """Return ξ of the first beside the second, at least 1, for all measured pairs."""
    return {
        ((model, cell.samples), (mate, cell.mate_samples)): max(1.0, cell.xi)
        for (model, mate), known in profile.interference(mechanism).cells.items()
        for cell in known
    }


def matrix(profile: Profile, mechanism: str) -> Matrix:
    measured = cells(profile, mechanism)
    batches: dict[str, list[int]] = {}
    for model, batch in sorted({job for pair in measured for job in pair}):
        batches.setdefault(model, []).append(batch)
    jobs = sorted(((m, b) for m in batches for b in batches[m]), key=lambda job: (batches[job[0]].index(job[1]), job))
    return Matrix(
        tuple(f"{model} {batch:,}" if batch else model for model, batch in jobs),
        tuple(tuple(measured.get((row, column)) for column in jobs) for row in jobs),
    )
