"""Real PyTorch gangs (gloo, DistributedDataParallel, the training library) under the real service."""

import asyncio
from pathlib import Path

import pytest

import carpool
from carpool import channel
from tests.support.processes import is_paused
from tests.support.services import journalled, one, output, python, serving, started, status, until

torch = pytest.importorskip("torch")

TRAIN = """
import os, sys, time, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from carpool.train import Training

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
training = Training(model, torch.optim.SGD(model.parameters(), lr=0.01))
inputs = torch.arange(32.0).reshape(8, 4) / 32 + rank
for step in training.steps(60):
    if step == training.iteration and not getattr(training, "said", False):
        training.said = True
        print("from", step, flush=True)
    training.step(inputs, lambda batch: model(batch).square().mean())
    time.sleep(0.04)
print("weights", [round(float(w), 5) for w in model.module.weight[0]], flush=True)
dist.barrier()
time.sleep(0.1)
os._exit(0)  # gloo's threads sometimes abort a process that ends normally
"""
HERE = {"PYTHONPATH": str(Path(carpool.__file__).parents[1])}


def trained_in_one_go() -> list[float]:
    """Return the weights of the same training without a gang and without a stop."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.arange(32.0).reshape(8, 4) / 32
    for _ in range(60):
        optimizer.zero_grad()
        (sum(model(inputs + rank).square().mean() for rank in (0, 1)) / 2).backward()
        optimizer.step()
    return [round(w, 5) for w in model.weight[0].tolist()]


async def pause_at_a_boundary(service, job: str) -> None:
    await service.requests.pause(job)
    await until(lambda: status(service, job) == "paused", 60)
    ranks = service.queries.show(job)["attempts"][-1]["ranks"]
    assert all(is_paused(rank["pid"]) for rank in ranks)
    reports = [channel.read_report(service.home.rank(job, 1, rank)) for rank in (0, 1)]
    assert all(report.standing for report in reports), "it was stopped within a step"
    assert (reports[0].iteration, reports[0].control) == (reports[1].iteration, reports[1].control)
    await asyncio.sleep(0.2)
    assert [channel.read_report(service.home.rank(job, 1, rank)) for rank in (0, 1)] == reports


@pytest.mark.slow  # four processes import PyTorch, two at a time
async def test_a_requeued_gang_saves_and_continues_where_it_was(home):
    """It is paused twice: it goes on once, and the second time it is requeued while it is paused."""
    async with serving(home, gpus=2) as service:
        fields = {"gpus": 2, "batch": 8, "iterations": 60, "duration_s": 10, "env": HERE, "grace_s": 20}
        job = await one(service, python(TRAIN, **fields))
        await started(service, job)
        await until(lambda: service.queries.show(job)["measured"], 60)  # before, progress follows the given duration
        await pause_at_a_boundary(service, job)
        assert service.state.jobs[job].job.can_pause, "the library can stop it between two steps"
        await service.requests.resume(job)
        await until(lambda: service.queries.show(job)["progress"] > 0.3, 60)
        await pause_at_a_boundary(service, job)
        await service.requests.requeue(job)
        await until(lambda: service.queries.show(job)["held"] and status(service, job) == "pending", 60)
        await service.requests.release(job)
        ended = await asyncio.wait_for(service.queries.wait(job), 90)
        assert ended == "finished", output(service, job, stream="stderr")
        assert service.queries.show(job)["attempt"] == 2
        (stopped,) = journalled(service, "Stopped")
        assert 18 <= stopped["done"] < 60
        for rank in (0, 1):
            report = channel.read_report(home.rank(job, 1, rank))
            assert report.status is channel.WorkerStatus.STOPPED, "it saved and left"
            assert output(service, job, rank, attempt=1).splitlines()[0] == "from 0"
            assert output(service, job, rank).splitlines()[0] == f"from {stopped['done']:.0f}"
        weights = {output(service, job, rank).splitlines()[-1] for rank in (0, 1)}
        assert weights == {f"weights {trained_in_one_go()}"}, "the stop changed nothing"
