"""Reports, re-tuning, the loop, checkpoints: a training that can be watched, changed, stopped, killed and resumed."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from carpool import channel
from carpool.channel import WorkerStatus
from carpool.train import Checkpoints, Training, TrainingStopped, link
from tests.support import SUPPORT
from tests.support.training_models import OPTIMIZERS, mlp, vector_loss, vectors, weights

SCRIPT = SUPPORT / "training_script.py"


def make(**options):
    model = mlp()
    return model, Training(model, OPTIMIZERS["adam"](model.parameters()), **options)


# Reports


def test_what_a_report_says(worker, monkeypatch):
    monkeypatch.setattr(link, "_REPORT_EVERY_S", 0.0)
    model, training = make()
    for i in training.steps(6):
        if i:
            report = worker.report
            assert (report.attempt, report.iteration, report.accumulation) == (3, i, 1)
            assert report.status == WorkerStatus.RUNNING
            assert abs(report.time - time.time()) < 5
        time.sleep(0.02)
        training.step(vectors(8, seed=i), vector_loss(model))
    report = worker.report
    assert report.status == WorkerStatus.DONE
    assert report.iteration == 6
    assert 0.02 < report.seconds < 0.1
    assert report.samples_per_second == pytest.approx(8 / report.seconds)


@pytest.mark.parametrize(
    ("limits", "total"),
    [({"epochs": 3}, 12), ({"iterations": 7}, 7), ({"epochs": 3, "iterations": 5}, 5), ({}, 4)],
)
def test_a_loop_over_a_loader_tells_how_many_iterations_it_makes(worker, limits, total):
    model, training = make()
    loader = DataLoader(TensorDataset(*vectors(16)), batch_size=4)
    for batch in training.batches(loader, **limits):
        assert worker.report.total == total
        training.step(batch, vector_loss(model))
    assert worker.report.iteration == total


def test_a_loop_over_a_stream_tells_only_a_limit(worker):
    model, training = make()
    for batch in training.batches(iter([vectors(4)] * 3), epochs=1):
        assert worker.report.total == 0
        training.step(batch, vector_loss(model))
    for _ in make()[1].steps(9):
        assert worker.report.total == 9
        break


def test_the_first_step_does_not_weigh_on_the_time(worker):
    model, training = make()
    for i in training.steps(5):
        time.sleep(0.3 if i == 0 else 0.01)
        training.step(vectors(8, seed=i), vector_loss(model))
    assert worker.report.seconds < 0.1


def test_a_step_with_a_pause_does_not_weigh_on_the_time(worker):
    model, training = make()
    for i in training.steps(6):
        time.sleep(0.5 if i == 3 else 0.01)
        if i == 3:  # as the executor does before it lets the worker go on
            worker.control(resumed=1)
        training.step(vectors(8, seed=i), vector_loss(model))
    assert worker.report.seconds < 0.1
    assert worker.report.iteration == 6


def test_a_worker_that_stands_goes_on_with_the_next_control_or_by_itself(worker):
    made = link.Link()
    worker.control(pause_s=60.0)
    sequence = made.poll().sequence
    for seconds in (0.05, 60.0):
        waiting = threading.Thread(target=made.stand, args=(sequence, seconds))
        waiting.start()
        if seconds > 1.0:
            while not worker.report.standing:
                time.sleep(0.005)
            worker.control(pause_s=0.0)
        waiting.join(20.0)
        assert not waiting.is_alive()
        assert not worker.report.standing


def test_reports_go_nowhere_without_carpool(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, training = make()
    for i in training.steps(2):
        training.step(vectors(8, seed=i), vector_loss(model))
    assert list(tmp_path.iterdir()) == []


def test_a_missing_directory_costs_a_warning_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setenv(channel.ENV_DIRECTORY, str(tmp_path / "gone"))
    with pytest.warns(UserWarning, match="unusable"):
        model, training = make()
    training.step(vectors(8), vector_loss(model))
    assert training.iteration == 1


def test_a_failing_report_ends_the_reports_not_the_training(worker):
    model, training = make()
    training.step(vectors(8), vector_loss(model))
    training.link._writer.close()
    with pytest.warns(UserWarning, match="reports end here"):
        training.step(vectors(8), vector_loss(model))
    training.step(vectors(8), vector_loss(model))
    assert training.iteration == 3
    assert worker.report.iteration == 1


def test_the_directory_may_vanish_in_mid_training(worker):
    model, training = make()
    worker.control(accumulation=2)
    training.step(vectors(8), vector_loss(model))
    for path in worker.directory.iterdir():
        path.unlink()
    worker.directory.rmdir()
    training.step(vectors(8), vector_loss(model))
    assert training.iteration == 2
    assert training.accumulation.count == 2


# Re-tuning


def test_a_re_tune_takes_effect_at_the_next_step(worker):
    model, training = make()
    sizes = []

    def loss(batch):
        sizes[-1].append(len(batch[0]))
        return vector_loss(model)(batch)

    worker.control(accumulation=2)
    for i in training.steps(4):
        sizes.append([])
        training.step(vectors(9, seed=i), loss)
        if i == 1:
            worker.control(accumulation=4)
        if i == 2:
            worker.control(accumulation=1)
            assert (worker.report.accumulation, worker.report.control) == (4, 2)
    assert sizes == [[5, 4], [5, 4], [3, 2, 2, 2], [9]]
    reference, plain = make()
    for i in range(4):
        plain.step(vectors(9, seed=i), vector_loss(reference))
    assert (weights(model) - weights(reference)).abs().max() <= 1e-12


# The loop


def loader(samples=10, batch=4, **options):
    return DataLoader(TensorDataset(*vectors(samples)), batch_size=batch, **options)


def test_batches_count_epochs_and_keep_the_last_partial_batch():
    model, training = make(accumulation=2)
    seen = []
    for batch in training.batches(loader(), epochs=2):
        seen.append(len(batch[0]))
        training.step(batch, vector_loss(model))
    assert seen == [4, 4, 2, 4, 4, 2]
    assert training.iteration == 6


def test_batches_end_in_mid_epoch_after_the_iterations():
    model, training = make()
    for batch in training.batches(loader(), iterations=7):
        training.step(batch, vector_loss(model))
    assert training.iteration == 7


def test_one_epoch_if_nothing_is_said():
    model, training = make()
    for batch in training.batches(loader()):
        training.step(batch, vector_loss(model))
    assert training.iteration == 3


def test_distributed_samplers_learn_the_epoch():
    epochs = []

    class Sampler(torch.utils.data.SequentialSampler):
        def set_epoch(self, epoch):
            epochs.append(epoch)

    model, training = make()
    data = TensorDataset(*vectors(8))
    for batch in training.batches(DataLoader(data, batch_size=4, sampler=Sampler(data)), epochs=3):
        training.step(batch, vector_loss(model))
    assert epochs == [0, 1, 2]


def test_a_forgotten_step_and_an_empty_loader_are_errors():
    _, training = make()
    with pytest.raises(RuntimeError, match="exactly once"):
        for _ in training.steps(2):
            pass
    _, training = make()
    with pytest.raises(ValueError, match="no batches"):
        list(training.batches([], epochs=2))


# Checkpoints


def test_a_checkpoint_on_request(worker, tmp_path):
    model, training = make(checkpoints=tmp_path / "saved")
    for i in training.steps(5):
        training.step(vectors(8, seed=i), vector_loss(model))
        if i == 1:
            worker.control(checkpoint=1)
        if i == 3:
            assert (worker.report.checkpoint, worker.report.checkpoints_taken) == (2, 1)
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["iteration-000000002"]


def test_a_stop_saves_before_the_exit_and_a_restart_goes_on(worker, tmp_path, monkeypatch):
    monkeypatch.setenv(channel.ENV_CHECKPOINTS, str(tmp_path / "saved"))
    model, training = make()
    average = []

    def script():
        for i in training.steps(10):
            training.step(vectors(8, seed=i), vector_loss(model))
            if i == 3:
                worker.control(stop=True)
            average.append(weights(model))  # what the script does after a step still happens before the save

    with pytest.raises(TrainingStopped) as caught:
        script()
    assert len(average) == 4
    assert caught.value.code == channel.EXIT_STOPPED == 75
    assert (worker.report.status, worker.report.checkpoint) == (WorkerStatus.STOPPED, 4)
    worker.control()
    model, training = make()
    assert training.iteration == 4
    assert torch.equal(weights(model), average[-1])
    left = []
    for i in training.steps(10):
        left.append(i)
        training.step(vectors(8, seed=i), vector_loss(model))
    assert left == [4, 5, 6, 7, 8, 9]
    expected, plain = make(checkpoints=tmp_path / "none")
    for i in range(10):
        plain.step(vectors(8, seed=i), vector_loss(expected))
    assert torch.equal(weights(model), weights(expected))


def test_a_stop_without_a_loop_of_ours(worker, tmp_path):
    model, training = make(checkpoints=tmp_path / "saved")
    training.step(vectors(8), vector_loss(model))
    worker.control(stop=True)
    with pytest.raises(TrainingStopped):
        training.step(vectors(8), vector_loss(model))
    assert Checkpoints(tmp_path / "saved").latest()[0] == 2


def test_a_script_may_save_and_load_by_itself(tmp_path):
    def functions(model):
        return {
            "save": lambda directory: torch.save(model.state_dict(), directory / "mine.pt"),
            "load": lambda directory: model.load_state_dict(torch.load(directory / "mine.pt")),
        }

    model = mlp()
    training = Training(
        model, OPTIMIZERS["sgd"](model.parameters()), checkpoints=Checkpoints(tmp_path, **functions(model))
    )
    for i in training.steps(3):
        training.step(vectors(8, seed=i), vector_loss(model))
    training.save()
    other = mlp()
    nn.init.zeros_(other[0].weight)
    resumed = Training(
        other, OPTIMIZERS["sgd"](other.parameters()), checkpoints=Checkpoints(tmp_path, **functions(other))
    )
    assert resumed.iteration == 3
    assert torch.equal(weights(other), weights(model))
    with pytest.raises(ValueError, match="both"):
        Checkpoints(tmp_path, save=lambda directory: None)


def test_old_checkpoints_go_and_a_partial_one_does_not_count(tmp_path):
    model, training = make(checkpoints=Checkpoints(tmp_path, every=1, keep=2))
    for i in training.steps(5):
        training.step(vectors(8, seed=i), vector_loss(model))
    (tmp_path / ".partial-000000099").mkdir()
    assert sorted(p.name for p in tmp_path.glob("i*")) == ["iteration-000000003", "iteration-000000004"]
    assert Checkpoints(tmp_path).latest()[0] == 4


def test_a_checkpoint_that_cannot_be_written_does_not_end_the_training(worker, tmp_path):
    (tmp_path / "file").write_text("in the way")
    model, training = make(checkpoints=tmp_path / "file" / "below")
    worker.control(checkpoint=1)

    def script():
        for i in training.steps(3):
            training.step(vectors(8, seed=i), vector_loss(model))

    with pytest.warns(UserWarning, match="could not be written"):
        script()
    assert training.iteration == 3
    assert "could not be written" in worker.report.note


# Killed and resumed, as real processes


def start(*arguments, **environment):
    command = [sys.executable, "-W", "error", str(SCRIPT), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment})


@pytest.mark.slow
def test_killed_and_resumed_ends_with_the_same_weights(tmp_path):
    """Uninterrupted, and killed without a word somewhere after the second checkpoint: bit by bit the same."""
    whole = start(tmp_path / "a", 26, tmp_path / "whole.pt")
    killed = start(tmp_path / "b", 26, tmp_path / "killed.pt", 0.05)
    until = time.monotonic() + 60
    while len(list((tmp_path / "b").glob("iteration-*9"))) < 1 and time.monotonic() < until:
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=30)
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "killed.pt").exists()
    again = start(tmp_path / "b", 26, tmp_path / "killed.pt")
    words, _ = again.communicate(timeout=60)
    assert whole.wait(timeout=60) == again.returncode == 0
    whole.stdout.close()
    resumed = int(words.split()[-1])
    assert 9 <= resumed < 26
    expected, got = torch.load(tmp_path / "whole.pt"), torch.load(tmp_path / "killed.pt")
    assert all(torch.equal(expected["weights"][name], got["weights"][name]) for name in expected["weights"])
    assert expected["lr"] == got["lr"]
    assert torch.equal(expected["draw"], got["draw"])


@pytest.mark.parametrize(("generator", "workers"), [(False, 0), (True, 0), (True, 1)])
def test_resuming_at_every_iteration_of_two_epochs(tmp_path, generator, workers):
    """Stop after k iterations, for each k: the order of the data and the dropout go on as if nothing had been."""

    def run(until, total, directory):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double()
        own = torch.Generator().manual_seed(5) if generator else None
        data = loader(shuffle=True, generator=own, num_workers=workers)
        training = Training(model, OPTIMIZERS["adam"](model.parameters()), checkpoints=directory)
        for batch in training.batches(data, iterations=total):
            training.step(batch, vector_loss(model))
            if training.iteration == until:
                return None
            # Saved between steps, as a request would.
            if training.iteration == until - 1:
                training.checkpoints.every = 1
        return weights(model)

    expected = run(99, 6, tmp_path / "never")
    for k in (3, 4) if workers else range(2, 7):
        run(k, 99, tmp_path / str(k))
        assert Checkpoints(tmp_path / str(k)).latest()[0] == k - 1
        assert torch.equal(run(99, 6, tmp_path / str(k)), expected)
