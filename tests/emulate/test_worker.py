"""Workers of emulated GPUs as real processes: how long they take alone, beside mates, and when they are stopped."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from carpool.channel import EXIT_STOPPED, Control, WorkerStatus, read_json, read_report, write_control
from carpool.core.model import Job
from carpool.core.perf import Placement
from carpool.emulate.gpus import parse_gpus
from carpool.errors import InputError
from tests.support.command_line import call

GPUS = parse_gpus("t4:2x2:100")
MODEL, BATCH = "yolov3", 8
START_S = 60.0


def alone_s(iterations: int, gpus: int = 1, nodes: int = 1) -> float:
    job = Job("1", 0.0, MODEL, gpus, BATCH, iterations)
    return iterations * GPUS.model().iteration_time(job, 1, Placement(gpus, nodes))


class Emulation:
    """A directory of emulated GPUs, and workers on them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.description = GPUS.write(folder / "emulated")
        self.started: list[Worker] = []

    def start(self, job: str, gpu: str = "node0:0", rank: int = 0, workers: int = 1, **more) -> "Worker":
        worker = Worker(self, job, gpu, rank, workers, **more)
        self.started.append(worker)
        return worker

    def left(self) -> list[str]:
        return [path.name for path in (self.folder / "emulated").rglob("*") if path.is_file()]

    def close(self) -> None:
        for worker in self.started:
            if worker.process.poll() is None:
                worker.process.kill()
            worker.process.communicate()


class Worker:
    """One worker, with the directories and variables that the executor would give it."""

    def __init__(self, emulation, job, gpu, rank, workers, *, iterations=1000, attempt=1, model=MODEL, batch=BATCH):
        self.directory = emulation.folder / f"{job}-{attempt}-{rank}"
        self.directory.mkdir()
        checkpoints = emulation.folder / f"checkpoints-{job}"
        checkpoints.mkdir(exist_ok=True)
        write_control(self.directory, Control(1))
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": str(workers),
            "CARPOOL_GPUS": gpu,
            "CARPOOL_JOB": job,
            "CARPOOL_ATTEMPT": str(attempt),
            "CARPOOL_WORKER_DIR": str(self.directory),
            "CARPOOL_CHECKPOINT_DIR": str(checkpoints),
            "CARPOOL_EMULATED": str(emulation.description),
        }
        words = ["--model", model, "--batch", str(batch), "--iterations", str(iterations)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "carpool.emulate", *words],
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    @property
    def report(self):
        return read_report(self.directory)

    def iterates(self) -> None:
        """Wait for the first iterations."""
        until = time.monotonic() + START_S
        while (report := self.report) is None or report.iteration == 0:
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < until
            time.sleep(0.01)

    def took(self, code: int = 0) -> float:
        """Wait for the end, and return the seconds from the first iteration on, as the worker says."""
        out, err = self.process.communicate(timeout=START_S)
        assert self.process.returncode == code, err
        return float(re.search(r"after ([0-9.]+) s", out)[1])


@pytest.fixture(scope="module")
def emulation(tmp_path_factory):
    found = Emulation(tmp_path_factory.mktemp("emulation"))
    yield found
    found.close()


def iterations_of(seconds: float) -> int:
    return round(seconds / alone_s(1))


@pytest.mark.alone
def test_one_worker_alone_takes_the_time_of_the_profile_and_leaves_nothing(emulation):
    iterations = iterations_of(1.2)
    worker = emulation.start("alone", "node0:1", iterations=iterations)
    assert worker.took() == pytest.approx(alone_s(iterations), rel=0.05)
    assert (worker.report.iteration, worker.report.status) == (iterations, WorkerStatus.DONE)
    assert worker.report.seconds == pytest.approx(alone_s(1))
    assert not [name for name in emulation.left() if name.startswith("alone-")]


@pytest.mark.alone
def test_a_mate_slows_a_worker_down_by_the_table_unless_it_is_paused_or_was_killed(emulation):
    iterations = iterations_of(1.2)
    mate = emulation.start("mate", model="bert", batch=12, iterations=10**9)
    mate.iterates()
    job, other = (Job(name, 0.0, name, 1, batch, 1) for name, batch in ((MODEL, BATCH), ("bert", 12)))
    xi = GPUS.model().slowdown(job, 1, [(other, 1)])
    assert xi > 1.2
    beside = emulation.start("beside", iterations=iterations).took()
    assert beside == pytest.approx(alone_s(iterations) * xi, rel=0.05)
    mate.process.send_signal(signal.SIGSTOP)
    assert emulation.start("paused", iterations=iterations).took() == pytest.approx(alone_s(iterations), rel=0.05)
    mate.process.kill()
    mate.process.wait()
    assert emulation.left() != ["gpus.json"], "a killed worker removes nothing itself"
    emulation.start("after", iterations=1).took()
    assert emulation.left() == ["gpus.json"]


