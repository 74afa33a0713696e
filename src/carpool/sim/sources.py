"""From what a person types to workloads: the generator's name or a file, a selection of rows, lists of numbers."""

from collections.abc import Mapping
from itertools import product
from math import isfinite
from pathlib import Path

from carpool.errors import InputError, nearest
from carpool.profile.schema import load as load_profile
from carpool.sim import generate
from carpool.sim.workload import Workload, read

MOST_VALUES = 1000


def load_workload(
    source: str, selection: Mapping[str, str], jobs: int | None, load: float, seed: int, profile: str
) -> Workload:
    if source == generate.NAME:
        if selection:
            raise InputError("--select chooses rows of a file; the generator takes --jobs, --load and --seed")
        tasks = load_profile(profile).core_tasks()
        missing = sorted({kind.model for kind in generate.KINDS} - set(tasks))
        if missing:
            raise InputError(f"profile {profile} lacks {', '.join(missing)}, which {generate.NAME} uses; try t4")
        return generate.philly_like(tasks, jobs=jobs or 240, load=load, seed=seed)
    if jobs is not None:
        raise InputError(f"--jobs belongs to the generator; {source} holds the jobs it holds")
    if not Path(source).exists() and "." not in source and "/" not in source:
        raise InputError(f"unknown workload {source!r}: give a CSV file or {nearest(source, [generate.NAME])}")
    return read(source, selection).at_load(load)


def expand_selection(text: str | None) -> list[dict[str, str]]:
    """`n=240,seed=1-3` as one selection for each workload it names."""
    choices: dict[str, list[str]] = {}
    for part in filter(None, (piece.strip() for piece in (text or "").split(","))):
        column, equals, values = (piece.strip() for piece in part.partition("="))
        if not equals or not column or not values:
            raise InputError(f"--select {part!r}: write it as column=value, such as n=240,seed=3 or seed=1-8")
        choices[column] = _range(values)
    return [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]


def parse_numbers(option: str, text: str, *, whole: bool = False) -> list[float]:
    """`0.5,1,2` or `1-8`."""
    numbers = []
    for part in (piece.strip() for piece in text.split(",")):
        for value in _range(part):
            try:
                number = float(value)
            except ValueError:
                number = float("nan")
            if not isfinite(number) or number < 0 or (whole and not number.is_integer()) or (not whole and number == 0):
                kind = "whole numbers such as 1-8" if whole else "numbers above 0 such as 0.5,1,2"
                raise InputError(f"{option} {text!r}: {value!r} will not do; write {kind}")
            numbers.append(number)
    return list(dict.fromkeys(numbers))


def _range(text: str) -> list[str]:
    first, dash, last = text.partition("-")
    if dash and first.isdigit() and last.isdigit() and int(first) <= int(last) < int(first) + MOST_VALUES:
        return [str(value) for value in range(int(first), int(last) + 1)]
    return [text]
