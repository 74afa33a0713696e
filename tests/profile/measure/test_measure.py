"""`carpool profile` from end to end: processes that are really started, paused and timed, with times that are known."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from carpool import channel
from carpool.commands import profile as commands
from carpool.gpu import mps, nvml
from carpool.profile.measure import pool, raw, session, timing, worker
from carpool.profile.measure.raw import MeasuredMachine, RawFile, Setting, read
from carpool.profile.schema import load
from tests.support import SUPPORT
from tests.support.command_line import COMMAND, call, environment

pytestmark = pytest.mark.slow

FAKE = str(SUPPORT / "fake_training.py")
QUICK = ("--cpu", "--window", "0.4,0.6", "--precision", "5")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "crowd").mkdir()


def profile(*arguments):
    return call("profile", *QUICK, *arguments)


def training(*more):
    return ("--", sys.executable, FAKE, "--crowd", "crowd", *more)


@pytest.mark.alone
def test_times_and_slow_downs_are_what_they_are():
    said = profile("--task", "mine", "--batch", "8,32", "--batch-option", "--batch-size", "--repeats", "1", *training())
    assert said.code == 0, said.err
    found = load("mine.json")
    task = found.tasks["mine"]
    assert task.core().compute(8) == pytest.approx(0.012, rel=0.15)
    assert task.core().compute(32) == pytest.approx(0.036, rel=0.15)
    assert [(pair.batch_a, pair.batch_b) for pair in found.pairs] == [(8, 8), (32, 32), (8, 32)]
    for pair in found.pairs:
        assert pair.a == pair.b == "mine"
        assert pair.runs == 2
        for xi, (low, high) in ((pair.xi_a, pair.interval_a), (pair.xi_b, pair.interval_b)):
            assert xi == pytest.approx(1.5, rel=0.15)
            assert low <= xi <= high
    assert {sample.setting.accumulation for done in found.raw for sample in done.samples} == {1, 2, 4}
    assert found.gpu.name == "CPU"
    assert "ξ, row slowed down by column, time-slicing" in said.out


def test_the_same_call_goes_on_where_the_budget_ended():
    arguments = ("--task", "mine", "--repeats", "0", "--accumulation", "2")
    first = profile("--minutes", "0.00001", *arguments, *training())
    assert first.code == 2
    assert "mine: no report within 0 s; does the script use carpool.train? If so, give more --minutes" in first.err
    assert profile("--solo", *arguments, *training()).code == 0
    lines = Path("mine.raw.jsonl").read_text().splitlines()
    assert len(lines) == 1 + 1 + 2, "where, what was run, and both measurements"
    assert profile(*arguments, *training()).code == 0
    assert Path("mine.raw.jsonl").read_text().splitlines()[:4] == lines, "what was measured is not measured again"
    written = Path("mine.json").read_text()
    again = call("profile", "--minutes", "0", "--name", "mine", "--json")
    assert again.out == written, "a fit of the same measurements is the same"
    assert json.loads(written)["tasks"]["mine"]["busy"]


@pytest.mark.parametrize(("held", "told"), [(True, "holds here"), (False, "does NOT hold here")])
def test_whether_the_memory_limit_holds_is_known_to_later_calls(held, told):
    arguments = ("--task", "mine", "--solo", "--repeats", "0", "--accumulation", "2", *training())
    assert profile(*arguments).code == 0
    assert load("mine.json").notes[0].startswith("Iteration times")
    RawFile("mine.raw.jsonl", read("mine.raw.jsonl").machine).keep_memory_limit(held)
    for again in (lambda: call("profile", "--minutes", "0", "--name", "mine"), lambda: profile(*arguments)):
        assert again().code == 0
        assert load("mine.json").notes[0].startswith(f"MPS: the memory limit of a client {told}")


def test_the_memory_limit_is_tried_once(monkeypatch, tmp_path):
    tried = []

    @contextmanager
    def daemon(folder, uuids):
        yield SimpleNamespace(check=lambda uuid: tried.append(uuid) or SimpleNamespace(limited=True))

    monkeypatch.setattr(session.mps, "Daemon", daemon)
    monkeypatch.setattr(session.Pool, "warm", lambda self, copies: {})
    raw = RawFile("raw.jsonl", MeasuredMachine("NVIDIA Test", None, None, "today", "test"))
    gpu = session.MeasuredGpu(nvml.Device(0, "GPU-1", "NVIDIA Test", 1, "1"))
    for _ in range(2):
        session.Session([], raw, gpu, tmp_path)._phase(session.MeasurementPhase("mps", ()), tmp_path / "phase")
    assert tried == ["GPU-1"]
    assert read("raw.jsonl").memory_limit is True


def test_a_budget_too_short_for_a_fit_says_that_the_same_call_goes_on(monkeypatch):
    arguments = ("--task", "mine", "--solo", "--repeats", "0", "--accumulation", "", *training())
    said = profile(*arguments)
    assert said.code == 2
    assert said.err.strip().endswith("rows of one batch size only; eq. 3 needs at least two")
    monkeypatch.setattr(commands, "_measure", lambda *measuring, **more: session.SessionResult(left=5))
    said = profile(*arguments)
    assert said.code == 2
    assert "; 1 measurements are kept in mine.raw.jsonl, and the same call resumes with 5 more" in said.err


def test_another_script_of_the_same_name_is_not_taken_for_the_first(tmp_path):
    for folder, text in (("a", "1"), ("b", "2")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "train.py").write_text(f"{Path(FAKE).read_text()}# {text}\n")
    quick = ("--solo", "--repeats", "0", "--accumulation", "2", "--", sys.executable)
    assert profile(*quick, "a/train.py").code == 0
    lines = Path("train.raw.jsonl").read_text()
    said = profile(*quick, "b/train.py")
    assert said.code == 2
    assert "train.raw.jsonl: train was measured there as" in said.err
    assert "give another --name or --state, or remove the file" in said.err
    assert Path("train.raw.jsonl").read_text() == lines


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("crash", "fake_training at batch 8: the script failed with status 1: ValueError: the data set is not there"),
        ("silent", "the script ended without a step that Carpool could see; does it use carpool.train?"),
        ("short", "the training ended after 6 iterations, too early; let it run longer"),
        ("memory", "fake_training at batch 8: does not fit on this GPU; give a smaller batch"),
    ],
)
def test_a_script_that_cannot_be_measured_is_one_clear_line(how, message):
    said = profile("--batch", "8", "--batch-option", "--batch-size", "--solo", *training("--fail", how))
    assert said.code == 2
    assert message in said.err
    assert "Traceback" not in said.err


def test_groups_that_cannot_be_measured_are_not_left_out_without_a_word():
    quick = ("--task", "mine", "--solo", "--repeats", "0", "--accumulation", "2", *training())
    said = profile("--groups", "1", *quick)
    assert said.code == 0, said.err
    assert "without groups: they are measured under MPS only" in said.err
    assert "without groups" not in profile(*quick).err


def test_a_batch_that_did_not_run_is_not_recorded():
    batches = ("--batch", "8,32", "--batch-option", "--batch-size", "--solo", "--repeats", "0", "--accumulation", "2")
    said = profile("--task", "deaf", *batches, *training("--runs-at", "8"))
    assert said.code == 0
    assert "deaf at batch 32: ran at 8 instead; is --batch-size what its batch depends on" in said.err
    assert batches_in("deaf") == {8}


def test_the_last_batch_of_an_epoch_may_be_smaller(tmp_path):
    training = worker.Worker("mine", ["sleep", "60"], tmp_path, {})
    writer = channel.ReportWriter(tmp_path)
    try:
        for iteration, samples in enumerate((0, 8, 8, 3)):
            writer.write(channel.Report(iteration=iteration, seconds=0.3, samples_per_second=samples / 0.3))
            training.report()
        assert training.batch == 8
    finally:
        training.end(time.monotonic())


def test_a_job_that_split_its_batch_for_lack_of_memory_is_measured_when_others_make_room():
    """The training library splits and goes on; the times would be of another job."""
    batches = ("--batch", "8", "--batch-option", "--batch-size", "--alone", "mine:16,24")
    quick = ("--task", "mine", *batches, "--solo", "--repeats", "0", "--accumulation", "")
    said = profile(*quick, *training("--room", "1"))
    assert said.code == 0, said.err
    assert "left out" not in said.err
    assert batches_in("mine") == {8, 16, 24}


def test_more_batches_alone_need_a_way_to_ask_for_them():
    said = profile("--task", "mine", "--alone", "mine:64", *training())
    assert said.code == 2
    assert "--alone mine:64: say with --batch-option how COMMAND takes the batch" in said.err
    few = ("--solo", "--repeats", "0", "--accumulation", "2", "--batch-option", "--batch-size")
    assert profile("--task", "mine", "--alone", "mine:16", *few, *training()).code == 0
    assert batches_in("mine") == {8, 16}
    assert load("mine.json").tasks["mine"].core().compute(16) == pytest.approx(0.020, rel=0.4)


@pytest.mark.parametrize("told", [("--batch", "8", "--batch-option", "--batch-size"), ()])
def test_a_script_without_the_library_is_named_when_the_budget_ends(told, monkeypatch):
    monkeypatch.setattr(pool, "STOP_S", 180.0)  # as long as START_S, so that a slow machine shows neither
    began = time.monotonic()
    said = profile("--minutes", "0.02", "--solo", *told, *training("--fail", "mute"))
    assert said.code == 2
    assert re.search(r"no report within \d s; does the script use carpool.train\? If so, give more --minutes", said.err)
    assert time.monotonic() - began < 60, "neither the usual start-up nor the grace of a script that listens"


def test_one_refused_accumulation_costs_itself_alone():
    told = ("--batch", "8", "--batch-option", "--batch-size", "--repeats", "1")
    said = profile("--task", "mine", *told, *training("--refuse", "2"))
    assert said.code == 0, said.err
    assert "accumulation 1 instead of 2; its batch cannot be split that way" in said.err
    found = load("mine.json")
    assert [pair.runs for pair in found.pairs] == [2]
    assert {sample.setting.accumulation for done in found.raw for sample in done.samples} == {1, 4}


def test_a_script_with_its_own_accumulation_is_told_to_leave_it_out():
    said = profile("--task", "mine", "--solo", *training("--own-accumulation", "2"))
    assert said.code == 2
    assert "accumulation 2 instead of 1; run it without its own accumulation" in said.err


@pytest.mark.parametrize(("number", "code", "word"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated")])
def test_a_stopped_profile_says_how_many_measurements_it_keeps(number, code, word):
    with running() as process:
        until(lambda: measurements_in("mine") >= 1)
        process.send_signal(getattr(signal, number))
        _, said = process.communicate(timeout=60)
    assert process.returncode == code
    kept = measurements_in("mine")
    assert f"{word}; no profile was written; {kept} measurements are kept in mine.raw.jsonl" in said
    assert "nothing" not in said
    assert not left_over()


def test_an_interrupt_while_a_measurement_is_written_counts_that_measurement(monkeypatch):
    """On a slow disk a measurement can be read before the write returns."""

    def interrupt(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(raw.os, "fsync", interrupt)
    said = profile("--task", "mine", "--solo", *training())
    assert said.code == 130
    assert "interrupted; no profile was written; 1 measurements are kept in mine.raw.jsonl" in said.err
    assert not left_over()


def test_a_killed_profile_leaves_no_paused_process():
    with running("--child") as process:
        until(lambda: measurements_in("mine") >= 1)
        group = left_over()
        assert len(group) == 4, "two of the training, one of them paused now and then, and a child of each"
        process.kill()
    until(lambda: not left_over())


@contextmanager
def running(*more):
    options = ("--task", "mine", "--batch", "8", "--batch-option", "--batch-size")
    command = [*COMMAND, "profile", *QUICK, *options, *training(*more)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment()) as process:
        yield process


def measurements_in(name):
    raw = Path(f"{name}.raw.jsonl")
    return raw.read_text().count('"mechanism"') if raw.exists() else 0


def until(true, seconds=60.0):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def left_over():
    """Processes that were started in this test's folder by a training, wherever they hang now."""
    import psutil

    here, found = os.getcwd(), []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            words = process.cmdline()
            if process.cwd() == here and ((FAKE in words and "profile" not in words) or words[:1] == ["sleep"]):
                found.append(process.pid)
    return found


