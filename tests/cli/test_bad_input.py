"""Wrong input ends in one line, exit code 2 and nothing written; interrupted commands leave nothing behind."""

import os
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.command_line import COMMAND, HEADER, call, csv_file, environment, everything_in, process
from tests.support.effort import thorough_only

DURATION = HEADER + ",duration_s"


def refused(said, *parts: str) -> None:
    """One line on standard error, nothing on standard output."""
    assert said.code == 2, said
    assert said.out == ""
    assert said.err.startswith("error: "), said.err
    assert said.err.count("\n") == 1, said.err
    assert "Traceback" not in said.err
    for part in parts:
        assert part in said.err, said.err


# ---- through the real command --------------------------------------------------------------------------------------


def test_the_real_command_refuses_as_it_does_in_this_process(tmp_path):
    """One of each kind: a file, a name, and an option that Click refuses."""
    path = csv_file(tmp_path, "a,-1,bert,1,8,9")
    for arguments in (
        ("simulate", "--workload", path, "--out", tmp_path / "deep" / "out", "--json"),
        ("simulate", "--policy", "sjf-bsfb"),
        ("simulate", "--jobs", "0"),
    ):
        said = process(*arguments, cwd=tmp_path)
        refused(said)
        assert replace(said, err=said.err.replace("python -m carpool.cli", "carpool")) == call(*arguments)
        assert everything_in(tmp_path) == {"jobs.csv"}


# ---- the rest in this process, which is quicker --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", (":1: is empty; expected a header",)),
        (HEADER + "\n", (": no jobs after the header",)),
        (HEADER + "\na,0,bert,1\n", (":2: has 4 fields, the header has 6",)),
        (HEADER + "\na,-1,bert,1,8,9\n", (":2: submitted_s: '-1' must be a number from 0",)),
        (HEADER + "\na,0,bert,1,8,nan\n", (":2: iterations: 'nan' must be a whole number from 1",)),
        (HEADER + "\na,0,bret,1,8,9\n", (":2: model: 'bret' is not in profile t4: did you mean bert?",)),
        (HEADER + "\na,0,generic,1,8,9\n", (":2: duration_s: a job of model generic needs one",)),
        (HEADER + "\nx,0,ncf,1,8,9\nbig,0,bert,65,8,9\n", (":3: ", "asks for 65 GPUs and the cluster has 64")),
        (HEADER + "\na,0,bert,1,8,9\na,0,bert,1,8,9\n", (":3: job 'a' is already in line 2",)),
        (HEADER + "\na,0,bert,1,8," + "9" * 400 + "\n", (":2: iterations: ", "must be a whole number")),
        (HEADER + "\na,1e300,bert,1,8,9\n", (":2: submitted_s: '1e300' must be",)),
        (HEADER + ",after\na,0,ncf,1,8,9,b\nb,0,ncf,1,8,9,a\n", ("after: jobs wait for each other in a circle",)),
        (HEADER + ",after\na,0,ncf,1,8,9,zz\n", (":2: after: there is no job 'zz' to wait for",)),
        ("0,ncf,1,8,9\n", (":1: header lacks job, submitted_s, model, gpus, batch, iterations; expected",)),
    ],
)
def test_a_wrong_workload_is_refused(tmp_path, text, parts):
    path = tmp_path / "jobs.csv"
    path.write_text(text)
    said = call("simulate", "--workload", path, "--out", tmp_path / "deep" / "out", "--json")
    refused(said, *(f"{path}{part}" if part.startswith(":") else part for part in parts))
    assert everything_in(tmp_path) == {"jobs.csv"}, "nothing is left behind"


