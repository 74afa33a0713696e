"""The commands in the walks of CONTRIBUTING.md run the tests that they promise, and a forgotten step is noticed."""

import re
import shlex

import pytest

from carpool.policies import registry
from tests.support import ROOT

WALKS = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Walk 1")[2]
NEW = {"tests/live/executors/test_kubernetes.py"}
"""Files that a walk tells the reader to write."""
COMMANDS = sorted(set(re.findall(r"^ *(pytest .*)$|`(pytest [^`]*)`", WALKS, re.MULTILINE)))


@pytest.mark.parametrize("command", ["".join(found) for found in COMMANDS])
def test_commands_of_the_walks_leave_no_slow_test_out(command: str):
    """A plain `pytest` leaves the slow tests out, which are most of the comparisons that a walk relies on."""
    arguments = shlex.split(command)[1:]
    paths = [argument for argument in arguments if argument.startswith("tests/")]
    assert paths
    assert all((ROOT / path).exists() for path in paths if path not in NEW), command
    assert arguments[:2] == ["-m", ""] or set(paths) <= NEW, f"{command}: add -m ''"


@pytest.mark.parametrize("policy", registry.BUILT_IN)
def test_every_policy_is_explained_in_the_documentation(policy: str):
    page = (ROOT / "docs" / "explanation" / "policies.md").read_text(encoding="utf-8")
    assert f"\n| `{policy}` |" in page, f"add a row about {policy} to docs/explanation/policies.md"