@pytest.mark.alone
def test_a_pause_is_no_progress(emulation):
    iterations = iterations_of(1.0)
    worker = emulation.start("stopped", "node1:0", iterations=iterations)
    worker.iterates()
    worker.process.send_signal(signal.SIGSTOP)
    time.sleep(0.7)
    worker.process.send_signal(signal.SIGCONT)
    assert worker.took() == pytest.approx(alone_s(iterations) + 0.7, abs=0.15)


@pytest.mark.alone
def test_a_stopped_job_goes_on_from_what_it_saved(emulation):
    iterations = iterations_of(1.5)
    worker = emulation.start("saved", "node1:1", iterations=iterations)
    worker.iterates()
    write_control(worker.directory, Control(2, accumulation=2))
    while worker.report.accumulation != 2:
        time.sleep(0.01)
    write_control(worker.directory, Control(3, accumulation=2, stop=True))
    worker.took(EXIT_STOPPED)
    saved = worker.report.checkpoint
    assert 0 < saved == worker.report.iteration < iterations
    assert worker.report.status is WorkerStatus.STOPPED
    again = emulation.start("saved", "node1:1", iterations=iterations, attempt=2)
    assert again.took() == pytest.approx(alone_s(iterations - saved), rel=0.05)
    assert again.report.iteration == iterations
    assert read_json(emulation.folder / "checkpoints-saved" / "emulated.json") == {"iteration": saved}


@pytest.mark.alone
def test_a_gang_over_two_nodes_iterates_as_one_and_at_the_speed_of_its_slowest_gpu(emulation):
    iterations = round(1.0 / alone_s(1, 2, 2))
    mate = emulation.start("gangmate", "node1:1", model="bert", batch=12, iterations=10**9)
    mate.iterates()
    ranks = [emulation.start("gang", f"node{n}:1", n, 2, iterations=iterations) for n in range(2)]
    job, other = (Job(name, 0.0, name, 1, batch, 1) for name, batch in ((MODEL, BATCH), ("bert", 12)))
    slow = alone_s(iterations, 2, 2) * GPUS.model().slowdown(job, 1, [(other, 1)])
    assert ranks[0].took() == pytest.approx(slow, rel=0.08)
    assert ranks[1].process.wait(timeout=10) == 0
    assert [rank.report.status for rank in ranks] == [WorkerStatus.DONE] * 2
    mate.process.kill()


def test_workers_that_do_not_fit_on_a_gpu_are_refused_there(emulation):
    big = emulation.start("big", "node1:0", model="bert", batch=32, iterations=10**9)
    big.iterates()
    second = emulation.start("second", "node1:0", model="bert", batch=32, iterations=1)
    _, err = second.process.communicate(timeout=START_S)
    assert second.process.returncode == 1
    assert err.startswith("error: out of memory on node1:0: its workers would hold ")
    assert second.report.status is WorkerStatus.OUT_OF_MEMORY
    big.process.kill()


def test_the_help_has_the_form_of_all_commands():
    said = call("emulate", "--help")
    assert said.code == 0
    assert said.out.startswith("Usage: carpool emulate [OPTIONS]")
    assert "--startup SECONDS" in said.out


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("t4", "write PROFILE:NODESxGPUS"),
        ("t4:0x4", "give 1 to 64 nodes"),
        ("t4:1x4:0", "a speed up to"),
        ("t4:1x4,speed=2", "write interference=TABLE or memory=SIZE"),
        ("t4:1x4,memory=11XB", "memory '11XB': write a size with its unit"),
        ("gavel:1x4", "has no tasks"),
        ("t5:1x4", "no such profile"),
    ],
)
def test_gpus_that_cannot_be_emulated_are_refused_with_a_remedy(text, problem):
    with pytest.raises(InputError, match=re.escape(problem)):
        parse_gpus(text)


def test_the_speed_divides_times_and_leaves_memory_as_it_is():
    fast, usual = parse_gpus("t4:1x4:60").model(), parse_gpus("t4:1x4").model()
    for model in usual.tasks.keys() - {"generic"}:
        for gpus, nodes, split in ((1, 1, 1), (4, 1, 2), (8, 2, 1)):
            job = Job("1", 0.0, model, gpus, 16, 1)
            times = [one.iteration_time(job, split, Placement(gpus, nodes)) for one in (usual, fast)]
            assert times[0] == pytest.approx(60 * times[1])
            assert usual.memory(job, split) == fast.memory(job, split)