def test_a_job_that_fits_no_gpu_even_at_sub_batch_1(tmp_path):
    path = csv_file(tmp_path, "a,0,ncf,1,8,9", "b,0,bert,1,8,9")
    said = call("simulate", "--workload", path, "--gpu-memory", "900MiB")
    refused(said, f"{path}:", "GiB per GPU even at sub-batch 1; the largest GPUs have 0.9 GiB")
    path = csv_file(tmp_path, "a,0,bert,1,9000,9,false", header=HEADER + ",can_shrink")
    refused(call("simulate", "--workload", path), f"{path}:2: ", "at batch 9000, which may not be split")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("simulate", "--policy", "sjf-bsfb"), ("unknown policy 'sjf-bsfb': did you mean sjf-bsbf?",)),
        (("simulate", "--policy", "sjf:skpi=true"), ("unknown option 'skpi' of policy sjf: did you mean skip?",)),
        (("simulate", "--profile", "t5"), ("t5: no such profile (did you mean t4?)",)),
        (("simulate", "--interference", "gavle"), ("interference 'gavle'", "did you mean gavel?")),
        (("simulate", "--workload", "nowhere.csv"), ("nowhere.csv: no such workload file",)),
        (("simulate", "--workload", "philly-liek"), ("unknown workload 'philly-liek'", "did you mean philly-like?")),
        (("simulate", "--workload", "."), (".: cannot be read: Is a directory",)),
        (("simulate", "--cluster", "0x4"), ("--cluster '0x4': needs at least one node and one GPU",)),
        (("compare", "--seeds", "8-1"), ("--seeds '8-1': the range 8-1 is empty; write 1-8",)),
        (("simulate", "--cluster", "16-4"), ("--cluster '16-4': write nodes x GPUs per node",)),
        (("workload", "show", "nowhere.csv"), ("nowhere.csv: no such workload file",)),
        (("workload", "convert", "nowhere.csv", "--out", "x.csv"), ("nowhere.csv: no such workload file",)),
        (("profiles", "show", "t5"), ("t5: no such profile (did you mean t4?)",)),
        (("profiles", "merge", "h200", "h201", "--out", "x.json"), ("h201: no such profile (did you mean h200?)",)),
        (("profiles", "merge", "h200", "h200", "--out", "x.json"), ("h200: contains the same measurements as h200",)),
    ],
)
def test_a_wrong_name_is_refused_with_the_nearest_one(tmp_path, monkeypatch, arguments, parts):
    monkeypatch.chdir(tmp_path)
    refused(call(*arguments), *parts)
    assert everything_in(tmp_path) == set()


def test_a_binary_file_is_refused(tmp_path):
    path = tmp_path / "w.csv"
    path.write_bytes(os.urandom(5000) + b"\xff\xfe")
    refused(call("simulate", "--workload", path), "w.csv: is not a text file in UTF-8")


@pytest.mark.parametrize(
    "cluster",
    ["", "16", "x4", "16x", "0x4", "4x0", "-1x4", "1.5x4", "axb", "16x4x2", "9" * 5000 + "x1", "9x99999999"],
)
def test_wrong_clusters_are_refused(cluster):
    refused(call("simulate", f"--cluster={cluster}"), "write nodes x GPUs per node, for example 16x4")


@pytest.mark.parametrize("text", ["n", "n=", "=1", "n=1,n=2", "n=1-900,seed=1-900"])
def test_wrong_selections_are_refused(tmp_path, text):
    path = csv_file(tmp_path, "a,0,ncf,1,8,9")
    for command in ("simulate", "compare"):
        refused(call(command, "--workload", path, "--select", text), "--select")


def test_a_selection_that_matches_nothing_is_refused(tmp_path):
    path = csv_file(tmp_path, "1,a,0,ncf,1,8,9", header="seed," + HEADER)
    refused(call("simulate", "--workload", path, "--select", "sed=1"), ":1: no column 'sed'", "did you mean seed?")
    refused(call("simulate", "--workload", path, "--select", "seed=7"), "no jobs with seed=7; seed can be 1")
    refused(call("simulate", "--workload", path, "--select", "seed=1-2"), "names several workloads", "compare")
    refused(call("workload", "show", path, "--select", "seed=1-2"), "names several workloads")
    refused(call("simulate", "--select", "seed=1"), "--select chooses rows of a file")
    refused(call("compare", "--select", "seed=1"), "--select chooses rows of a file")
    refused(call("compare", "--workload", path, "--seeds", "1-8"), "--seeds belongs to the generator")
    refused(call("simulate", "--workload", path, "--jobs", 5), "--jobs belongs to the generator")


