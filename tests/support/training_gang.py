"""What each process of a gloo gang does in `test_train_gang.py`. Runs in spawned processes, so it asserts by itself."""

import json
import os
import sys
import time
import traceback
import warnings
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch.nn.parallel import DistributedDataParallel

from carpool import channel
from carpool.train import Checkpoints, OutOfMemoryError, Training, TrainingStopped
from tests.support.effort import THOROUGH
from tests.support.training_models import (
    OPTIMIZERS,
    mlp,
    sentences,
    token_loss,
    tokens,
    transformer,
    vector_loss,
    vectors,
    weights,
)

STEPS = 20 if THOROUGH else 5


def launch(world, scenario, directory):
    """Run a scenario in `world` processes; returns what each of them wrote."""
    processes.spawn(_enter, (world, scenario.__name__, str(directory), STEPS), nprocs=world)
    return [json.loads((Path(directory) / f"result-{rank}.json").read_text()) for rank in range(world)]


def _enter(rank, world, scenario, directory, steps):
    global STEPS  # the environment of this process does not say how hard the tests try
    STEPS = steps
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update(OMP_NUM_THREADS="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0", HF_HUB_OFFLINE="1")
    rendezvous = f"file://{directory}/rendezvous-{scenario}"
    dist.init_process_group("gloo", rendezvous, timedelta(seconds=60), world, rank)
    try:
        result = globals()[scenario](rank, world, Path(directory))
        unfinished = Path(directory) / f"unfinished-{rank}.json"
        unfinished.write_text(json.dumps(result))
        unfinished.rename(Path(directory) / f"result-{rank}.json")
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    # All have what they need once all have written it. Then leave without taking the process group down: gloo's
    # threads now and then abort a process that ends in the ordinary way, after its work is done.
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not all(
        (Path(directory) / f"result-{r}.json").exists() for r in range(world)
    ):
        time.sleep(0.02)
    os._exit(0)


def rows(batch, start, end):
    return (
        {k: v[start:end] for k, v in batch.items()} if isinstance(batch, dict) else tuple(v[start:end] for v in batch)
    )


def counts(per_rank, world, unequal):
    """Samples of each rank; an unequal gang has one worker with more."""
    return [per_rank + (unequal and rank == 0) for rank in range(world)]


def full_batch(kind, optimizer, data):
    """One process with everybody's samples."""
    model = mlp() if kind == "mlp" else transformer()
    loss = vector_loss(model) if kind == "mlp" else token_loss(model)
    o = OPTIMIZERS[optimizer](model.parameters())
    for batch in data:
        o.zero_grad()
        loss(batch).backward()
        o.step()
    return weights(model)


def equality(rank, world, directory):
    """The whole table: model × optimizer × accumulation × equal and unequal sizes. Four processes take half of it."""
    worst = {}
    for kind in ("mlp", "transformer"):
        for unequal in (False, True):
            sizes = counts(8 if not unequal else 5, world, unequal)
            start = sum(sizes[:rank])
            make = vectors if kind == "mlp" else sentences
            data = [make(sum(sizes), seed=i) for i in range(STEPS)]
            for optimizer in OPTIMIZERS:
                expected = full_batch(kind, optimizer, data)
                for accumulation in (1, 2, 4, 8) if world == 2 else (1, 4):
                    model = DistributedDataParallel(mlp() if kind == "mlp" else transformer())
                    training = Training(
                        model,
                        OPTIMIZERS[optimizer](model.parameters()),
                        accumulation=accumulation,
                        average="samples" if kind == "mlp" else tokens,
                        across_ranks=unequal or kind == "transformer",
                    )
                    loss = vector_loss(model) if kind == "mlp" else token_loss(model)
                    for batch in data:
                        training.step(rows(batch, start, start + sizes[rank]), loss)
                    name = f"{kind} {'unequal' if unequal else 'equal'} {optimizer} {accumulation}"
                    worst[name] = float((weights(model) - expected).abs().max())
    return worst


