"""Gangs of two and four processes over gloo: equality, synchronisation, memory, stopping together."""

import pytest

from tests.support import training_gang as gang
from tests.support.effort import thorough_only

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("world", "cases"), [pytest.param(2, 48, marks=thorough_only), (4, 24)])
def test_weights_equal_the_full_batch_of_the_whole_gang(world, cases, tmp_path):
    for result in gang.launch(world, gang.equality, tmp_path):
        assert len(result) == cases
        late = {name: difference for name, difference in result.items() if difference > 1e-11}
        assert not late


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What each of two processes found. All scenarios in one start, because starting processes takes the time."""
    return gang.launch(2, gang.several, tmp_path_factory.mktemp("two"))


def test_a_gang_of_two(two):
    results = two
    for result in results:
        assert result["retuned"] == [1, 1, 1, 1, 1, 1, 3, 3, 3]
        assert result["plain_ddp"] <= 1e-11
        assert result["synchronisations"] == 3
        assert result["memory"] == {"difference": pytest.approx(0, abs=1e-12), "accumulation": 4}
        assert result["late"]["difference"] <= 1e-12
        stop = result["stop_and_resume"]
        assert stop["stopped"] == stop["started"] >= 5
        assert stop["difference"] == 0.0
    assert "start the gang again with accumulation" in results[1]["late"]["words"]
    assert len({result["stop_and_resume"]["stopped"] for result in results}) == 1


def test_the_adapters_in_a_gang(two):
    missing = gang.missing_frameworks()
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: pip install 'carpool[adapters]'")
    for result in two:
        expected = {name: pytest.approx(0, abs=1e-12) for name in ("lightning", "trainer", "accelerated")}
        assert result["adapters"] == expected
