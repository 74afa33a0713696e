"""Measure what `carpool.train` costs per step at accumulation 1, relative to the same loop without it.

Both loops run in turn, in many short blocks of one process (one step each if steps are long), so that other load on the
machine affects both alike. The figure is the median difference of neighbouring blocks with its 95 % interval. The noise
is what the plain loop shows against itself. The script also times the report alone, and steps of a job whose batch can
be split, which keep their random state. It prints a table, or JSON with --json, and fails if a bound is exceeded.
"""

import argparse
import contextlib
import json
import math
import os
import statistics
import sys
import tempfile
import time

import torch
from torch import nn

from carpool import channel
from carpool.train import Training
from carpool.train.link import Link

BOUND_US = 50.0
BOUND_RATIO = 0.01


def network(width):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, 10))
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


def plain_loop(model, optimizer, batch, loss_fn):
    def run(steps):
        for _ in range(steps):
            optimizer.zero_grad(set_to_none=True)
            loss_fn(batch).backward()
            optimizer.step()

    return run


def carpool_loop(model, optimizer, batch, loss_fn, can_shrink):
    training = Training(model, optimizer, can_shrink=can_shrink)
    counter = training.steps(10**9)  # one loop for all blocks: beginning and ending one is no part of a step

    def run(steps):
        for _ in range(steps):
            next(counter)
            training.step(batch, loss_fn)

    return run


def seconds(run, steps, clock=time.perf_counter):
    began = clock()
    run(steps)
    return (clock() - began) / steps


def measure(width, samples, steps, pairs, can_shrink=False, wraps=(plain_loop, carpool_loop), clock=time.perf_counter):
    """Return the time of a plain step and what the library adds, in microseconds.

    Both loops train the same network, because two networks differ by more than the library adds: their tensors are at
    different places in memory.
    """
    model, optimizer = network(width)
    batch = (torch.randn(samples, width), torch.randint(0, 10, (samples,)))

    def loss_fn(part):
        return nn.functional.cross_entropy(model(part[0]), part[1])

    loops = []
    for wrap in wraps:
        more = (can_shrink,) if wrap is carpool_loop else ()
        loops.append(wrap(model, optimizer, batch, loss_fn, *more))
    for loop in loops:
        loop(60)  # past the first steps, in which the library finds out what changes
    plain, added = [], []
    for pair in range(pairs):
        order = (0, 1) if (pair * 2654435761 >> 7) % 2 else (1, 0)  # no pattern, and no use of a random generator
        measured = {which: seconds(loops[which], steps, clock) for which in order}
        plain.append(measured[0])
        added.append(measured[1] - measured[0])
    extra, (low, high), usual = statistics.median(added), median_interval(added), statistics.median(plain)
    return {
        "plain_us": usual * 1e6,
        "extra_us": extra * 1e6,
        "interval_us": [low * 1e6, high * 1e6],
        "ratio": extra / usual,
    }


def median_interval(values):
    """Return the 95 % interval of the median for any distribution: the binomial's ranks around the middle."""
    ranked, reach = sorted(values), 0.98 * math.sqrt(len(values))
    middle = (len(ranked) - 1) / 2
    return ranked[max(math.floor(middle - reach), 0)], ranked[min(math.ceil(middle + reach), len(ranked) - 1)]


def report_cost(steps):
    link = Link()
    began = time.perf_counter()
    for i in range(steps):
        link.stepped(i, 32)
        link.poll()
    return (time.perf_counter() - began) / steps * 1e6


def rows(scale=1.0):
    directory = tempfile.mkdtemp(prefix="carpool-bench-")
    channel.write_control(directory, channel.Control(sequence=1))
    with environment(directory):
        found = {"report and control alone": {"extra_us": report_cost(int(20_000 * scale))}}
        small = {"width": 32, "samples": 32, "steps": 20, "pairs": max(int(300 * scale), 10)}
        large = {"width": 1024, "samples": 256, "steps": 1, "pairs": max(int(800 * scale), 10)}
        found["noise: small, plain twice"] = measure(**small, wraps=(plain_loop, plain_loop))
        found["small network"] = measure(**small, can_shrink=False)
        found["small network, may shrink"] = measure(**small, can_shrink=True)
        found["noise: larger, plain twice"] = measure(**large, wraps=(plain_loop, plain_loop))
        found["larger network"] = measure(**large, can_shrink=False)
        found["larger network, may shrink"] = measure(**large, can_shrink=True)
    return found


@contextlib.contextmanager
def environment(directory):
    before = os.environ.get(channel.ENV_DIRECTORY)
    os.environ[channel.ENV_DIRECTORY] = directory
    try:
        yield
    finally:
        os.environ.pop(channel.ENV_DIRECTORY)
        if before is not None:
            os.environ[channel.ENV_DIRECTORY] = before


def within(row):
    return row["extra_us"] <= BOUND_US or row.get("ratio", 1.0) <= BOUND_RATIO


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--scale", type=float, default=1.0, help="more or fewer blocks")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = rows(args.scale)
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        print(f"{'':30} {'plain':>10} {'added':>10} {'95 % interval':>16} {'ratio':>8}")
        for name, row in found.items():
            plain = f"{row['plain_us']:7.1f} µs" if "plain_us" in row else ""
            ratio = f"{row['ratio']:8.2%}" if "ratio" in row else ""
            interval = "{:6.1f} … {:6.1f}".format(*row["interval_us"]) if "interval_us" in row else ""
            print(f"{name:30} {plain:>10} {row['extra_us']:7.1f} µs {interval:>16} {ratio}")
    late = [name for name, row in found.items() if not within(row)]
    if late:
        print(f"over {BOUND_US:.0f} µs and {BOUND_RATIO:.0%}: {', '.join(late)}", file=sys.stderr)
    sys.exit(bool(late))


if __name__ == "__main__":
    main()
