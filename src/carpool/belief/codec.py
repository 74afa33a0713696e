"""What was learned as plain data and back, so that a belief need not be rebuilt from the journal's beginning.

The state's snapshot carries it. A belief restored from it gives the very same answers as the one that was dumped: what
is not written down, such as the process's factor, follows from what is.
"""

from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from carpool.belief.pairs import Cell, Kind, PairBelief, Seen
from carpool.belief.speeds import Place, Speeds, Times

if TYPE_CHECKING:
    from carpool.belief.model import Belief, Episode


def dump(belief: "Belief") -> dict[str, Any]:
    speeds = belief.speeds
    return {
        "version": belief.version,
        "pairs": [
            [*_plain_cell(row.cell), row.known.mean, row.known.precision, row.used.mean, row.used.precision]
            for row in belief.pairs.rows.values()
        ],
        "times": [[*place, *asdict(times).values()] for place, times in speeds.times.items()],
        "ratios": [[model, *asdict(times).values()] for model, times in speeds.ratios.items()],
        "checked": [speeds.checked, speeds.squared_error],
        "episodes": [[job, _plain_episode(episode)] for job, episode in belief.episodes.items()],
    }


def restore(belief: "Belief", data: dict[str, Any]) -> None:
    from carpool.belief.model import Episode

    belief.version = data["version"]
    rows = [(_cell(row[:4]), Seen(row[4], row[5]), Seen(row[6], row[7])) for row in data["pairs"]]
    told = {cell for cell, _, _ in rows}
    since = [row for row in belief.pairs.rows.values() if row.cell not in told]  # by a profile that has more by now
    rows += [(row.cell, row.known, row.used) for row in since]
    belief.pairs = belief.interference.pairs = PairBelief.remembering(belief.pairs.prior, rows)
    belief.speeds = Speeds(
        {Place(*row[:5]): Times(*row[5:]) for row in data["times"]},
        {row[0]: Times(*row[1:]) for row in data["ratios"]},
        *data["checked"],
    )
    belief.episodes = {
        job: Episode(**{**episode, "key": _tuples(episode["key"]), "cells": tuple(map(_cell, episode["cells"]))})
        for job, episode in data["episodes"]
    }


def _plain_episode(episode: "Episode") -> dict[str, Any]:
    return {**asdict(episode), "cells": [_plain_cell(cell) for cell in episode.cells]}


def _plain_cell(cell: Cell) -> list[Any]:
    return [*cell[0], *cell[1]]


def _cell(values: Iterable[Any]) -> Cell:
    family, size, mate_family, mate_size = values
    return Kind(family, size), Kind(mate_family, mate_size)


def _tuples(value: Any) -> Any:
    """JSON has no tuples."""
    return tuple(_tuples(item) for item in value) if isinstance(value, list | tuple) else value
