"""Sizes as people write them."""

import re

from carpool.errors import InputError

UNITS = {"B": 1, "MB": 10**6, "MIB": 2**20, "GB": 10**9, "GIB": 2**30}


def parse_bytes(text: str, option: str = "--gpu-memory") -> int:
    """`24GiB` as bytes. The unit must be there: a bare number is more often a slip than a size in bytes."""
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,15})?)\s*(GiB|GB|MiB|MB|B)\s*", text, re.IGNORECASE)
    size = round(float(match[1]) * UNITS[match[2].upper()]) if match else 0
    if size <= 0:
        raise InputError(f"{option} {text!r}: write a size with its unit, such as 24GiB")
    return size
