"""The result of one check of `carpool doctor`."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The result of one check."""

    what: str
    level: Literal["ok", "note", "warning", "error"]
    found: str
    remedy: str = ""
