"""Text from users is harmless in a terminal; tables and durations read well."""

import io
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from carpool.live.commands.tables import cluster_of, jobs_table, order
from carpool.live.text import harmless, how_it_ended, printable, span


@given(st.text())
def test_printable_text_has_no_control_characters(text):
    assert printable(text).isprintable()


def test_harmless_text_is_unchanged():
    assert printable("résumé ξ 模型") == "résumé ξ 模型"
    assert printable("a\x1b[2Jb\u202e") == "a\\x1b[2Jb\\u202e"


def test_logs_keep_lines_and_colours_and_lose_the_rest():
    log = b"a\tb\r\n\x1b[31mred\x1b[0m\x1b[2J\x1b]0;title\x07\x08\x1bPdcs\x1b\\end\n"
    assert harmless(log) == b"a\tb\r\n\x1b[31mred\x1b[0mend\n"
    assert harmless("é\x9b2J ξ\n".encode()) == "é2J ξ\n".encode()  # an escape sequence begun by one character


@given(st.binary())
def test_a_harmless_log_holds_no_escape_but_colours(data):
    left = harmless(data)
    assert all(left[i : i + 2] == b"\x1b[" for i in range(len(left)) if left[i] == 0x1B) or b"\x1b" not in left


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.04, "0.0 s"),
        (9.0, "9.0 s"),
        (59.6, "1 min"),
        (3599, "59 min 59 s"),
        (3600, "1 h"),
        (90061, "1 d 1 h"),
        (-5, "-5.0 s"),
        (None, "-"),
    ],
)
def test_durations_are_shown_in_two_units(seconds, shown):
    assert span(seconds) == shown


def test_a_job_that_waits_again_is_not_shown_as_running():
    row = {"job": "1", "name": "", "user": "a", "status": "pending", "gpus": 1, "submitted": time.time() - 100.0}
    row |= {"started": row["submitted"] + 10.0, "finished": None, "ran_s": 20.0, "waited_s": 80.0, "progress": 0.0}
    console = Console(file=io.StringIO(), width=200)
    console.print(jobs_table([row], console=console))
    assert console.file.getvalue().splitlines()[2].split()[4:8] == ["1", "min", "20", "s"]
    assert "20 s     0%" in console.file.getvalue()


def test_of_many_jobs_that_ended_the_latest_are_shown():
    ended = [{"job": str(n), "status": "finished", "finished": 10.0 * n} for n in range(1, 5)]
    living = [{"job": "5", "status": "pending", "finished": None}, {"job": "6", "status": "running", "finished": None}]
    assert [row["job"] for row in order([*ended, *living])] == ["6", "5", "4", "3", "2", "1"]


def test_the_nodes_of_a_service_are_those_of_the_simulator():
    nodes = [{"gpus": [{}] * count} for count in (2, 2, 4, 0, 2)]
    assert cluster_of({"nodes": nodes}) == "2x2+1x4+1x2"


def test_a_job_was_cancelled_and_has_failed_or_finished():
    said = [how_it_ended("4", status) for status in ("cancelled", "failed", "finished")]
    assert said == ["job 4 was cancelled", "job 4 has failed", "job 4 has finished"]