@pytest.mark.parametrize("seeds", ["", "a", "1.5", "-1", "1,,2", "1-5000", "1-²", "9" * 5000, "1-" + "9" * 5000])
def test_wrong_seeds_are_refused(seeds):
    said = call("compare", f"--seeds={seeds}") if seeds else call("compare", "--seeds=,")
    refused(said, "--seeds", "write whole numbers such as 1-8")


@pytest.mark.parametrize("loads", ["", "a", "0", "-1", "nan", "inf", "1e-300", "1e300", "1,,2"])
def test_wrong_loads_are_refused(loads):
    refused(call("compare", f"--loads={loads}"), "--loads", "write numbers from 1e-06 to 1e+06")


@pytest.mark.parametrize("memory", ["", "24", "GiB", "-1GiB", "0GiB", "infGiB", "1e9GiB", "24XiB", "9" * 400 + "GB"])
def test_wrong_memory_sizes_are_refused(memory):
    refused(call("simulate", f"--gpu-memory={memory}"), "--gpu-memory", "with its unit, such as 24GiB")


@pytest.mark.parametrize("option", ["--interference", "--truth", "--belief"])
@pytest.mark.parametrize("xi", ["0.5", "-1", "nan", "inf", "0", "1e300", "nowhere.csv", "nowhere.json", "t4"])
def test_wrong_slow_downs_are_refused(option, xi):
    refused(call("simulate", "--jobs", 3, f"{option}={xi}"))


@pytest.mark.parametrize("xi", ["0", "-2", "nan", "inf", "1e300", "x", ""])
def test_wrong_cells_of_a_matrix_are_refused(tmp_path, xi):
    path = csv_file(tmp_path, f"ncf,{xi}", header=",ncf", name="xi.csv")
    jobs = csv_file(tmp_path, "a,0,ncf,1,8,9")
    refused(call("simulate", "--workload", jobs, "--interference", path))


def test_a_matrix_that_lacks_a_model_or_a_pair_is_refused(tmp_path):
    jobs = csv_file(tmp_path, "a,0,ncf,1,8,9", "b,0,bert,1,8,9")
    path = csv_file(tmp_path, "ncf,1.5", header=",ncf", name="xi.csv")
    said = call("simulate", "--workload", jobs, "--interference", path)
    refused(said, f"{jobs}:3: model: interference {path} has no entry for 'bert'; it has ncf; add the pair")
    assert call("simulate", "--workload", jobs, "--interference", path, "--jobs-per-gpu", 1).code == 0, "nobody shares"
    profile = tmp_path / "some.json"
    profile.write_text(
        '{"schema": 1, "name": "some", "description": "two pairs of three", "pairs": ['
        '{"a": "ncf", "b": "bert", "mechanism": "mps", "xi_a": 1.2, "xi_b": 1.3},'
        '{"a": "ncf", "b": "ncf", "mechanism": "mps", "xi_a": 1.2, "xi_b": 1.2}]}'
    )
    said = call("simulate", "--workload", jobs, "--interference", profile)
    refused(said, f"{jobs}:3: model: ", "has no entry for 'bert' beside 'bert'")


@pytest.mark.parametrize("option", ["--launch-s", "--stop-s", "--duration-error", "--load"])
@pytest.mark.parametrize("value", ["-1", "nan", "inf", "1e300", "x", ""])
def test_wrong_numbers_are_refused(option, value):
    refused(call("simulate", f"{option}={value}"), f"error: {option}: ")


