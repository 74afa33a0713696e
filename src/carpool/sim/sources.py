"""Workloads from what a user types: a generator's name or a file, a selection of rows, lists of seeds and loads.

The commands and the paper's configuration call it.
"""

import os
from collections.abc import Mapping
from itertools import product
from math import prod

from carpool.errors import InputError, nearest
from carpool.profile.schema import load as load_profile
from carpool.sim import generate
from carpool.sim.workload import Workload, read

MOST_VALUES = 1000
"""Largest number of seeds or workloads that an option may name."""
MOST_JOBS = 10_000_000
LOADS = (1e-6, 1e6)
"""Smallest and largest load."""


def load_workload(
    source: str, selection: Mapping[str, str], jobs: int | None, load: float, seed: int, profile: str
) -> Workload:
    """Return the workload of a generator or a file; `selection` chooses rows of the file."""
    if source in generate.GENERATORS:
        if selection:
            raise InputError("--select chooses rows of a file; the generator takes --jobs, --load and --seed")
        return generated(source, profile, jobs=jobs or 240, load=load, seed=seed)
    if jobs is not None:
        raise InputError(f"--jobs belongs to the generator; leave it out, {source} has its own jobs")
    if not os.path.exists(source) and "." not in source and "/" not in source:
        raise InputError(f"unknown workload {source!r}: give a CSV file or {nearest(source, generate.GENERATORS)}")
    return read(source, selection).at_load(load)


def generated(
    name: str, profile: str, *, jobs: int, load: float = 1.0, seed: int = 1, hours: float | None = None
) -> Workload:
    """Return the workload of a generator, for the models of a profile."""
    tasks = load_profile(profile).core_tasks()
    missing = sorted(set(generate.MODELS) - set(tasks))
    if missing:
        raise InputError(f"profile {profile} lacks {', '.join(missing)}, which {name} uses; try t4")
    return generate.by_name(name, tasks, jobs=jobs, load=load, seed=seed, hours=hours)


def expand_selection(text: str | None) -> list[dict[str, str]]:
    """Return one selection for each workload that a text such as `n=240,seed=1-3` names."""
    choices: dict[str, list[str]] = {}
    for part in filter(None, (piece.strip() for piece in (text or "").split(","))):
        column, equals, values = (piece.strip() for piece in part.partition("="))
        if not equals or not column or not values:
            raise InputError(f"--select {part!r}: write it as column=value, such as n=240,seed=3 or seed=1-8")
        if column in choices:
            raise InputError(f"--select {text!r}: column {column} is given twice; give it once, such as seed=1-8")
        choices[column] = _range(values)
    if prod(len(values) for values in choices.values()) > MOST_VALUES:
        raise InputError(f"--select {text!r}: names more than {MOST_VALUES} workloads; choose fewer")
    return [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]


def parse_seeds(text: str) -> list[int]:
    """Return the seeds of a text such as `1,2,5` or `1-8`."""
    seeds = _list(text)
    for value in seeds:
        first, _, last = value.partition("-")
        if first.isdecimal() and last.isdecimal() and int(first[:18]) > int(last[:18]):
            raise InputError(f"--seeds {text!r}: the range {value} is empty; write {last}-{first}")
        if not (value.isdecimal() and len(value) <= 18):
            problem = f"{value!r} is not a seed; write whole numbers such as 1-8 (at most {MOST_VALUES})"
            raise InputError(f"--seeds {text!r}: {problem}")
    return list(dict.fromkeys(int(value) for value in seeds))


def parse_loads(text: str) -> list[float]:
    """Return the loads of a text such as `0.5,1,2`."""
    loads = []
    for value in _list(text):
        try:
            load = float(value)
        except ValueError:
            load = 0.0
        if not LOADS[0] <= load <= LOADS[1]:
            between = f"from {LOADS[0]:g} to {LOADS[1]:g} such as 0.5,1,2"
            raise InputError(f"--loads {text!r}: {value!r} is not a load; write numbers {between}")
        loads.append(load)
    return list(dict.fromkeys(loads))


def _list(text: str) -> list[str]:
    return [value for part in text.split(",") for value in _range(part.strip())]


def _range(text: str) -> list[str]:
    first, dash, last = text.partition("-")
    if dash and first.isdecimal() and last.isdecimal() and max(len(first), len(last)) <= 18:
        low, high = int(first), int(last)
        if low <= high < low + MOST_VALUES:
            return [str(value) for value in range(low, high + 1)]
    return [text]