def batches_in(name):
    return {sample.setting.batch for done in load(f"{name}.json").raw for sample in done.samples}


def test_a_task_that_fails_costs_itself_alone(monkeypatch):
    from carpool.profile.measure.plan import Scope, TaskSource, plan
    from carpool.profile.measure.session import MeasuredGpu, Session

    good = TaskSource("good", (sys.executable, FAKE), "--batch-size", (8,))
    bad = TaskSource("bad", (sys.executable, FAKE, "--fail", "crash"), "--batch-size", (8,))
    raw = RawFile("raw.jsonl", MeasuredMachine("CPU", None, None, "today", "test"))
    windows = timing.Windows(least_s=0.1, most_s=0.2)
    scope = Scope(("time-slicing",), accumulations=(), repeats=0)
    outcome = Session([good, bad], raw, MeasuredGpu(None), Path("work"), windows).run(plan([good, bad], scope))
    assert [len(done.samples) for done in raw.measurements] == [1, 2]
    assert {sample.setting.task for done in raw.measurements for sample in done.samples} == {"good"}
    assert outcome.done == 2
    assert outcome.left == 0
    assert "the data set is not there" in outcome.problems[0]


def test_nothing_is_left_running(tmp_path):
    import psutil

    profile("--solo", *training())
    children = [child for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]
    assert not [child for child in children if FAKE in " ".join(child.cmdline())]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--cpu",), "nothing to measure; give -- and a training command, or --example bert"),
        ((), "no GPU was found"),
        (("--cpu", "--example", "bart"), "example 'bart': unknown; did you mean bert?"),
        (("--cpu", "--example", "bert:x"), "bert:x: batches are whole numbers of at least 1"),
        (("--cpu", "--example", "bert", "--example", "bert"), "bert: given twice; list its batches together"),
        (("--cpu", "--examples", "nowhere", "--example", "bert"), "nowhere: no example scripts found"),
        (("--cpu", "--batch", "8", "--", "x"), "--batch: say with --batch-option"),
        (("--cpu", "--window", "3,1", "--", "x"), "--window 3,1: give the shortest and the longest"),
        (("--cpu", "--mechanism", "mps", "--", "x"), "--mechanism mps: there is no GPU"),
        (("--cpu", "--", "no-such-program"), "no-such-program: cannot be run (No such file or directory)"),
        (("--cpu", "--minutes", "nan", "--", "x"), "--minutes nan: give a finite number"),
        (("--cpu", "--precision", "nan", "--", "x"), "--precision nan: give a finite number"),
        (("--cpu", "--batch-norm", "y", "--", "x"), "--batch-norm y: not among the tasks that are measured; known: x"),
        (("--cpu", "--task", "ncf", "--with", "ncf", "--", "x"), "--with ncf: COMMAND's task has that name"),
        (("--minutes", "0"), "--minutes 0 only fits what was measured before"),
        (("--minutes", "0", "--name", "none"), "none.raw.jsonl: cannot be read as measurements"),
    ],
)
def test_wrong_input_is_one_line_that_says_what_to_do(arguments, message, monkeypatch):
    monkeypatch.setattr(commands.nvml, "devices", list)
    said = call("profile", *arguments)
    assert said.code == 2
    assert message in said.err
    assert "Traceback" not in said.err


