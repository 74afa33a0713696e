"""What the examples share: options, the device, and a gang's process group. Nothing here is specific to Carpool."""

import argparse
import contextlib
import os
import time

import torch
import torch.distributed as dist
from torch import nn


def options(description, small, full):
    """Sizes as options; their defaults are small on a CPU and full on a GPU."""
    parser = argparse.ArgumentParser(description=description)
    has_gpu = torch.cuda.is_available()
    parser.add_argument("--size", choices=["small", "full"], default="full" if has_gpu else "small")
    parser.add_argument("--device", default="cuda" if has_gpu else "cpu")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--accumulation", type=int, help="micro-batches per batch, when no scheduler chooses")
    parser.add_argument("--checkpoints", help="directory to save to and to resume from")
    for name, value in full.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=type(value), help=f"default: {small[name]} (small), {value} (full)")
    chosen = parser.parse_args()
    for name, value in (small if chosen.size == "small" else full).items():
        if getattr(chosen, name) is None:
            setattr(chosen, name, value)
    return chosen


def prepare(device):
    """Join the gang, if there is one, and take this worker's GPU."""
    torch.manual_seed(int(os.environ.get("RANK", "0")))  # every worker has its own data
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device != "cuda":
        return torch.device(device)
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    torch.set_float32_matmul_precision("high")
    return torch.device("cuda", torch.cuda.current_device())


def distribute(model, device):
    model = model.to(device)
    return nn.parallel.DistributedDataParallel(model) if dist.is_initialized() else model


def mixed_precision(device):
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()


@contextlib.contextmanager
def summary(training, batch_size):
    """Say at the end how it went."""
    began, first = time.perf_counter(), training.iteration
    yield
    if training.device and training.device.type == "cuda":
        torch.cuda.synchronize()
    seconds, done = time.perf_counter() - began, training.iteration - first
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    print(
        f"{done} iterations in {seconds:.1f} s, {done * batch_size / seconds:.1f} samples/s, "
        f"accumulation {training.accumulation.count}, peak memory {peak:.2f} GiB"
    )
