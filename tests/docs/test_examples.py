"""The examples and the commands that the documents name work as they stand."""

import re
import subprocess
import sys

from tests.support import ROOT


def run(*arguments):
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_from_python():
    said = run("examples/from_python.py")
    assert re.search(r"mean completion time: \d+ s alone, \d+ s shared", said)
    assert said.count(" s  (") == 7


def test_a_policy_of_ones_own():
    policy = "examples/longest_first.py:LongestFirst"
    said = run("-m", "carpool.cli", "compare", "--policy", policy, "--policy", f"{policy}:skip=false", "--seeds", "1")
    assert "LongestFirst:skip=false" in said


def test_the_policy_in_the_document_is_the_example():
    code = (ROOT / "examples" / "longest_first.py").read_text().split('"""', 2)[2].strip()
    assert code in (ROOT / "docs" / "how-to" / "write-a-policy.md").read_text()


def test_every_command_in_the_readme_exists():
    from carpool.cli import COMMANDS

    named = set(re.findall(r"carpool (\w+)", (ROOT / "README.md").read_text()))
    assert named <= set(COMMANDS), named - set(COMMANDS)