# ---- what only a GPU has --------------------------------------------------------------------------------------------

DEVICE = nvml.Device(0, "GPU-1", "NVIDIA Test", 10**10, "1.0")


def test_a_client_outside_mps_is_an_error_and_without_mps_no_worker_finds_a_daemon(tmp_path, monkeypatch):
    daemon, trained = mps.Daemon(tmp_path / "mps"), SimpleNamespace(pid=7, name="mine")
    beside, apart = (session.MechanismEnvironment(session.MeasuredGpu(DEVICE), one) for one in (daemon, None))
    monkeypatch.setattr(mps.Daemon, "verify", lambda self, pid: pid == 8)
    with pytest.raises(worker.WorkerError, match="mine: runs outside MPS although the daemon is up"):
        beside.accept(trained)
    beside.accept(SimpleNamespace(pid=8, name="mine"))
    apart.accept(trained)
    assert beside.env() == {"CUDA_VISIBLE_DEVICES": "GPU-1", **daemon.env()}
    assert apart.env() == {"CUDA_VISIBLE_DEVICES": "GPU-1", "CUDA_MPS_PIPE_DIRECTORY": "/nonexistent"}
    assert session.MechanismEnvironment(session.MeasuredGpu(None), None).env() == {}


def test_a_worker_that_its_ground_does_not_accept_is_not_lent(tmp_path):
    def refuse(worker_):
        raise worker.WorkerError(f"{worker_.name}: outside")

    ground = SimpleNamespace(env=dict, accept=refuse)
    with (
        pool.Pool(tmp_path, lambda setting: (sys.executable, FAKE), ground) as trained,
        pytest.raises(worker.WorkerError, match="mine at batch 8: outside"),
    ):
        trained.lend([Setting("mine", 8)])


