"""The promise: micro-batches train the same weights as the full batch."""

import contextlib

import pytest
import torch
from torch import nn

from carpool.train import Training
from tests.support.training_models import (
    OPTIMIZERS,
    gradients,
    mlp,
    sentences,
    token_loss,
    tokens,
    transformer,
    vector_loss,
    vectors,
    weights,
)

STEPS = 20


def reference(model, optimizer, loss, data):
    """The plain loop that a user had before."""
    first = None
    for batch in data:
        optimizer.zero_grad()
        loss(batch).backward()
        first = gradients(model) if first is None else first
        optimizer.step()
    return weights(model), first


def pooled(model, optimizer, loss, data, **options):
    training = Training(model, optimizer, **options)
    first = None
    for batch in data:
        training.accumulate(batch, loss)
        first = gradients(model) if first is None else first
        training.update()
    return weights(model), first


def data_of(kind, samples, dtype=torch.float64):
    if kind == "mlp":
        return [vectors(samples, dtype, seed=i) for i in range(STEPS)]
    return [sentences(samples, seed=i) for i in range(STEPS)]


def parts(kind, dtype, optimizer):
    model = mlp(dtype) if kind == "mlp" else transformer(dtype)
    loss = vector_loss(model) if kind == "mlp" else token_loss(model)
    return model, OPTIMIZERS[optimizer](model.parameters()), loss


def options_of(kind):
    return {} if kind == "mlp" else {"average": tokens}


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("samples", [8, 11], ids=["equal", "unequal"])
@pytest.mark.parametrize("kind", ["mlp", "transformer"])
def test_float64_weights_equal_the_full_batch(kind, samples, optimizer):
    data = data_of(kind, samples)
    expected, _ = reference(*parts(kind, torch.float64, optimizer), data)
    for accumulation in (1, 2, 4, 8):
        got, _ = pooled(*parts(kind, torch.float64, optimizer), data, accumulation=accumulation, **options_of(kind))
        assert (got - expected).abs().max() <= 1e-11, accumulation


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("samples", [8, 11], ids=["equal", "unequal"])
@pytest.mark.parametrize("kind", ["mlp", "transformer"])
def test_float32_within_rounding(kind, samples, optimizer):
    """SGD: the weights. Adam divides by the gradient's size, which turns rounding into steps: its first gradients."""
    data = data_of(kind, samples, torch.float32)
    expected, slope = reference(*parts(kind, torch.float32, optimizer), data)
    for accumulation in (2, 4, 8):
        got, first = pooled(*parts(kind, torch.float32, optimizer), data, accumulation=accumulation, **options_of(kind))
        if optimizer == "sgd":
            assert (got - expected).abs().max() <= 1e-6
        assert (first - slope).norm() <= 1e-5 * slope.norm()


@pytest.mark.parametrize(("kind", "samples"), [("mlp", 11), ("transformer", 8)])
def test_negative_control_without_scaling_it_differs(kind, samples, monkeypatch):
    """The tests above can fail: leave the shares out and they do."""
    data = data_of(kind, samples)
    expected, _ = reference(*parts(kind, torch.float64, "sgd"), data)
    monkeypatch.setattr(Training, "_shares", lambda self, pieces, samples: [1 / len(pieces)] * len(pieces))
    got, _ = pooled(*parts(kind, torch.float64, "sgd"), data, accumulation=4, **options_of(kind))
    assert (got - expected).abs().max() > 1e-4


def test_samples_instead_of_tokens_differ():
    data = data_of("transformer", 8)
    expected, _ = reference(*parts("transformer", torch.float64, "sgd"), data)
    got, _ = pooled(*parts("transformer", torch.float64, "sgd"), data, accumulation=4)
    assert (got - expected).abs().max() > 1e-4


def test_sum_losses_add_up():
    data = [vectors(11, seed=i) for i in range(STEPS)]

    def summed(model):
        return lambda batch: nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    model = mlp()
    expected, _ = reference(model, OPTIMIZERS["adam"](model.parameters()), summed(model), data)
    model = mlp()
    got, _ = pooled(model, OPTIMIZERS["adam"](model.parameters()), summed(model), data, accumulation=4, average="sum")
    assert (got - expected).abs().max() <= 1e-11


def test_micro_batch_without_tokens_is_left_out():
    """Its mean would be 0/0 and poison the loss and the gradients."""
    batch = sentences(4)
    batch["labels"][1:3] = -100

    def run(accumulation):
        model = transformer()

        def loss(part):
            each = nn.functional.cross_entropy(
                model(part["tokens"]).flatten(0, 1), part["labels"].flatten(), reduction="sum"
            )
            return each / tokens(part)

        optimizer = OPTIMIZERS["sgd"](model.parameters())
        training = Training(model, optimizer, accumulation=accumulation, average=tokens)
        return training.step(batch, loss), weights(model)

    (expected, straight), (loss, got) = run(1), run(4)
    assert torch.isfinite(got).all()
    assert (got - straight).abs().max() <= 1e-14
    assert loss == pytest.approx(float(expected), rel=1e-14)


