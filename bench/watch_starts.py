"""How much later Python is up under the watch's hook: `python bench/watch_starts.py [--starts 1000]`.

Starts `python -c pass` with and without the hook, in turn, and prints the mean difference in milliseconds with its
standard error. The limit is 3 ms. On a machine that does other things, the processor time says more than the clock.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from math import sqrt
from statistics import fmean, median, stdev

from carpool.watch import INJECTED


def start_s(environment: dict[str, str]) -> tuple[float, float]:
    """Return the seconds of one start and end of Python, by the clock and of processor time."""
    begin = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", "pass"], env=environment)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return time.perf_counter() - begin, used.ru_utime + used.ru_stime


def measure(starts: int) -> list[tuple[float, float]]:
    """Return by how many seconds each start was slower under the hook than the one without it beside it."""
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("CARPOOL", "PYTHON"))}
    with tempfile.TemporaryDirectory() as worker:
        watched = {**plain, "PYTHONPATH": str(INJECTED), "CARPOOL_WORKER_DIR": worker, "CARPOOL_ATTEMPT": "1"}
        start_s(plain), start_s(watched)  # the first ones read files from disk and compile the hook
        differences = []
        for number in range(starts):
            first = start_s(watched) if number % 2 else None  # whichever comes second may be slower
            without = start_s(plain)
            under = first or start_s(watched)
            differences.append((under[0] - without[0], under[1] - without[1]))
    return differences


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--starts", type=int, default=1000)
    found = measure(parser.parse_args().starts)
    for name, values in zip(("by the clock", "of processor time"), zip(*found, strict=True), strict=True):
        error = stdev(values) / sqrt(len(values)) if len(values) > 1 else 0.0
        mean, middle = fmean(values) * 1e3, median(values) * 1e3
        print(f"{len(values)} starts, {name}: {mean:.2f} ± {error * 1e3:.2f} ms more each, median {middle:.2f} ms")


if __name__ == "__main__":
    main()
