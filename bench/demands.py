"""Measure what trainings ask of a GPU alone, and how much pairs of them slow each other down.

    python bench/demands.py --out FOLDER [--mps] [--limit 230]     on a GPU; without --mps, time-slicing
    python bench/demands.py --out FOLDER --cpu --seconds 0.3       tiny models on the CPU, to try the script

The eight trainings of `demand_models.py` are started once, two processes each, and stopped (SIGSTOP). For every
measurement the processes in question go on for some seconds and are stopped again: each model alone, with the GPU's
counters; every pair; pairs of a model with itself; then groups of three and the models alone once more, as far as the
limit allows. FOLDER gets `demands-mps.json` or `demands-time-slicing.json`, rewritten after each measurement, and the
log of the run. `bench/demand_fit.py` reads them.
"""

import argparse
import contextlib
import ctypes
import json
import mmap
import os
import random
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import deque
from dataclasses import asdict
from itertools import combinations, pairwise
from pathlib import Path

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "src")]  # runs from a checkout that is not installed

from carpool.gpu import mps, nvml  # noqa: E402
from carpool.gpu.counters import GpuUse, Meter  # noqa: E402

NAMES = ("gpt", "vit", "unet", "resnet", "bert", "lstm", "mlp", "convnet")
RING = 1 << 16
"""Number of the last iterations whose ends a process keeps."""
HEADER = struct.Struct("=qqqqd")
"""What a process tells: iterations so far, batch, parameters, bytes reserved on the GPU; and 1.0 to ask for its end."""
SIZE = HEADER.size + 8 * RING
AHEAD = 2
"""Iterations that a process may launch before the oldest of them has ended: few, so that stamps are ends."""
READY = 8
"""Iterations after which a process is warm."""
START_S = 90.0
SETTLE_S = 0.4
"""Seconds after a switch that do not count."""
ENDING_S = 12.0
"""Seconds that are kept for ending the processes."""


# ---- a training ------------------------------------------------------------------------------------------------------


