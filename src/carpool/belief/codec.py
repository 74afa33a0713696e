"""Converts what a belief has learned to plain data and back, so that recovery need not replay the whole journal.

The state's snapshot carries this data. A restored belief gives exactly the answers of the one that was dumped. Derived
values, such as the Gaussian process's factor, are recomputed instead of stored.
"""

from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from carpool.belief.pairs import Cell, Evidence, JobClass, PairBelief
from carpool.belief.speeds import LogTimes, SpeedKey, Speeds, StartUps

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
        "startups": [dict(belief.startups.mean_s), belief.startups.overall_s, sorted(belief.startups.silent)],
        "tried": sorted(_plain_cell(cell) for cell in belief.tried),
        "demands": belief.measured.dump(),
        "checked": [speeds.checked, speeds.squared_error],
        "episodes": [[job, _plain_episode(episode)] for job, episode in belief.episodes.items()],
    }


def restore(belief: "Belief", data: dict[str, Any]) -> None:
    from carpool.belief.model import Episode

    belief.version = data["version"]
    belief.measured.restore(data.get("demands", []))
    rows = [(_cell(row[:4]), Evidence(row[4], row[5]), Evidence(row[6], row[7])) for row in data["pairs"]]
    stored = {cell for cell, _, _ in rows}
    # The profile may contain pairs now that it did not contain when the data was dumped.
    added = [row for row in belief.pairs.rows.values() if row.cell not in stored]
    rows += [(row.cell, row.known, row.used) for row in added]
    belief.pairs = belief.interference.pairs = PairBelief.remembering(belief.pairs, rows)
    belief.speeds = Speeds(
        {SpeedKey(*row[:5]): LogTimes(*row[5:]) for row in data["times"]},
        {row[0]: LogTimes(*row[1:]) for row in data["ratios"]},
        *data["checked"],
    )
    belief.tried = {_cell(row) for row in data.get("tried", ())}
    mean_s, overall_s, *silent = data.get("startups", ({}, None))
    belief.startups = StartUps(mean_s, overall_s, set(*silent))
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
    return JobClass(family, size), JobClass(mate_family, mate_size)


def _tuples(value: Any) -> Any:
    """Turn lists into tuples, recursively: JSON has no tuples."""
    return tuple(_tuples(item) for item in value) if isinstance(value, list | tuple) else value
