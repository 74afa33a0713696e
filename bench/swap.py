"""Whether the CUDA driver can swap a training out of a GPU: `python bench/swap.py --out FILE.json` (about 4 minutes).

Needs an NVIDIA GPU. The driver's checkpoint calls (`carpool.gpu.swap`) move the device memory of another process to
main memory and back. For a plain PyTorch training of each size, without MPS and with it, this script swaps the training
out and in several times and records: whether the device memory becomes free, the seconds of each call, the seconds
until the next iteration, how much a second training beside it is disturbed, whether a stopped process can be swapped,
and whether losses and final weights equal those of an uninterrupted run, bit by bit. docs/experiments/swap.md has the
answer.
"""

import argparse
import contextlib
import csv
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from carpool.gpu.swap import CHECKPOINTED, CheckpointDriver, SwapError

GIB = 2**30
TIMEOUT_S = 30.0
"""Seconds after which a call counts as hanging."""


# ---- the training ----------------------------------------------------------------------------------------------------


def train(gib: float, steps: int, progress: str) -> None:
    """Train a small transformer beside a tensor of this size; write a line per iteration, and the weights' hash."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    torch.manual_seed(7)
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.matmul.allow_tf32 = False
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ballast = torch.arange(int(gib * GIB / 4), dtype=torch.int32, device=device)
    layer = torch.nn.TransformerEncoderLayer(256, 4, 512, dropout=0.1, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 4).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with open(progress, "w", buffering=1) as file:
        for step in range(steps):
            data = torch.randn(8, 64, 256, device=device)
            loss = (model(data) - data.roll(1, 1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ballast[step % len(ballast)] += 1
            file.write(f"{step} {time.monotonic():.6f} {loss.item().hex()}\n")
        digest = hashlib.sha256()
        for tensor in (*model.state_dict().values(), ballast[:: max(1, len(ballast) // 10_000_000)]):
            digest.update(tensor.cpu().numpy().tobytes())
        file.write(f"end {time.monotonic():.6f} {digest.hexdigest()} {int(ballast.long().sum())}\n")


def read_lines(path: Path) -> list[list[str]]:
    """Return what a training has written so far: for each iteration its number, its end and its loss."""
    with contextlib.suppress(OSError):
        return [line.split() for line in path.read_text().splitlines() if line.count(" ") >= 2]
    return []


def result_of(path: Path) -> list[str]:
    """Return the losses and the hashes of a training, without its times."""
    return [" ".join([line[0], *line[2:]]) for line in read_lines(path)]


class Training:
    """A training in a process of its own, followed through the file that it writes."""

    def __init__(self, folder: Path, name: str, gib: float, steps: int) -> None:
        self.path = folder / name
        arguments = [sys.executable, __file__, "--train", str(gib), "--steps", str(steps), "--progress", str(self.path)]
        self.process = subprocess.Popen(arguments)

    def steps(self) -> int:
        return len(read_lines(self.path))

    def wait_for(self, steps: int, patience_s: float = 120.0) -> float:
        """Return when this number of iterations was done; raise TimeoutError if that takes too long."""
        until = time.monotonic() + patience_s
        while time.monotonic() < until:
            lines = read_lines(self.path)
            if len(lines) >= steps:
                return float(lines[steps - 1][1])
            if self.process.poll() is not None:
                raise RuntimeError(f"the training ended with {self.process.returncode} after {len(lines)} iterations")
            time.sleep(0.002)
        raise TimeoutError(f"{self.steps()} iterations instead of {steps} after {patience_s:.0f} s")

    def result(self) -> list[str]:
        """Wait for the end; return the losses and the hashes."""
        self.process.wait(timeout=300)
        return result_of(self.path)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


# ---- the driver ------------------------------------------------------------------------------------------------------


class TimedDriver(CheckpointDriver):
    """The checkpoint calls with the seconds that they take. A call that hangs raises TimeoutError."""

    def timed(self, name: str, pid: int) -> float:
        """Make a call; return the seconds that it took."""
        errors: list[SwapError | None] = []

        def call() -> None:
            try:
                getattr(self, name)(pid)
                errors.append(None)
            except SwapError as error:
                errors.append(error)

        began = time.monotonic()
        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        thread.join(TIMEOUT_S)
        if not errors:
            raise TimeoutError(f"{name} hangs for {TIMEOUT_S:.0f} s")
        if errors[0] is not None:
            raise errors[0]
        return time.monotonic() - began


def device_memory(pid: int) -> tuple[int, int]:
    """Return the bytes in use on the device, and those of one process."""
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    used = int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
    own = [one.usedGpuMemory or 0 for one in pynvml.nvmlDeviceGetComputeRunningProcesses(handle) if one.pid == pid]
    return used, sum(own)


def resident(pid: int) -> int:
    """Return the main memory of a process, in bytes."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


# ---- the experiment --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def mps(folder: Path) -> Iterator[None]:
    """Run an MPS daemon of our own; processes that are started inside are its clients."""
    pipe = folder / "mps"
    pipe.mkdir()
    own = {"CUDA_MPS_PIPE_DIRECTORY": str(pipe), "CUDA_MPS_LOG_DIRECTORY": str(pipe)}
    before = dict(os.environ)
    os.environ.update(own)
    subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True)
    try:
        yield
    finally:
        subprocess.run(["nvidia-cuda-mps-control"], input=b"quit -t 5\n", check=False)
        os.environ.clear()
        os.environ.update(before)