@pytest.mark.parametrize(
    "arguments",
    [
        ("simulate", "--jobs", "0"),
        ("simulate", "--jobs", "many"),
        ("simulate", "--jobs", "99999999999999"),
        ("simulate", "--seed", "1.5"),
        ("simulate", "--jobs-per-gpu", "0"),
        ("simulate", "--jobs-per-gpu", "99999999999999"),
        ("simulate", "--large-above", "-1"),
        ("simulate", "--load", "0"),
        ("compare", "--workers", "0"),
        ("workload", "generate", "--load", "nan"),
        ("workload", "generate", "--load", "1e-300"),
        ("workload", "generate", "--jobs", "-1"),
        ("workload", "show", "--gpus", "0"),
        ("simulate", "--no-such-option"),
        ("simulate", "surplus"),
        ("no-such-command",),
        ("workload", "no-such-command"),
    ],
)
def test_usage_errors_are_refused(arguments):
    refused(call(*arguments))


def test_usage_errors_name_the_place_and_the_remedy():
    refused(call("serve", "--gpus", "-2"), "error: --gpus: -2 must be from 1 to 4096; see `carpool serve --help`")
    refused(call("check", "--steps", "0", "x"), "error: --steps: 0 must be at least 1;")
    refused(call("simulate", "--jobs", "many"), "error: --jobs: 'many' is not a whole number;")
    refused(call("simulate", "--jobs", "0"), "error: --jobs: 0 must be from 1 to ")
    refused(call("workload", "shw"), "error: shw: there is no such command of `carpool workload`; did you mean show?")
    refused(call("compar"), "error: compar: there is no such command of `carpool`; did you mean compare?")


def test_an_unusable_profile_is_refused(tmp_path):
    refused(call("simulate", "--profile", tmp_path / "none.json"), "none.json: no such profile")
    refused(call("simulate", "--profile", "gavel"), "profile gavel lacks", "try t4")
    jobs = csv_file(tmp_path, "a,0,generic,1,8,9,5", header=DURATION)
    refused(call("simulate", "--profile", "gavel", "--workload", jobs), "how much memory", "--gpu-memory")
    (tmp_path / "bad.json").write_text("{")
    refused(call("simulate", "--profile", tmp_path / "bad.json"), "bad.json: line 1: not JSON")
    refused(call("workload", "show", "--profile", "t5"), "t5: no such profile")


# ---- places that cannot be written ---------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [("simulate", "--jobs", 3), ("compare", "--jobs", 3, "--seeds", 1, "--workers", 1)])
@pytest.mark.parametrize("place", ["file", "file/below", "file/below/deep"])
def test_a_folder_that_cannot_be_created_is_named(tmp_path, command, place):
    (tmp_path / "file").write_text("a regular file")
    refused(call(*command, "--out", tmp_path / place), f"{tmp_path / place}: cannot write there")
    assert (tmp_path / "file").read_text() == "a regular file"
    assert everything_in(tmp_path) == {"file"}


@pytest.mark.parametrize("place", ["file/below.csv", "none/below.csv", "folder"])
def test_a_workload_file_that_cannot_be_written_is_named(tmp_path, place):
    (tmp_path / "file").write_text("a regular file")
    (tmp_path / "folder").mkdir()
    refused(call("workload", "generate", "--out", tmp_path / place), f"{tmp_path / place}: cannot write there")
    assert everything_in(tmp_path) == {"file", "folder"}


def test_a_refused_run_leaves_an_earlier_result_unchanged(tmp_path):
    (tmp_path / "o").mkdir()
    (tmp_path / "o" / "summary.json").write_text("earlier")
    refused(call("simulate", "--workload", tmp_path / "none.csv", "--out", tmp_path / "o"))
    assert everything_in(tmp_path) == {"o", "o/summary.json"}
    assert (tmp_path / "o" / "summary.json").read_text() == "earlier"


@pytest.mark.slow
def test_an_error_in_a_worker_process_is_one_line(tmp_path):
    path = csv_file(tmp_path, "a,0,ncf,1,8,9", "big,5,ncf,99,8,9")
    said = process("compare", "--workload", path, "--workers", 2, "--out", tmp_path / "o")
    refused(said, f"{path}:3: gpus: job big asks for 99 GPUs")
    assert everything_in(tmp_path) == {"jobs.csv"}


