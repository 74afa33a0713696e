"""Out of memory: the step is repeated in smaller pieces and trains the same, or says clearly why it cannot be."""

import random

import numpy
import pytest
import torch
from torch import nn

from carpool.channel import Shrinking, WorkerStatus
from carpool.train import OutOfMemoryError, Training, Verdict
from carpool.train.memory import is_out_of_memory
from carpool.train.verdict import Finding, SplitMeasurement
from tests.support.training_models import OPTIMIZERS, mlp, vector_loss, vectors, weights

pytestmark = pytest.mark.slow

CERTIFIED = Verdict((), SplitMeasurement(4, 5, 0.0, 1.0))


def crowded(loss, limit, after=True):
    """A loss that fits only up to `limit` samples; by default it fails late, with half the work done."""

    def fits(batch):
        value = loss(batch) if after else None
        if len(batch[0]) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (injected)")
        return loss(batch) if value is None else value

    return fits


class Noisy(nn.Module):
    """Draws from every generator there is, and keeps running statistics."""

    def __init__(self):
        super().__init__()
        self.inner = mlp()
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("mask", torch.ones(5))

    def forward(self, x):
        self.seen += len(x)
        noise = torch.rand(1).double() + random.random() + float(numpy.random.rand())
        return self.inner(x) * noise


@pytest.mark.filterwarnings("ignore:Carpool. out of memory:UserWarning")
def test_the_step_is_repeated_with_the_same_data_and_ends_like_the_full_batch(worker):
    def run(limit):
        model = mlp()
        training = Training(model, OPTIMIZERS["adam"](model.parameters()), can_shrink=True)
        loss = crowded(vector_loss(model), limit)
        for i in range(4):
            training.step(vectors(11, seed=i), loss)
        return weights(model), training

    expected, _ = run(11)
    got, training = run(3)
    assert (got - expected).abs().max() <= 1e-13
    assert training.accumulation.count == 4
    assert training.iteration == 4
    report = worker.report
    assert (report.accumulation, report.out_of_memory, report.iteration) == (4, 2, 4)
    assert "accumulation 4" in report.note
    assert report.status == WorkerStatus.RUNNING


@pytest.mark.filterwarnings("ignore:Carpool. out of memory:UserWarning")
@pytest.mark.parametrize("piece", [0, 1, 2])
def test_gradients_of_the_pieces_that_fitted_are_cleared(piece):
    """It may be a later piece that does not fit, or the backward pass."""

    def run(failing):
        model = mlp()
        training = Training(model, OPTIMIZERS["sgd"](model.parameters()), can_shrink=True, accumulation=3)
        calls = []

        class Fails(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, slope):
                calls.append(1)
                if len(calls) == failing:
                    raise torch.OutOfMemoryError("injected")
                return slope

        training.step(vectors(12), lambda batch: vector_loss(lambda x: Fails.apply(model(x)))(batch))
        return weights(model), training.accumulation.count

    (expected, count), (got, shrunk) = run(None), run(piece + 1)
    assert (count, shrunk) == (3, 6)
    assert (got - expected).abs().max() <= 1e-14


@pytest.mark.filterwarnings("ignore:Carpool. out of memory:UserWarning")
def test_random_state_and_running_statistics_are_those_of_an_unbroken_step():
    def run(shortage):
        random.seed(5)
        numpy.random.seed(5)
        torch.manual_seed(5)
        model = Noisy()
        # One that never fails but has the accumulation from the start draws the same numbers in the same order.
        training = Training(
            model, OPTIMIZERS["sgd"](model.parameters()), can_shrink=True, accumulation=None if shortage else 2
        )
        state = {"failures": 0}

        def loss(batch):
            value = vector_loss(model)(batch)
            if shortage and len(batch[0]) > 4:
                state["failures"] += 1
                raise torch.OutOfMemoryError("injected")
            return value

        for i in range(3):
            training.step(vectors(8, seed=i), loss)
            if shortage:  # back to the full batch, so that every step fails once
                assert state["failures"] == i + 1
                training.accumulation.count = training.accumulation._floor = 1
        return weights(model), model.seen.clone(), (random.random(), float(numpy.random.rand()), float(torch.rand(1)))

    expected, broken = run(False), run(True)
    assert torch.equal(expected[0], broken[0])
    assert expected[1] == broken[1] == 24
    assert expected[2] == broken[2]


def test_at_one_sample_it_gives_up_in_words(worker):
    model = mlp()
    training = Training(model, OPTIMIZERS["sgd"](model.parameters()), can_shrink=True)
    with pytest.raises(OutOfMemoryError, match="one sample per micro-batch"), pytest.warns(UserWarning, match="repeat"):
        training.step(vectors(6), crowded(vector_loss(model), 0))
    assert worker.report.status == WorkerStatus.OUT_OF_MEMORY
    assert worker.report.accumulation == 6


