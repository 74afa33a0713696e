"""Commands on many jobs at once: ids, ranges, arrays, names and filters, against a real service."""

import json
import os
import pty
import subprocess

import pytest

from carpool.errors import InputError
from carpool.live.commands.selection import Filters, find_rows, match, split_words
from carpool.live.commands.tables import sort
from tests.support.command_line import COMMAND, environment

ROWS = [
    {"job": "7", "name": "prep", "user": "ana", "status": "running"},
    {"job": "12", "name": "sweep[0]", "user": "ana", "status": "pending", "array_job": "12", "array_index": 0},
    {"job": "13", "name": "sweep[3]", "user": "ana", "status": "pending", "array_job": "12", "array_index": 3},
    {"job": "14", "name": "", "user": "ben", "status": "pending", "held": True, "array_job": "14", "array_index": 3},
    {"job": "120", "name": "sweeper", "user": "ben", "status": "running"},
]


@pytest.mark.parametrize(
    ("word", "jobs"),
    [
        ("12", ["12"]),
        ("12-14", ["12", "13", "14"]),
        ("0-999999999999", ["7", "12", "13", "14", "120"]),
        ("12[3-5]", ["13"]),
        ("12[*]", ["12", "13"]),
        ("sweep[0,3]", ["12", "13"]),
        ("sweep[3]", ["13"]),
        ("prep", ["7"]),
        ("sweep*", ["12", "13", "120"]),
        ("*", ["7", "12", "13", "120"]),
        ("Prep", []),
        ("99", []),
    ],
)
def test_a_word_means_these_jobs(word, jobs):
    assert match(word, ROWS) == jobs


def test_an_array_index_that_is_no_index_is_refused():
    with pytest.raises(InputError, match="rising ranges"):
        match("12[5-3]", ROWS)


def test_a_range_that_falls_is_refused():
    with pytest.raises(InputError, match="14-12: write the smaller id first"):
        match("14-12", ROWS)


@pytest.mark.parametrize(
    ("filters", "jobs"),
    [
        (Filters(mine=True), ["14", "120"]),
        (Filters(user="ana", statuses=("pending",)), ["12", "13"]),
        (Filters(statuses=("held",)), ["14"]),
        (Filters(statuses=("running", "held"), name="sw*"), ["120"]),
    ],
)
def test_filters_select_what_meets_all_of_them(filters, jobs):
    assert [row["job"] for row in find_rows(ROWS, (), filters, lambda: "ben")] == jobs


@pytest.mark.parametrize(
    ("text", "words"), [("3,5", ["3", "5"]), ("prep, 12[4,7] ", ["prep", "12[4,7]"]), ("a[1,2", ["a[1,2"])]
)
def test_commas_in_brackets_do_not_divide(text, words):
    assert split_words(text, "--after") == words


@pytest.mark.parametrize("text", ["", " ", "3,,", ", ,5"])
def test_an_empty_list_of_jobs_is_refused(text):
    if text == "3,,":
        assert split_words(text, "--after") == ["3"]
    else:
        with pytest.raises(InputError, match="--after"):
            split_words(text, "--after")


# ---- from outside ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sweep(service):
    """A running job and an array of twelve that wait for it, all of the administrator."""
    base = json.loads(service.call("submit", "--json", "--name", "prep", "--", "sleep", 600).out)["job"]
    said = service.call("submit", "--json", "--name", "sweep", "--array", "0-11", "--after", "prep", "--", "true")
    assert said.code == 0, said.err
    jobs = json.loads(said.out)["jobs"]
    assert service.client().get(f"/v1/jobs/{jobs[0]}")["spec"]["after"] == [base]
    assert f"after 1 job: {base}\n" in said.err
    return jobs


def held(service):
    return [row["job"] for row in service.client().jobs() if row["held"]]


def test_a_part_of_an_array_is_held_and_released(service, sweep):
    said = service.call("hold", f"{sweep[0]}[3-5]")
    assert said.code == 0
    assert held(service) == sweep[3:6]
    assert "3 jobs" in said.err
    assert service.call("release", "sweep[4]", "sweep[*]", "--status", "held").code == 0
    assert held(service) == []


def test_more_than_ten_jobs_need_a_yes(service, sweep):
    said = service.call("hold", "sweep*")
    assert said.code == 2
    assert "12 jobs" in said.err
    assert "--yes" in said.err
    assert held(service) == []
    assert service.call("hold", "sweep*", "--yes").code == 0
    assert held(service) == sweep
    said = service.call("release", "--name", "sweep*", "--status", "held", "--yes", "--json")
    assert [row["job"] for row in json.loads(said.out)] == sweep


