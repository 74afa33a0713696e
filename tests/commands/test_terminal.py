"""What commands print on a terminal of 80 columns: tables that fit, and progress that leaves no trace in pipes."""

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from contextlib import nullcontext
from importlib import import_module

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from carpool.report import progress
from carpool.report.console import fit
from tests.support.command_line import COMMAND, call, environment

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def on_terminal(*words: str, columns: int = 80, code: int = 0, **more: str) -> str:
    """What the command writes to a terminal, standard error included."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    child = subprocess.Popen(
        [*COMMAND, *words], stdin=theirs, stdout=theirs, stderr=theirs, env=environment(TERM="xterm", **more)
    )
    os.close(theirs)
    found = b""
    with open(ours, "rb", buffering=0) as terminal:
        try:
            while part := terminal.read(65536):
                found += part
        except OSError:  # the other side is closed
            pass
    assert child.wait(30) == code
    return found.decode()


def shown(console: Console, *parts: object) -> str:
    for part in parts:
        console.print(part)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def table(*widths: int) -> Table:
    made = Table(pad_edge=False, show_edge=False)
    for number, _ in enumerate(widths):
        made.add_column(f"c{number}", justify="left" if number == 0 else "right")
    made.add_row(*(f"{number}" * width for number, width in enumerate(widths)))
    return made


@pytest.mark.parametrize("width", [30, 44, 60, 80, 120])
def test_a_table_fits_and_every_cell_is_shown_or_its_column_named(width):
    console = Console(file=io.StringIO(), width=width, markup=False)
    lengths = (40, 9, 7, 12, 5, 8)
    parts = fit(console, table(*lengths), ("c3", "c5", "c4"))
    text = shown(console, *parts)
    assert max(map(cell_len, text.splitlines())) <= width
    gone = re.findall(r"c\d", parts[1]) if len(parts) > 1 else []
    for number, length in enumerate(lengths):
        assert (text.count(str(number)) >= length) is (f"c{number}" not in gone), number
        assert f"c{number}" in text
    assert bool(gone) is (width < 80)


def test_columns_are_left_out_in_order_and_only_as_many_as_needed():
    console = Console(file=io.StringIO(), width=60)
    assert fit(console, table(40, 9, 7, 12, 5, 8), ("c3", "c5", "c4"), "ask")[1] == "not shown: c3; ask"


@pytest.mark.slow
def test_a_comparison_on_a_terminal_fits_shows_progress_and_respects_no_color():
    words = ("compare", "--policy", "sjf", "--policy", "carpool", "--seeds", "1", "--jobs", "20", "--workers", "1")
    told = on_terminal(*words, NO_COLOR="1")
    assert "simulating" in told
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", told), "a colour"
    table = ESCAPES.sub("", told).replace("\r", "\n").splitlines()
    head = next(line for line in table if "mean JCT" in line)
    assert len(head) <= 80
    assert "…" not in "".join(line for line in table if "simulating" not in line)
    assert any(line.startswith("not shown: ") and "GPU use" in line for line in table)
    piped = subprocess.run([*COMMAND, *words], capture_output=True, text=True, env=environment(), timeout=60)
    assert piped.stderr == ""
    assert "not shown" not in piped.stdout
    assert "\x1b" not in piped.stdout


@pytest.mark.parametrize(
    "words",
    [
        ("simulate", "--jobs", "20"),
        ("compare", "--policy", "sjf", "--seeds", "1", "--jobs", "20", "--workers", "1"),
        ("study", "--quick", "--only", "base", "--policy", "sjf-bsbf", "--seeds", "1", "--workers", "1"),
    ],
)
def test_what_follows_the_simulation_is_shown_too(words, tmp_path, monkeypatch):
    """The pictures of a long comparison take seconds."""
    said = []
    module = import_module(f"carpool.commands.{words[0]}")
    monkeypatch.setattr(module, "waiting", lambda what, quiet=False: nullcontext(said.append(what)))
    done = call(*words, "--out", tmp_path / "out")
    assert done.code == 0, done.err
    assert said[-1] == "writing tables and pictures"


@pytest.mark.slow
def test_a_profile_shows_progress_from_the_start_on(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import time; time.sleep(2.5); raise SystemExit('no report')")  # as long as imports take
    words = ("profile", "--cpu", "--solo", "--state", str(tmp_path / "raw"), "--", sys.executable, str(script))
    assert "starting the training, to learn its batch" in on_terminal(*words, code=2)


def test_an_upload_counts_what_is_read_on_a_terminal_only(monkeypatch):
    with progress.sending("uploading", io.BytesIO(b"abc"), 3) as file:
        assert isinstance(file, io.BytesIO)
    monkeypatch.setattr(progress, "shows", lambda quiet: not quiet)
    counted = []
    file = progress.CountedFile(io.BytesIO(b"abcdef"), counted.append)
    assert (file.read(4), file.read(4), file.read(4)) == (b"abcd", b"ef", b"")
    assert counted == [4, 2, 0]