def swap(driver: TimedDriver, training: Training) -> dict[str, Any]:
    """Swap a training out and in once, and record what was seen."""
    pid = training.process.pid
    seen: dict[str, Any] = {"used_before": device_memory(pid), "rss_before": resident(pid)}
    seen["lock_s"] = driver.timed("lock", pid)
    seen["checkpoint_s"] = driver.timed("checkpoint", pid)
    seen["checkpointed"] = driver.state(pid) == CHECKPOINTED
    seen["used_out"], seen["rss_out"] = device_memory(pid), resident(pid)
    steps = training.steps()
    time.sleep(0.5)
    seen["steps_while_out"] = training.steps() - steps
    seen["restore_s"] = driver.timed("restore", pid)
    seen["unlock_s"] = driver.timed("unlock", pid)
    began = time.monotonic()
    seen["next_iteration_s"] = training.wait_for(steps + 2) - began
    seen["used_after"] = device_memory(pid)
    return seen


def try_size(driver: TimedDriver, folder: Path, name: str, gib: float, steps: int, repeats: int) -> dict[str, Any]:
    """Compare a training that is swapped several times with an uninterrupted one of the same seed."""
    found: dict[str, Any] = {"gib": gib, "swaps": []}
    plain = Training(folder, f"{name}-plain", gib, steps)
    training = Training(folder, f"{name}-swapped", gib, steps)
    try:
        for number in range(repeats):
            training.wait_for((number + 1) * steps // (repeats + 2))
            found["swaps"].append(swap(driver, training))
        found["bit_equal"] = training.result() == plain.result()
    except (SwapError, RuntimeError, TimeoutError) as error:
        found["error"] = str(error)
        training.kill()
    plain.kill()
    return found


def disturb(driver: TimedDriver, folder: Path, gib: float) -> dict[str, Any]:
    """Return the longest iteration of a second training while the first is swapped out and in, and otherwise."""
    first, second = Training(folder, "beside-a", gib, 100_000), Training(folder, "beside-b", 0.5, 100_000)
    try:
        first.wait_for(100)
        second.wait_for(150)
        quiet = _longest(second)
        steps = second.steps()
        swap(driver, first)
        second.wait_for(steps + 50)
        return {"longest_quiet_s": quiet, "longest_during_swap_s": _longest(second, steps)}
    except (SwapError, RuntimeError, TimeoutError) as error:
        return {"error": str(error)}
    finally:
        first.kill()
        second.kill()


def _longest(training: Training, since: int = 100) -> float:
    times = [float(line[1]) for line in read_lines(training.path)[since:]]
    return max(later - earlier for earlier, later in pairwise(times))


def stopped(driver: TimedDriver, folder: Path) -> str:
    """Return what happens when a process that SIGSTOP has stopped is locked."""
    training = Training(folder, "stopped", 0.5, 100_000)
    try:
        training.wait_for(50)
        training.process.send_signal(signal.SIGSTOP)
        driver.timed("lock", training.process.pid)
        driver.timed("checkpoint", training.process.pid)
        return "works"
    except (SwapError, RuntimeError, TimeoutError) as error:
        return str(error)
    finally:
        training.kill()


def experiment(sizes: list[float], steps: int, repeats: int) -> dict[str, Any]:
    """Try all sizes under both mechanisms; print every result as soon as it is there."""
    driver = TimedDriver()
    found: dict[str, Any] = {"driver": driver.version()}
    for mechanism in ("time-slicing", "mps"):
        with tempfile.TemporaryDirectory() as text, mps(Path(text)) if mechanism == "mps" else contextlib.nullcontext():
            folder = Path(text)
            results = found[mechanism] = {"stopped": stopped(driver, folder)}
            print(results, flush=True)
            results["beside"] = disturb(driver, folder, 8.0)
            print(results["beside"], flush=True)
            results["sizes"] = []
            for gib in sizes:
                results["sizes"].append(try_size(driver, folder, f"{gib:g}", gib, steps, repeats))
                print(results["sizes"][-1], flush=True)
    return found


def table(found: dict[str, Any]) -> list[list[str]]:
    """Return the rows of the table in docs/experiments/swap.md."""
    columns = ["mechanism", "memory, GiB", "freed", "out, s", "in, s", "next iteration, s", "bit-equal"]
    rows = [columns]
    for mechanism in ("time-slicing", "mps"):
        for size in found[mechanism]["sizes"]:
            swaps = size["swaps"]
            if not swaps:
                rows.append([mechanism, f"{size['gib']:g}", size["error"], "", "", "", ""])
                continue
            held = fmean(one["used_before"][1] for one in swaps) / GIB
            freed = all(one["used_out"][1] == 0 and one["steps_while_out"] == 0 for one in swaps)
            away = fmean(one["lock_s"] + one["checkpoint_s"] for one in swaps)
            back = fmean(one["restore_s"] + one["unlock_s"] for one in swaps)
            after = fmean(one["next_iteration_s"] for one in swaps)
            seconds = [f"{away:.2f}", f"{back:.2f}", f"{after:.3f}"]
            equal = "yes" if size["bit_equal"] else "no"
            rows.append([mechanism, f"{held:.1f}", "all" if freed else "not all", *seconds, equal])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--sizes", default="1,16", help="GiB of the trainings")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--table", nargs=2, type=Path, metavar=("JSON", "CSV"), help="only make a table of results")
    parser.add_argument("--train", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--progress", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train is not None:
        train(options.train, options.steps, options.progress)
        return
    if options.table:
        source, target = options.table
        with target.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(table(json.loads(source.read_text())))
        return
    found = experiment([float(size) for size in options.sizes.split(",")], options.steps, options.repeats)
    text = json.dumps(found, indent=1)
    if options.out:
        options.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