def test_no_more_processes_are_kept_than_asked_for(tmp_path):
    """Whoever was lent longest ago goes first; those that run together are all there, however many."""
    started = []

    def command(setting):
        started.append(setting.batch)
        return (sys.executable, FAKE, "--batch-size", str(setting.batch))

    ground = SimpleNamespace(env=dict, accept=lambda worker_: None)
    one, two, three = (Setting("mine", batch) for batch in (8, 16, 32))
    with pool.Pool(tmp_path, command, ground, at_once=2) as kept:
        assert kept.warm({one: 1, two: 1, three: 1}) == {}
        assert started == [8, 16]
        for request in ([one], [two], [one], [three], [one], [two, three, one]):
            lent = kept.lend(request)
            assert [worker_.batch for worker_ in lent] == [setting.batch for setting in request]
            assert len(kept._workers) == max(2, len(request))
        assert started == [8, 16, 32, 16]
        kept.lend([two])
        assert len(kept._workers) == 2


def test_measured_with_few_processes_at_a_time_it_is_the_same():
    batches = ("--task", "mine", "--batch", "8,32", "--batch-option", "--batch-size")
    few = ("--at-once", "1", "--repeats", "0", "--accumulation", "", "--no-across")
    said = profile(*few, *batches, *training())
    assert said.code == 0, said.err
    assert "starting 1 process," in said.err
    found = load("mine.json")
    assert len(found.pairs) == 2
    assert found.tasks["mine"].core().compute(32) == pytest.approx(0.036, rel=0.2)