def train(name: str, path: str, device: str) -> None:
    """Train until asked to end; note the end of every iteration in the file."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: never outlive the measurement
    import torch
    from demand_models import MODELS

    if device == "cpu":
        torch.set_num_threads(1)
    torch.manual_seed(os.getpid())
    with open(path, "r+b") as file:
        shared = mmap.mmap(file.fileno(), SIZE)
    training = MODELS[name](device, device == "cpu")
    parameters, count = sum(p.numel() for p in training.model.parameters()), 0
    ends: deque[torch.cuda.Event] = deque()
    while HEADER.unpack_from(shared)[4] == 0.0:
        training.step()
        if device != "cpu":
            ends.append(torch.cuda.Event())
            ends[-1].record()
            if len(ends) <= AHEAD:
                continue
            ends.popleft().synchronize()
        struct.pack_into("=d", shared, HEADER.size + 8 * (count % RING), time.monotonic())
        count += 1
        reserved = torch.cuda.max_memory_reserved() if device != "cpu" and count <= READY else 0
        if count <= READY:
            struct.pack_into("=qqqq", shared, 0, count, training.batch, parameters, reserved)
        else:
            struct.pack_into("=q", shared, 0, count)


class Process:
    """A training in a process of its own, stopped except while it is measured."""

    def __init__(self, name: str, copy: int, folder: Path, device: str, env: dict[str, str]) -> None:
        self.name, self.copy = name, copy
        path, self.log = folder / f"{name}-{copy}", folder / f"{name}-{copy}.log"
        path.write_bytes(bytes(SIZE))
        with path.open("r+b") as file:
            self._shared = mmap.mmap(file.fileno(), SIZE)
        command = [sys.executable, str(HERE), "--train", name, "--file", str(path), "--device", device]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, env={**os.environ, **env}, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    @property
    def header(self) -> tuple[int, int, int, int]:
        return HEADER.unpack_from(self._shared)[:4]

    def alive(self) -> bool:
        return self.process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def ends(self, begin: float, end: float) -> list[float]:
        """Return when iterations ended, between two moments."""
        count = self.header[0]
        slots = (HEADER.size + 8 * (number % RING) for number in range(max(0, count - RING), count))
        stamps = (struct.unpack_from("=d", self._shared, slot)[0] for slot in slots)
        return [stamp for stamp in stamps if begin <= stamp <= end]

    def ask_to_end(self) -> None:
        struct.pack_into("=d", self._shared, HEADER.size - 8, 1.0)
        self.signal(signal.SIGCONT)

    def last_words(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return " | ".join(lines[-3:])


# ---- the measurement -------------------------------------------------------------------------------------------------


class Measurement:
    """All processes, and what was measured so far."""

    def __init__(self, options: argparse.Namespace, folder: Path, env: dict[str, str]) -> None:
        self.options, self.folder, self.env = options, folder, env
        self.began = time.monotonic()
        self.mechanism = "cpu" if options.cpu else "mps" if options.mps else "time-slicing"
        self.file = Path(options.out) / f"demands-{self.mechanism}.json"
        device = None if options.cpu else next(iter(nvml.devices()), None)
        self.meter = Meter(device.uuid) if device is not None else None
        self.processes: list[Process] = []
        self.result: dict[str, object] = {
            "mechanism": self.mechanism,
            "gpu": device.name if device is not None else "cpu",
            "driver": device.driver if device is not None else "",
            "gpm": self.meter.gpm if self.meter is not None else False,
            "seconds": options.seconds,
            "models": {},
            "runs": [],
        }

    @property
    def left(self) -> float:
        return self.options.limit - ENDING_S - (time.monotonic() - self.began)

    def say(self, text: str) -> None:
        line = f"{time.monotonic() - self.began:6.1f} s  {text}"
        print(line, flush=True)
        with (Path(self.options.out) / f"log-{self.mechanism}.txt").open("a") as file:
            file.write(line + "\n")

    def save(self) -> None:
        part = self.file.with_suffix(".part")
        part.write_text(json.dumps(self.result, indent=1) + "\n")
        part.replace(self.file)

    def start(self) -> None:
        """Start all processes together; stop each as soon as it is warm. Those that fail are left out."""
        device = "cpu" if self.options.cpu else "cuda"
        copies = range(1 if self.options.single else 2)
        self.processes = [Process(n, c, self.folder, device, self.env) for c in copies for n in self.options.models]
        coming, until = list(self.processes), time.monotonic() + min(START_S, 0.5 * self.left)
        while coming and time.monotonic() < until:
            for one in list(coming):
                if not one.alive():
                    self.say(f"{one.name}-{one.copy} failed: {one.last_words()}")
                    coming.remove(one)
                    self.processes.remove(one)
                elif one.header[0] >= READY:
                    one.signal(signal.SIGSTOP)
                    coming.remove(one)
                    self.say(f"{one.name}-{one.copy} is up, {one.header[3] / 2**30:.1f} GiB")
            time.sleep(0.02)
        for one in coming:
            self.say(f"{one.name}-{one.copy} is not up; left out: {one.last_words()}")
            one.process.kill()
            self.processes.remove(one)
        models = {}
        for one in self.processes:
            _, batch, parameters, reserved = one.header
            models[one.name] = {"batch": batch, "parameters": parameters, "memory": reserved}
        self.result["models"] = models
        self.save()

    def find(self, names: tuple[str, ...]) -> list[Process] | None:
        """Return a process for each name, or None if there are not as many."""
        found: list[Process] = []
        for name in names:
            one = next((p for p in self.processes if p.name == name and p not in found and p.alive()), None)
            if one is None:
                return None
            found.append(one)
        return found

    def measure(self, names: tuple[str, ...]) -> None:
        """Let the processes of these models run together for some seconds; note their iterations and the counters."""
        active = self.find(names)
        if active is None:
            self.say(f"{' + '.join(names)}: no such processes")
            return
        if self.left < self.options.seconds + SETTLE_S + 0.2:
            return
        for one in active:
            one.signal(signal.SIGCONT)
        time.sleep(SETTLE_S)
        begin = time.monotonic()
        if self.meter is not None:
            self.meter.restart()
        time.sleep(self.options.seconds)
        counters = self._counters()
        end = time.monotonic()
        for one in active:
            one.signal(signal.SIGSTOP)
        rows = [_iterations(one.ends(begin, end)) for one in active]
        run = {"models": names, "at": round(begin - self.began, 2), "jobs": rows, "counters": counters}
        self.result["runs"].append(run)  # type: ignore[attr-defined]
        self.save()
        times = ", ".join(f"{row['iteration_s'] * 1e3:.3f} ms" if row["iteration_s"] else "none" for row in rows)
        used = " ".join(f"{k}={v:.2f}" for k, v in (counters or {}).items() if isinstance(v, float))
        self.say(f"{' + '.join(names)}: {times}  {used}")

    def _counters(self) -> dict[str, float | bool | None] | None:
        if self.meter is None:
            return None
        read: GpuUse | None = self.meter.read()
        plain = nvml.utilisation(self.meter.uuid)
        return {**(asdict(read) if read is not None else {}), "utilisation": plain}

    def end(self) -> None:
        for one in self.processes:
            one.ask_to_end()
        until = time.monotonic() + ENDING_S / 2
        for one in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                one.process.wait(max(0.1, until - time.monotonic()))
            if one.alive():
                one.process.kill()
                one.process.wait()
        if self.meter is not None:
            self.meter.close()

    def run(self) -> None:
        self.start()
        names = [name for name in self.options.models if self.find((name,))]
        if self.options.mps:
            self.result["mps_clients"] = self.options.daemon.clients().__len__()
            self.say(f"{self.result['mps_clients']} clients of MPS for {len(self.processes)} processes")
        plan: list[tuple[str, ...]] = [(name,) for name in names]
        pairs, groups = list(combinations(names, 2)), list(combinations(names, 3))
        chance = random.Random(17)
        chance.shuffle(pairs)  # what a limit cuts off is then spread over the models
        chance.shuffle(groups)
        plan += [*pairs, *((name, name) for name in names), *((name,) for name in names), *groups[:8]]
        for active in plan:
            self.measure(active)
        self.say("done")


def _iterations(ends: list[float]) -> dict[str, float | None]:
    """Return the number of iterations, and their mean and median time."""
    gaps = sorted(b - a for a, b in pairwise(ends))
    mean = (ends[-1] - ends[0]) / len(gaps) if gaps else None
    return {"iterations": len(ends), "iteration_s": mean, "median_s": gaps[len(gaps) // 2] if gaps else None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="demands", help="folder for the results")
    parser.add_argument("--mps", action="store_true", help="share by MPS; starts a daemon of its own")
    parser.add_argument("--cpu", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--single", action="store_true", help="one process per model: no pairs of a model with itself")
    parser.add_argument("--models", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--seconds", type=float, default=2.2, help="length of a measurement")
    parser.add_argument("--limit", type=float, default=230.0, help="seconds for everything")
    for hidden in ("--train", "--file", "--device"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train, options.file, options.device)
        return
    Path(options.out).mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cd-")))
        options.daemon = stack.enter_context(mps.Daemon(folder / "mps")) if options.mps else None
        measurement = Measurement(options, folder, options.daemon.env() if options.daemon else {})
        signal.signal(signal.SIGALRM, lambda *_: sys.exit("the limit is over; the results so far are written"))
        signal.alarm(max(1, round(options.limit - ENDING_S / 2)))
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        try:
            measurement.run()
        finally:
            signal.alarm(0)
            measurement.end()


if __name__ == "__main__":
    main()
