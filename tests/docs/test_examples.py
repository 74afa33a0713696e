"""The examples and the commands that the documents name work as they stand."""

import re
import subprocess
import sys
from collections.abc import Iterator

import click
import pytest

from tests.support import ROOT

PAGES = sorted(page.relative_to(ROOT).as_posix() for page in ROOT.glob("docs/**/*.md"))
DOCUMENTS = ["README.md", "CONTRIBUTING.md", *PAGES]


def run(*arguments):
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_from_python():
    said = run("examples/from_python.py")
    assert re.search(r"mean completion time: \d+ s alone, \d+ s shared", said)
    assert said.count(" s  (") == 7


@pytest.mark.slow
def test_a_policy_of_ones_own():
    policy = "examples/longest_first.py:LongestFirst"
    said = run("-m", "carpool.cli", "compare", "--policy", policy, "--policy", f"{policy}:skip=false", "--seeds", "1")
    assert "LongestFirst:skip=false" in said


def test_the_policy_in_the_document_is_the_example():
    code = (ROOT / "examples" / "longest_first.py").read_text().split('"""', 2)[2].strip()
    assert code in (ROOT / "docs" / "how-to" / "write-a-policy.md").read_text()


def command_lines(text: str) -> Iterator[list[str]]:
    """Every call of carpool in a document, in code blocks and in code spans, as words without what follows `--`."""
    text = text.replace("\\\n", " ")
    blocks = re.findall(r"^```(?:sh|console)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    spans = re.findall(r"`(carpool [^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))
    for line in [line for block in blocks for line in block.splitlines()] + spans:
        for part in re.split(r"[;&]|\s#", line):
            words = re.sub(r"^\s*(\$ )?([A-Z_]+=\S+ )*", "", part).partition(" -- ")[0].split()
            if words[:1] == ["carpool"] and len(words) > 1:
                yield words


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_command_and_option_in_a_document_exists(document: str):
    from carpool.cli import cli

    for words in command_lines((ROOT / document).read_text(encoding="utf-8")):
        command: click.Command = cli
        context = click.Context(cli, info_name="carpool", **cli.context_settings)
        rest = words[1:]
        while rest and isinstance(command, click.Group) and re.fullmatch(r"[a-z]+", rest[0].strip("…,")):
            command = command.get_command(context, rest.pop(0).strip("…,"))
            assert command is not None, f"{document}: {' '.join(words)}"
            context = click.Context(command, parent=context, info_name=command.name)
        known = {name for one in command.get_params(context) for name in (*one.opts, *one.secondary_opts)}
        given = {word.partition("=")[0].rstrip(",") for word in rest if re.match(r"--?[a-z]", word)}
        assert given <= known, f"{document}: {' '.join(words)}: {given - known}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_file_that_a_document_names_exists(document: str):
    """Paths in code from the root, such as `bench/speed.py`; a walk of CONTRIBUTING also names files to be written."""
    text = (ROOT / document).read_text(encoding="utf-8")
    new = {"src/carpool/policies/simple/ljf.py", "src/carpool/live/executors/kubernetes.py"}
    new |= {"tests/live/executors/test_kubernetes.py"}
    for path in re.findall(r"(?<![\w./-])((?:src|tests|bench|examples|docs)/[\w./-]+\w)", text):
        assert path in new or (ROOT / path).exists(), f"{document}: {path}"
