"""The chaos of two services finds what each safety rule prevents: with the rule switched off, a job runs twice."""

import pytest

from tests.cluster.chaos_pair import play


@pytest.mark.parametrize("rule", ["lease", "silence", "term"])
def test_the_same_chaos_finds_double_runs_without_any_of_the_rules(rule, tmp_path):
    """It ends with the first one, which comes after two to seven faults as a rule."""
    assert play(tmp_path, faults=40, seed=3, without=rule)
