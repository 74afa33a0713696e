"""Specs of jobs as the live service reads and stores them: JSON with the fields of `carpool.job_schema`.

The HTTP routes and the recovery of a service call this module. The scheduler uses only a part of a spec, the
`core.model.Job` that the service derives from it.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from carpool.errors import InputError
from carpool.field_types import ArrayIndexes, FieldError
from carpool.job_schema import Edge, Spec, read
from carpool.sweeps import combinations, fill

__all__ = [
    "SUBMIT_VARIABLE",
    "Spec",
    "expand",
    "expand_sweep",
    "from_json",
    "own_variables",
    "parse",
    "stored",
    "unreadable",
]
SUBMIT_VARIABLE = "SLURM_SUBMIT_DIR"
"""Variable that jobs of batch scripts have. They get their ids under Slurm's names as well."""
LONGEST_NAME = 200
UNCOUNTED = 1000
"""Iterations of a job whose owner gave no number: thousandths of the whole, so that jobs of one family compare."""
MAX_GRACE_S = 3600.0
"""Seconds that a job may ask for to save and to leave, unless the operator says otherwise."""
IDLE_S = 1800.0
"""Seconds after which a job with a terminal that is left alone ends, unless its owner says otherwise."""
FOR_TERMINALS = {"can_pause": False, "can_checkpoint": False, "watch": False}
"""Defaults of jobs with a terminal: a user who types must not wait for a turn, a shell cannot be resumed from a
checkpoint, and what is run in one shell after the other is not one training."""


def from_json(text: str) -> Spec:
    """Return the spec that `Spec.to_json` wrote, in this release or an earlier one. Raise `InputError`."""
    try:
        data = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        raise InputError("the spec is no JSON; submit the job again") from None
    return parse(data)


def unreadable() -> Spec:
    """Return the spec of a job whose own one is damaged. It has no command, so the job cannot be launched."""
    return Spec(command=(), directory="/")


def stored(text: str) -> Spec:
    """Return the spec of a job that has ended, from its row in the journal; `unreadable` if that is damaged."""
    try:
        return from_json(text)
    except InputError:
        return unreadable()


def parse(data: Mapping[str, Any]) -> Spec:
    """Return a checked spec from plain data. Raises `InputError` that names the wrong field."""
    given = read(data, Edge.STORED, required=("command", "directory"))
    if given.get("terminal"):
        given = {**FOR_TERMINALS, **given}
    elif given.get("idle_s") is not None:
        raise InputError("idle_s: is for jobs with a terminal; add terminal, or leave it out")
    return Spec(**given)


def own_variables(job: str, spec: Spec) -> dict[str, str]:
    """Return the variables that tell a job its id and its place in its array, as far as the executor does not."""
    found = {"SLURM_JOB_ID": job} if SUBMIT_VARIABLE in spec.env else {}
    if spec.array_index is not None:
        index, array = str(spec.array_index), spec.array_job or job  # release 0.1 kept no id of the array
        if found:
            found |= {"SLURM_ARRAY_JOB_ID": array, "SLURM_ARRAY_TASK_ID": index}
        found |= {"CARPOOL_ARRAY_JOB": array, "CARPOOL_ARRAY_INDEX": index}
    return found


def expand(spec: Spec, array: str) -> list[Spec]:
    """Return one spec for each index of an array such as `0-9` or `0,3,7-8`, with the index in its name."""
    try:
        indexes = ArrayIndexes().indexes(array)
    except FieldError as error:
        raise InputError(f"array: {error}") from None
    return [replace(spec, name=f"{spec.name}[{i}]" if spec.name else "", array_index=i) for i in indexes]


def expand_sweep(spec: Spec, sweep: Mapping[str, tuple[str, ...]]) -> list[Spec]:
    """Return one spec for each combination of a sweep's values, with the values in its command and its name."""
    for name in sweep:
        if not any(f"{{{name}}}" in word for word in spec.command):
            raise InputError(f"sweep: the command does not say {{{name}}}; write it where the value belongs")
    found = []
    for index, values in enumerate(combinations(sweep)):
        command = tuple(fill(word, values) for word in spec.command)
        label = ",".join(f"{name}={value}" for name, value in values.items())
        name = f"{spec.name}[{label}]" if spec.name else label
        name = name if len(name) <= LONGEST_NAME else f"{spec.name[: LONGEST_NAME - 12]}[{index}]"
        found.append(replace(spec, name=name, command=command, array_index=index))
    return found
