"""What only a real GPU can show: a true shortage of memory, and peak memory in the report."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from carpool.train import Training

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
STEPS = 3


def train(batch, can_shrink, accumulation=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 4096), nn.GELU(), nn.Linear(4096, 4096), nn.GELU(), nn.Linear(4096, 8)).cuda()
    model = model.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(batch, 256, dtype=torch.float64, device="cuda")
    labels = torch.randn(batch, 8, dtype=torch.float64, device="cuda")
    training = Training(model, optimizer, can_shrink=can_shrink, accumulation=accumulation)
    for _ in training.steps(STEPS):
        training.step((inputs, labels), lambda piece: functional.mse_loss(model(piece[0]), piece[1]))
    return training, [parameter.detach().cpu() for parameter in model.parameters()]


def test_a_true_shortage_splits_the_batch_and_changes_nothing(worker):
    batch = 16_384
    _, whole = train(batch, can_shrink=True)
    torch.cuda.synchronize()
    needed = torch.cuda.max_memory_reserved()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(0.6 * needed / total)
    try:
        with pytest.warns(UserWarning, match="out of memory; the step is repeated with accumulation"):
            training, split = train(batch, can_shrink=True)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert training.accumulation.count > 1
    assert worker.report.accumulation == training.accumulation.count
    assert 0 < worker.report.peak_memory < needed
    for one, other in zip(whole, split, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-11)