@pytest.mark.parametrize(
    "options",
    [
        {"can_shrink": False},
        {},  # nobody certified it
        {"can_shrink": Verdict((Finding("refuse", "1 (BatchNorm1d)", "statistics"),))},
    ],
    ids=["forbidden", "unchecked", "refused"],
)
def test_a_job_that_may_not_shrink_asks_to_run_alone(worker, options):
    model = mlp()
    training = Training(model, OPTIMIZERS["sgd"](model.parameters()), **options)
    with pytest.raises(OutOfMemoryError, match="may not split") as caught:
        training.step(vectors(6), crowded(vector_loss(model), 3))
    assert "injected" in str(caught.value)
    report = worker.report
    assert report.needs_alone
    assert report.status == WorkerStatus.OUT_OF_MEMORY
    assert report.accumulation == 1


@pytest.mark.filterwarnings("ignore:Carpool. out of memory:UserWarning")
@pytest.mark.parametrize(
    ("control", "options", "allowed"),
    [
        ({"can_shrink": True}, {}, True),
        ({"can_shrink": True}, {"can_shrink": False}, True),  # the scheduler knows what the owner said last
        ({"can_shrink": False}, {"can_shrink": True}, False),
        ({}, {"can_shrink": CERTIFIED}, True),
    ],
)
def test_scheduler_script_and_verdict_decide_in_this_order(worker, control, options, allowed):
    worker.control(**control)
    model = mlp()
    training = Training(model, OPTIMIZERS["sgd"](model.parameters()), **options)
    loss = crowded(vector_loss(model), 3)
    if allowed:
        training.step(vectors(6), loss)
        assert worker.report.accumulation == 2
    else:
        with pytest.raises(OutOfMemoryError):
            training.step(vectors(6), loss)


@pytest.mark.filterwarnings("ignore:Carpool. out of memory:UserWarning")
def test_the_next_control_may_ask_for_larger_pieces_again(worker):
    worker.control(can_shrink=True)
    model = mlp()
    training = Training(model, OPTIMIZERS["sgd"](model.parameters()))
    training.step(vectors(8), crowded(vector_loss(model), 2))
    training.step(vectors(8), vector_loss(model))
    assert training.accumulation.count == 4, "an unchanged control does not undo what memory taught"
    worker.control(can_shrink=True, accumulation=2)
    training.step(vectors(8), vector_loss(model))
    training.step(vectors(8), vector_loss(model))
    assert training.accumulation.count == 2


def test_other_errors_pass_through_unchanged():
    model = mlp()
    training = Training(model, OPTIMIZERS["sgd"](model.parameters()), can_shrink=True)

    def loss(batch):
        raise RuntimeError("shape mismatch")

    with pytest.raises(RuntimeError, match=r"^shape mismatch$"):
        training.step(vectors(6), loss)
    assert training.accumulation.count == 1


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), True),
        (MemoryError(), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
        (OutOfMemoryError("already said"), False),
    ],
)
def test_what_counts_as_out_of_memory(error, is_one):
    assert is_out_of_memory(error) == is_one


def test_a_real_shortage_of_host_memory_is_recognised():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    assert is_out_of_memory(caught.value)


def test_the_verdict_goes_into_the_report(worker):
    model = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))
    Training(model, OPTIMIZERS["sgd"](model.parameters()))
    assert worker.report.shrinking == Shrinking.REFUSED
    assert "1 (BatchNorm1d)" in worker.report.note
    Training(mlp(), OPTIMIZERS["sgd"](mlp().parameters()), can_shrink=CERTIFIED)
    assert worker.report.shrinking == Shrinking.CERTIFIED


def test_a_verdict_that_travels_with_the_job(worker, tmp_path, monkeypatch):
    CERTIFIED.save(tmp_path / "verdict.json")
    monkeypatch.setenv("CARPOOL_VERDICT", str(tmp_path / "verdict.json"))
    training = Training(mlp(), OPTIMIZERS["sgd"](mlp().parameters()))
    assert training.accumulation.can_shrink
    (tmp_path / "verdict.json").write_text("{")
    with pytest.warns(UserWarning, match="cannot be read"):
        training = Training(mlp(), OPTIMIZERS["sgd"](mlp().parameters()))
    assert not training.accumulation.can_shrink


def test_a_refused_job_does_not_follow_a_scheduler_that_shrinks_it(worker):
    """Unless its owner allowed it."""
    model = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)).double()
    training = Training(model, OPTIMIZERS["sgd"](model.parameters()))
    worker.control(accumulation=4)
    for _ in range(2):
        training.step(vectors(8), vector_loss(model))
    assert worker.report.accumulation == 1
    worker.control(accumulation=4, can_shrink=True)
    for _ in range(2):
        training.step(vectors(8), vector_loss(model))
    assert worker.report.accumulation == 4
