"""Random pauses of real trainings on one GPU: `python bench/switches.py --out FILE.json`. Needs an NVIDIA GPU.

Six trainings of different kinds are resident on the GPU and stopped (SIGSTOP). At random moments one of them is stopped
and another continued, 200 times in all, under time-slicing and under MPS. Recorded: the milliseconds from the switch to
the next finished iteration, and whether all losses and final weights equal those of the same trainings run one after
the other without a pause, bit by bit. docs/experiments/benchmarks.md has the figures.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from swap import Training, mps

SIZES = (0.1, 0.2, 0.5, 1.0, 2.0, 4.0)
"""GiB of ballast of the six trainings."""


def experiment(switches: int, steps: int, seed: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for mechanism in ("time-slicing", "mps"):
        with tempfile.TemporaryDirectory() as text, mps(Path(text)) if mechanism == "mps" else contextlib.nullcontext():
            found[mechanism] = run(Path(text), switches, steps, random.Random(seed))
    return found


def run(folder: Path, switches: int, steps: int, rng: random.Random) -> dict[str, Any]:
    expected = [Training(folder, f"plain{number}", gib, steps) for number, gib in enumerate(SIZES)]
    plain = [training.result() for training in expected]
    trainings = [Training(folder, f"paused{number}", gib, steps) for number, gib in enumerate(SIZES)]
    for training in trainings:
        training.wait_for(5)
        training.process.send_signal(signal.SIGSTOP)
    waits = []
    active = rng.choice(trainings)
    active.process.send_signal(signal.SIGCONT)
    for _ in range(switches):
        time.sleep(rng.uniform(0.005, 0.08))
        others = [one for one in trainings if one is not active and one.process.poll() is None]
        unfinished = [one for one in others if one.steps() < steps]
        if not unfinished:
            break
        following = rng.choice(unfinished)
        began = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            os.kill(active.process.pid, signal.SIGSTOP)
        before = following.steps()
        following.process.send_signal(signal.SIGCONT)
        waits.append(following.wait_for(before + 1) - began)
        active = following
    for training in trainings:
        training.process.send_signal(signal.SIGCONT)
    waits.sort()
    print(len(waits), "switches done", flush=True)
    return {
        "switches": len(waits),
        "median_ms": statistics.median(waits) * 1000,
        "p99_ms": waits[int(0.99 * (len(waits) - 1))] * 1000,
        "longest_ms": waits[-1] * 1000,
        "bit_equal": [training.result() == one for training, one in zip(trainings, plain, strict=True)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--switches", type=int, default=200)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    text = json.dumps(experiment(options.switches, options.steps, options.seed), indent=1)
    if options.out:
        options.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