@pytest.mark.parametrize(("held", "context"), [(900, 400), (500, None), (None, None)])
def test_a_context_is_what_the_driver_says_less_what_the_allocator_holds(monkeypatch, held, context):
    monkeypatch.setattr(session.nvml, "memory_of", lambda uuid, pid: held if (uuid, pid) == ("GPU-1", 7) else -1)
    told = channel.Report(iteration=9, accumulation=1, peak_memory=300, reserved_memory=500)
    trained = SimpleNamespace(pid=7, name="mine", batch=8, report=lambda: told)
    measuring = session.Session([], None, session.MeasuredGpu(DEVICE), Path())
    sample = measuring._sample(trained, Setting("mine", 8), timing.Timing(0.1, 0.01, 9, 1.0))
    assert (sample.peak_bytes, sample.context_bytes) == (300, context)


def test_a_gpu_on_which_others_compute_is_refused(monkeypatch):
    monkeypatch.setattr(commands.nvml, "devices", lambda: [DEVICE])
    monkeypatch.setattr(commands.nvml, "processes", lambda uuid: [nvml.Use(7, None, False)] * (uuid == "GPU-1"))
    said = call("profile", "--mechanism", "time-slicing", *training())
    assert said.code == 2
    assert "1 other processes use NVIDIA Test; times would not hold, so free it first" in said.err
    assert not list(Path().glob("*.raw.jsonl"))


def test_a_real_training_of_an_example(monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    said = profile("--example", "ncf:64", "--solo", "--accumulation", "2", "--repeats", "0", "--json")
    assert said.code == 0, said.err
    points = json.loads(said.out)["raw"]
    assert [job["batch"] for point in points for job in point["jobs"]] == [64, 64]
    assert [job.get("accumulation", 1) for point in points for job in point["jobs"]] == [1, 2]


def test_more_batches_of_an_example_are_asked_for_with_its_own_option():
    """The example's own batch is not told and must be asked, which must not lose the way to ask for another."""
    told = commands.profile.make_context("profile", ["--cpu", "--example", "ncf", "--alone", "ncf:64"]).params
    del told["as_json"]
    (source,) = commands.ProfileOptions(**told).sources(commands.MeasuredGpu(None))
    fake = replace(source, command=(sys.executable, FAKE))
    found = commands._with_batches(fake, commands.MeasuredGpu(None), Path("work"))
    assert found.batches == (8,)
    assert found.start(64)[-2:] == ("--batch-size", "64")