def test_batch_norm_is_shown_to_differ():
    def run(accumulation):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
        data = [vectors(8, seed=i) for i in range(STEPS)]
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        return pooled(model, optimizer, vector_loss(model), data, accumulation=accumulation)[0]

    assert (run(1) - run(4)).abs().max() > 1e-3


def test_the_returned_loss_is_the_full_batch_loss():
    model = transformer()
    batch = sentences(7)
    loss = token_loss(model)
    training = Training(model, OPTIMIZERS["sgd"](model.parameters()), accumulation=3, average=tokens)
    expected = loss(batch).detach()
    got = training.step(batch, lambda part: {"loss": loss(part), "twice": 2 * loss(part)})
    assert torch.allclose(got["loss"], expected, atol=1e-14)
    assert torch.allclose(got["twice"], 2 * expected, atol=1e-14)
    assert not got["loss"].requires_grad


def test_clipping_happens_once_on_the_full_gradient():
    def run(accumulation):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        training = Training(model, optimizer, clip_norm=0.05, accumulation=accumulation)
        norms = []
        for i in range(5):
            training.step(vectors(9, seed=i), vector_loss(model))
            norms.append(float(training.norm))
        return weights(model), norms

    (expected, norms), (got, norms4) = run(1), run(4)
    assert min(norms) > 0.05, "the test must clip"
    assert (got - expected).abs().max() <= 1e-12
    assert norms == pytest.approx(norms4, rel=1e-12)


def test_schedule_and_counter_advance_once_per_full_batch():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    training = Training(model, optimizer, schedule=schedule, accumulation=4)
    for i in range(3):
        training.step(vectors(8, seed=i), vector_loss(model))
    assert training.iteration == 3
    assert schedule.get_last_lr() == [0.125]


def test_several_optimizers_and_own_order():
    """Two optimizers for two parts of a model in one step, and a script that steps them by itself."""

    def run(accumulation, by_hand):
        model = mlp()
        body, head = torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.Adam(model[3].parameters(), lr=0.01)
        training = Training(model, [body, head], accumulation=accumulation)
        for i in range(5):
            batch = vectors(10, seed=i)
            if by_hand:
                training.accumulate(batch, vector_loss(model), optimizers=head)
                head.step()
                training.accumulate(batch, vector_loss(model), optimizers=[body, head])
                body.step()
                training.advance()
            else:
                training.step(batch, vector_loss(model))
        assert training.iteration == 5
        return weights(model)

    for by_hand in (False, True):
        assert (run(1, by_hand) - run(3, by_hand)).abs().max() <= 1e-12
    assert (run(1, True) - run(1, False)).abs().max() > 1e-6


def test_autocast_and_grad_scaler():
    """The scaler sees one step per full batch; bfloat16 rounds, so the bound is bfloat16's."""

    def run(accumulation, mixed=True, scaled=True):
        model = mlp(torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3, enabled=scaled)
        training = Training(model, optimizer, scaler=scaler, clip_norm=0.3, accumulation=accumulation)

        def loss(batch):
            with torch.autocast("cpu", torch.bfloat16) if mixed else contextlib.nullcontext():
                return vector_loss(model)(batch)

        for i in range(7):
            training.step(vectors(8, torch.float32, seed=i), loss)
        return weights(model), scaler.get_scale()

    (expected, scale), (got, scale4) = run(1), run(4)
    assert scale == scale4 == 1024.0 * 2**2
    assert (got - expected).abs().max() <= 2e-3
    exact, _ = run(1, mixed=False)
    exact4, _ = run(4, mixed=False)
    assert (exact - exact4).abs().max() <= 1e-6
    unscaled, _ = run(1, mixed=False, scaled=False)
    assert (exact - unscaled).abs().max() <= 1e-6, "clipping must see the gradients, not their scaled copies"


def test_overflow_skips_the_optimizer_once():
    model = mlp(torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    training = Training(model, torch.optim.SGD(model.parameters(), lr=0.1), scaler=scaler, accumulation=4)
    before = weights(model)
    training.step(vectors(8, torch.float32), lambda batch: vector_loss(model)(batch) * float("inf"))
    assert torch.equal(weights(model), before)
    assert scaler.get_scale() == 512.0


def test_without_carpool_it_is_one_plain_step():
    model = mlp()
    calls = []
    training = Training(model, OPTIMIZERS["sgd"](model.parameters()))

    def loss(batch):
        calls.append(len(batch[0]))
        return vector_loss(model)(batch)

    training.step(vectors(8), loss)
    assert calls == [8]


@pytest.mark.parametrize("wrong", [{"average": "tokens"}, {"accumulation": 0}])
def test_wrong_options_are_refused(wrong):
    model = mlp()
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Training(model, OPTIMIZERS["sgd"](model.parameters()), **wrong)
