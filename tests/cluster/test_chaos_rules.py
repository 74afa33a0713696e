"""The chaos of two services finds what each safety rule prevents: with the rule switched off, a job runs twice."""

import pytest

from tests.cluster.chaos_pair import play

SEEDS = 3, 4
"""The faults follow from the seed, but what they hit also depends on the moment, so that one seed may miss."""
SOME_MISS = pytest.mark.xfail(
    strict=False, reason="some runs find none in 40 faults; tests/cluster/test_safety_rules.py always does"
)


@pytest.mark.parametrize("rule", ["lease", "silence", pytest.param("term", marks=SOME_MISS)])
def test_the_same_chaos_finds_double_runs_without_any_of_the_rules(rule, tmp_path):
    """It ends with the first one, which comes after two to seven faults as a rule."""
    folders = {seed: tmp_path / f"seed-{seed}" for seed in SEEDS}
    for folder in folders.values():
        folder.mkdir()
    assert any(play(folder, faults=25, seed=seed, without=rule) for seed, folder in folders.items())
