"""The chaos of two services finds what safety rules prevent: with the rule switched off, a job runs twice.

Without the term, some rounds of faults find nothing: what they hit depends on the moment. `test_safety_rules.py` plays
what it prevents, step by step.
"""

import pytest

from tests.cluster.chaos_pair import play


@pytest.mark.parametrize("rule", ["lease", "silence"])
def test_the_same_chaos_finds_double_runs_without_any_of_the_rules(rule, tmp_path):
    """It ends with the first one, which comes after two to seven faults as a rule."""
    assert play(tmp_path, faults=40, seed=3, without=rule)
