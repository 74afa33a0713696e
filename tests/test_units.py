"""Sizes and durations as people write them."""

import pytest

from carpool.errors import InputError
from carpool.units import parse_bytes, parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("45m", 2700), ("2h", 7200), ("1.5d", 129600), ("1:30:00", 5400)]
)
def test_durations_are_read_with_their_unit(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "-5", "2 weeks", "1:99:00", "nan", "1e9"])
def test_other_texts_are_not_durations(text):
    with pytest.raises(InputError, match="such as 90s"):
        parse_duration(text)


def test_a_size_needs_its_unit():
    assert parse_bytes("1.5GiB") == 3 << 29
    with pytest.raises(InputError, match="--memory '8': write a size with its unit, such as 24GiB"):
        parse_bytes("8", "--memory")