def plain_ddp(rank, world, directory):
    """Without across_ranks: the same as the plain script, which averages each worker's own token mean."""
    data = [rows(sentences(6 * world, seed=i), 6 * rank, 6 * rank + 6) for i in range(STEPS)]
    model = DistributedDataParallel(transformer())
    o = OPTIMIZERS["adam"](model.parameters())
    for batch in data:
        o.zero_grad()
        token_loss(model)(batch).backward()
        o.step()
    expected = weights(model)
    model = DistributedDataParallel(transformer())
    training = Training(model, OPTIMIZERS["adam"](model.parameters()), accumulation=4, average=tokens)
    for batch in data:
        training.step(batch, token_loss(model))
    return float((weights(model) - expected).abs().max())


def synchronisations(rank, world, directory):
    """How often gradients travel in three steps of four micro-batches."""
    model = DistributedDataParallel(mlp())
    seen = []

    def hook(state, bucket):
        seen.append(1)
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, hook)
    training = Training(model, OPTIMIZERS["sgd"](model.parameters()), accumulation=4)
    for i in range(3):
        training.step(vectors(8, seed=i), vector_loss(model))
    return len(seen)


def memory(rank, world, directory):
    """One worker's micro-batches do not fit; the whole gang shrinks together and trains the same."""
    warnings.simplefilter("ignore")
    sizes = counts(8, world, False)
    data = [vectors(sum(sizes), seed=i) for i in range(6)]
    expected = full_batch("mlp", "adam", data)
    model = DistributedDataParallel(mlp())
    training = Training(model, OPTIMIZERS["adam"](model.parameters()), can_shrink=True)

    def loss(batch):
        value = vector_loss(model)(batch)
        if rank == 1 and len(batch[0]) > 2:
            raise torch.OutOfMemoryError("injected")
        return value

    for batch in data:
        training.step(rows(batch, 8 * rank, 8 * rank + 8), loss)
    return {
        "difference": float((weights(model) - expected).abs().max()),
        "accumulation": training.accumulation.count,
    }


def late(rank, world, directory):
    """A shortage after the rehearsals: repeated in an unsynchronised pass, impossible to repeat in the other."""
    warnings.simplefilter("ignore")
    model = DistributedDataParallel(mlp())
    training = Training(model, OPTIMIZERS["sgd"](model.parameters()), can_shrink=True, accumulation=2)
    data = [vectors(8 * world, seed=i) for i in range(6)]
    expected = full_batch("mlp", "sgd", data)
    calls = []

    def loss(batch):
        value = vector_loss(model)(batch)
        if rank == 1 and training.iteration == 4:
            calls.append(1)
            if len(calls) == 1:
                raise torch.OutOfMemoryError("injected")
        return value

    for batch in data:
        training.step(rows(batch, 8 * rank, 8 * rank + 8), loss)
    difference = float((weights(model) - expected).abs().max())
    words = ""
    if rank == 1:

        def synchronised(micros):
            for micro in micros:
                if micro.sync:
                    raise torch.OutOfMemoryError("injected")

        try:
            training.accumulation.run(data[0], synchronised, lambda: None)
        except OutOfMemoryError as error:
            words = str(error)
    return {"difference": difference, "words": words}


def _resumable(rank, directory, iterations):
    torch.manual_seed(100 + rank)
    model = DistributedDataParallel(mlp())
    optimizer = OPTIMIZERS["adam"](model.parameters())
    checkpoints = Checkpoints(directory / "checkpoints")
    training = Training(model, optimizer, accumulation=2, checkpoints=checkpoints)
    started = training.iteration
    for _ in training.steps(iterations):
        x, y = vectors(6, seed=0)
        training.step((x + torch.randn(6, 6), y), vector_loss(model))  # every worker draws its own noise
        if rank == 1 and training.iteration == 5 and training.link.connected:
            channel.write_control(os.environ[channel.ENV_DIRECTORY], channel.Control(sequence=9, stop=True))
    return weights(model), started


