"""Sizes and durations as users write them."""

import re

from carpool.errors import InputError

UNITS = {"B": 1, "MB": 10**6, "MIB": 2**20, "GB": 10**9, "GIB": 2**30}
SECONDS = {"": 1.0, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"\s*(\d{1,9}(?:\.\d{1,6})?)\s*(s|sec|m|min|h|d)?\s*", re.IGNORECASE)
_CLOCK = re.compile(r"\s*(\d{1,6}):([0-5]\d):([0-5]\d)\s*")


def parse_bytes(text: str, option: str = "--gpu-memory") -> int:
    """Return `24GiB` as bytes. The unit is required: a bare number is more often a slip than a size in bytes."""
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,15})?)\s*(GiB|GB|MiB|MB|B)\s*", text, re.IGNORECASE)
    size = round(float(match[1]) * UNITS[match[2].upper()]) if match else 0
    if size <= 0:
        raise InputError(f"{option} {text!a}: write a size with its unit, such as 24GiB".lstrip())
    return size


def parse_duration(text: str, option: str = "") -> float:
    """Return `90`, `45m`, `2h`, `1.5d` or `1:30:00` as seconds."""
    match = _DURATION.fullmatch(text)
    if match:
        return float(match[1]) * SECONDS[(match[2] or "").lower()]
    clock = _CLOCK.fullmatch(text)
    if clock:
        hours, minutes, seconds = (int(part) for part in clock.groups())
        return hours * 3600.0 + minutes * 60.0 + seconds
    raise InputError(f"{option} {text!a}: write a duration such as 90s, 45m, 2h or 1:30:00".lstrip())
