"""GPUs as operators name them: a node, a GPU of a node, or several of both.

`node0` stands for all GPUs of a node, `node0:1` for one of them, `node0:1-3` for some, and commas separate several. The
simulator's options and the routes that drain and reserve GPUs read names with `named_gpus`. Where any GPUs will do, a
number stands instead of names.
"""

import re
from collections.abc import Mapping

from carpool.errors import InputError, nearest


def named_gpus(text: str, nodes: Mapping[str, Mapping[int, int]]) -> tuple[int, ...]:
    """Return the GPUs that a text names; `nodes` has the GPUs of each node by their number within it."""
    found: dict[int, None] = {}
    for part in text.split(","):
        name, colon, numbers = part.strip().partition(":")
        if name not in nodes:
            raise InputError(f"there is no node {name!a}: {nearest(name, nodes)}")
        for index in _indexes(part, numbers) if colon else nodes[name]:
            if index not in nodes[name]:
                raise InputError(f"node {name} has no GPU {index}; its GPUs are {', '.join(map(str, nodes[name]))}")
            found[nodes[name][index]] = None
    return tuple(found)


def gpu_number(text: str) -> int | None:
    """Return the number of GPUs that a text gives instead of names; None: it gives names."""
    text = text.strip()
    return int(text) if re.fullmatch(r"[1-9][0-9]{0,5}", text, re.ASCII) else None


def _indexes(part: str, numbers: str) -> range:
    first, dash, last = numbers.partition("-")
    if not first.isdecimal() or len(first) > 6 or (dash and (not last.isdecimal() or len(last) > 6)):
        raise InputError(f"{part!a}: write a node, or a node and its GPUs such as node0:1 or node0:0-3")
    if dash and int(last) < int(first):
        raise InputError(f"{part!a}: write the smaller number first, as in node0:0-3")
    return range(int(first), int(last or first) + 1)
