"""How hard the tests try. `make test` tries a moderate number of random cases, `make thorough` the full number.

`make thorough` sets CARPOOL_THOROUGH=1.
"""

import os

import pytest

THOROUGH = os.environ.get("CARPOOL_THOROUGH", "") not in ("", "0")


def cases(number: int) -> int:
    """Return how many of this number of random cases to try now."""
    return number if THOROUGH else max(10, round(0.35 * number))


thorough_only = pytest.mark.skipif(not THOROUGH, reason="only `make thorough` runs it")
