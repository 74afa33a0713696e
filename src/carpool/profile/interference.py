"""Parses the value of `--interference`: a number, a CSV matrix, or a profile's table.

`simulate` and `compare` call `read_interference` and get the core's table of slow-downs. For a profile with several
sharing mechanisms the value is `name:mechanism`, for example `h200:mps`. `h200:mps:small` and `h200:mps:large` use the
pairs of the smallest or largest batches for jobs of any batch.
"""

import math

from carpool.core.perf import ConstantInterference, Interference, MeasuredPair, TableInterference
from carpool.errors import nearest
from carpool.profile.measure.raw import MECHANISMS
from carpool.profile.rows import read_matrix
from carpool.profile.schema import Profile, ProfileError, load, shipped

BATCHES = ("small", "large")


def read_interference(text: str) -> Interference:
    """Parse one ξ for all pairs ("1.5"), a matrix ("xi.csv"), or a profile's pairs ("gavel", "h200:mps")."""
    text = text.strip()
    constant = _constant(text)
    if constant is not None:
        return constant
    if text.lower().endswith(".csv"):
        return TableInterference({pair: [MeasuredPair(xi)] for pair, xi in read_matrix(text).items()})
    name, colon, mechanism = text.rpartition(":")
    if colon and mechanism in BATCHES:
        name, _, mechanism = name.rpartition(":") if ":" in name else (name, "", "")
        return _profile(name).interference(mechanism or None, text.rpartition(":")[2])
    if colon and mechanism in MECHANISMS:
        return _profile(name).interference(mechanism)
    if colon and (name in shipped() or name.endswith(".json")):
        raise ProfileError(f"interference {text!r}: unknown mechanism {mechanism!r}; give {', '.join(MECHANISMS)}")
    return _profile(text).interference(None)


def _constant(text: str) -> ConstantInterference | None:
    try:
        xi = float(text)
    except ValueError:
        return None
    if not math.isfinite(xi) or xi < 1:
        raise ProfileError(f"interference {text}: a slow-down is a finite number of at least 1; give for example 1.5")
    return ConstantInterference(xi)


def _profile(name: str) -> Profile:
    if not name:
        raise ProfileError(
            f"interference: empty; give a number like 1.5, a CSV matrix, or one of {', '.join(tables())}"
        )
    looks_like_file = name.endswith(".json") or "/" in name
    if name not in shipped() and not looks_like_file:
        raise ProfileError(
            f"interference {name!r}: neither a number, a .csv matrix nor a shipped table; " + nearest(name, tables())
        )
    return load(name)


def tables() -> list[str]:
    """Return the names of the shipped tables, as `--interference` accepts them."""
    names = []
    for name in shipped():
        mechanisms = sorted({pair.mechanism for pair in load(name).pairs})
        names += [name] if len(mechanisms) == 1 else [f"{name}:{mechanism}" for mechanism in mechanisms]
    return names