def test_a_terminal_is_asked(service, sweep):
    """The answer `n` changes nothing, and the question says how many jobs it is about."""
    ours, theirs = pty.openpty()
    asked = subprocess.Popen(
        [*COMMAND, "hold", f"{sweep[0]}-{sweep[-1]}"],
        env=environment(CARPOOL_HOME=str(service.home)),
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    os.write(ours, b"n\n")
    text, _ = asked.communicate(timeout=60)
    os.close(ours)
    os.close(theirs)
    assert asked.returncode == 2
    assert b"changes 12 jobs" in text
    assert b"error: nothing was changed" in text
    assert held(service) == []


def test_priority_takes_filters_and_one_id_answers_for_itself(service, sweep):
    said = service.call("priority", "--name", "sweep?[01]*", "--status", "pending", 7, "--json")
    assert said.code == 0, said.err
    assert {row["priority"] for row in service.client().jobs() if row["job"] in sweep[:2]} == {7}
    assert json.loads(service.call("priority", sweep[0], 1, "--json").out)["job"] == sweep[0]


def test_names_and_filters_reach_only_jobs_that_the_user_may_change(service, sweep, alice):
    said = service.call("cancel", "sweep*", "--yes", token=alice)
    assert said.code == 2
    assert "no job of yours" in said.err
    assert service.call("cancel", "--status", "pending", "--yes", token=alice).code == 2
    said = service.call("cancel", sweep[0], token=alice)
    assert "belongs to admin" in said.err


def test_nothing_is_changed_without_a_job_or_a_filter(service, sweep):
    said = service.call("cancel")
    assert said.code == 2
    assert "no jobs" in said.err
    assert "such status" in service.call("cancel", "--status", "pendin").err
    assert len(service.json("jobs", "sweep*")) == 12


def test_jobs_are_sorted_and_shown_in_chosen_columns(service, sweep):
    said = service.call("jobs", "sweep*", "--sort", "-job", "--format", "job,array_index,status")
    lines = [line.split() for line in said.out.splitlines() if line.strip()]
    assert lines[0] == ["job", "array_index", "status"]
    assert [line[0] for line in lines[2:14]] == [str(job) for job in sorted(map(int, sweep), reverse=True)]
    rows = service.json("jobs", "--name", "sweep*", "--format", "job,priority", "--sort", "job")
    assert set(rows[0]) == {"job", "priority"}
    assert "such column" in service.call("jobs", "--format", "job,statsu").err
    assert "such column" in service.call("jobs", "--sort", "wait").err
    titled = service.call("jobs", "sweep*", "--format", "job,why,waited", "--sort", "-waited")
    assert titled.out.split()[:3] == ["job", "why", "waited"]


def test_jobs_are_sorted_by_names_that_look_like_numbers():
    rows = [{"job": str(n), "name": name} for n, name in enumerate(("²", "b", "10", "9" * 5000, "9"))]
    assert [row["job"] for row in sort(rows, "name")] == ["4", "2", "3", "1", "0"]


def test_after_takes_the_latest_job_of_that_name_if_all_have_ended(service):
    for _ in range(2):
        job = json.loads(service.call("submit", "--json", "--name", "short", "--", "true").out)["job"]
        service.until(job, "finished")
    said = service.call("submit", "--json", "--after", "short", "--", "true")
    assert said.code == 0
    service.until(json.loads(said.out)["job"], "finished")
    assert service.call("submit", "--after", "no-such-name", "--", "true").code == 2


def test_a_sweep_is_an_array_with_its_values_in_commands_and_names(service):
    sweep = ("--sweep", "lr=0.1,0.01", "--sweep", "seed=1-2")
    said = service.call("submit", "--json", "--name", "grid", *sweep, "--", "echo", "{lr}/{seed}")
    jobs = json.loads(said.out)["jobs"]
    for job in jobs:
        service.until(job, "finished")
    assert [service.call("logs", job).out.strip() for job in jobs] == ["0.1/1", "0.1/2", "0.01/1", "0.01/2"]
    rows = service.json("jobs", "--all", "grid[*]", "--sort", "job")
    assert [row["name"] for row in rows][:2] == ["grid[lr=0.1,seed=1]", "grid[lr=0.1,seed=2]"]
    said = service.call("submit", "--sweep", "lr=1", "--", "echo", "lr")
    assert said.code == 2
    assert "{lr}" in said.err