# ---- interruptions -------------------------------------------------------------------------------------------------

LONG = {
    "compare": ("compare", "--jobs", "1000", "--loads", "3", "--seeds", "1-60", "--workers", "2"),
    "compare few": ("compare", "--jobs", "50000", "--seeds", "1-2", "--policy", "sjf-bsbf", "--cluster", "4x4"),
    "simulate": ("simulate", "--policy", "sjf-bsbf", "--jobs", "400000", "--cluster", "4x4"),
}


INTERRUPTS = [
    ("compare", 0.0, "process"),
    ("compare", 0.0, "group"),
    ("compare", 1.0, "group"),
    ("compare few", 1.5, "process"),
    ("simulate", 1.0, "process"),
    pytest.param("compare", 1.0, "process", marks=thorough_only),
    pytest.param("compare few", 1.5, "group", marks=thorough_only),
    pytest.param("simulate", 1.0, "group", marks=thorough_only),
]
"""A command, the seconds after which it is interrupted, and what gets the signal."""
PATIENCE_S = 30.0
"""Seconds in which a command must have ended, much less than a run takes."""


def processes_of(marker: str) -> list[int]:
    """Return the processes that have the marker in their environment: a command, its workers and their children."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if marker.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


@pytest.fixture
def start():
    """Start commands in their own process groups and kill what is left at the end of the test."""
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: str, **more: str) -> "subprocess.Popen[str]":
        pipe = subprocess.PIPE
        command = [*COMMAND, *arguments]
        running = subprocess.Popen(
            command, env=environment(**more), stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )
        started.append(running)
        return running

    yield begin
    for running in started:
        with suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.communicate()


def gone(marker: str) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while processes_of(marker) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not processes_of(marker)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="there is no /proc to look for workers in")
@pytest.mark.parametrize(("command", "wait_s", "whom"), INTERRUPTS)
def test_an_interrupt_leaves_nothing(tmp_path, start, command, wait_s, whom):
    """The signal goes to the command or to its whole group, as from a terminal, while workers start or later."""
    marker = f"CARPOOL_TEST_MARKER={tmp_path}"
    out_option = ("--out", str(tmp_path / "deep" / "out"))
    running = start(*LONG[command], *out_option, CARPOOL_TEST_MARKER=str(tmp_path), TMPDIR=str(tmp_path))
    deadline = time.monotonic() + 30
    while not (tmp_path / "deep" / "out").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    if "compare" in command:  # wait for workers
        while len(processes_of(marker)) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
    time.sleep(wait_s)
    assert running.poll() is None, "it must still run"
    (os.kill if whom == "process" else os.killpg)(running.pid, signal.SIGINT)
    out, err = running.communicate(timeout=PATIENCE_S)
    assert running.returncode == 130, err
    assert "Traceback" not in err
    assert err.strip().splitlines()[-1] == "interrupted; nothing was written"
    assert out == ""
    assert gone(marker), "a worker lives on"
    assert everything_in(tmp_path) == set()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="there is no /proc to look for workers in")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 143), (signal.SIGKILL, -9)])
def test_the_end_of_a_command_ends_its_workers(tmp_path, start, number, code):
    marker = f"CARPOOL_TEST_MARKER={tmp_path}"
    out_option = ("--out", str(tmp_path / "out"))
    running = start(*LONG["compare"], "--json", *out_option, CARPOOL_TEST_MARKER=str(tmp_path))
    deadline = time.monotonic() + 30
    while len(processes_of(marker)) < 4 and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.5)
    running.send_signal(number)
    _, err = running.communicate(timeout=PATIENCE_S)
    assert running.returncode == code, err
    assert "Traceback" not in err
    assert gone(marker), "a worker lives on"
    if code > 0:
        assert everything_in(tmp_path) == set()