def stop_and_resume(rank, world, directory):
    """A stop that one worker sees stops all at the same iteration; the restart ends like an uninterrupted run."""
    own = directory / f"worker-{rank}"
    own.mkdir()
    os.environ[channel.ENV_DIRECTORY] = str(own)
    stopped = -1
    try:
        _resumable(rank, directory, 4000)
    except TrainingStopped:
        stopped = channel.read_report(own).iteration
    (own / channel.CONTROL).unlink(missing_ok=True)
    dist.barrier()
    got, started = _resumable(rank, directory, stopped + 7)
    del os.environ[channel.ENV_DIRECTORY]
    (directory / "quiet").mkdir(exist_ok=True)
    expected, _ = _resumable(rank, directory / "quiet", stopped + 7)
    return {"stopped": stopped, "started": started, "difference": float((got - expected).abs().max())}


def retuned(rank, world, directory):
    """Another accumulation, asked for during step 5, holds for the whole gang from the next step on."""
    own = directory / f"retuned-{rank}"
    own.mkdir()
    os.environ[channel.ENV_DIRECTORY] = str(own)
    channel.write_control(own, channel.Control(sequence=1))
    model = DistributedDataParallel(mlp())
    training = Training(model, OPTIMIZERS["sgd"](model.parameters()))
    passes = []

    def loss(batch):
        passes[-1] += 1
        time.sleep(0.03)
        if training.iteration == 5 and passes[-1] == 1:
            channel.write_control(own, channel.Control(sequence=2, accumulation=3))
        return vector_loss(model)(batch)

    for i in training.steps(9):
        passes.append(0)
        training.step(vectors(6, seed=i), loss)
    del os.environ[channel.ENV_DIRECTORY]
    return passes


def missing_frameworks():
    """Return the frameworks that are not installed, without importing any: that takes seconds."""
    return [name for name in ("lightning", "accelerate", "transformers") if find_spec(name) is None]


def several(rank, world, directory):
    scenarios = [retuned, plain_ddp, synchronisations, memory, late, stop_and_resume]
    scenarios += [] if missing_frameworks() else [adapters]
    return {scenario.__name__: scenario(rank, world, directory) for scenario in scenarios}


def adapters(rank, world, directory):
    """The frameworks' own DistributedDataParallel, with and without Carpool."""
    import accelerate
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import DDPStrategy

    from carpool.train.lightning import CarpoolCallback
    from carpool.train.transformers import CarpoolTrainerCallback
    from tests.support import training_frameworks as frameworks

    warnings.simplefilter("ignore")
    result = {}

    def difference(run):
        """Without, then with three micro-batches."""
        ends = []
        for accumulation in (None, 3):
            accelerate.state.PartialState._reset_state()
            ends.append(weights(run(accumulation)))
        return float((ends[1] - ends[0]).abs().max())

    def lightning(accumulation):
        strategy = DDPStrategy(process_group_backend="gloo", cluster_environment=TorchElasticEnvironment())
        callbacks = [CarpoolCallback(accumulation=accumulation)] if accumulation else []
        model, trainer = frameworks.lightning_fit(directory, callbacks, devices=world, strategy=strategy)
        assert trainer.world_size == world
        return model

    def trainer(accumulation):
        model, data = frameworks.language_model(), frameworks.Sentences()
        made = frameworks.hf_trainer(directory, model, data, per_device_train_batch_size=4)
        assert made.args.world_size == world
        if accumulation:
            CarpoolTrainerCallback(made, accumulation=accumulation)
        made.train()
        return model

    def accelerated(accumulation):
        _, training, _ = frameworks.accelerated(directory / f"a{accumulation}", accumulation or 1)
        assert training.accumulation.gang.size == world
        return training.models[0]

    for run in (lightning, trainer, accelerated):
        result[run.__name__] = difference(run)
    return result
