"""What `carpool.train` costs per step when it has nothing to do (accumulation 1), against the same loop without it.

Both loops run in turn, in many short blocks of one process, so that whatever else the machine does hits both alike; the
figure is the difference of the lower quartiles of the blocks; the noise is what the plain loop shows against itself.
Also timed: the report alone, and a step that may be repeated (a job that may shrink keeps its random state). Prints a
table, or JSON with --json; fails if a bound is broken.
"""

import argparse
import contextlib
import json
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


def carpool_loop(model, optimizer, batch, loss_fn, may_shrink):
    training = Training(model, optimizer, may_shrink=may_shrink)
    counter = training.steps(10**9)  # one loop for all blocks: beginning and ending one is no part of a step

    def run(steps):
        for _ in range(steps):
            next(counter)
            training.step(batch, loss_fn)

    return run


def seconds(run, steps):
    began = time.perf_counter()
    run(steps)
    return (time.perf_counter() - began) / steps


def measure(width, samples, steps, pairs, may_shrink=False, wraps=(plain_loop, carpool_loop)):
    """Seconds per step without and with, undisturbed: what disturbs a block only ever makes it longer.

    Both loops train the same network: two networks differ by where their tensors lie in memory, by more than we add.
    """
    model, optimizer = network(width)
    batch = (torch.randn(samples, width), torch.randint(0, 10, (samples,)))

    def loss_fn(part):
        return nn.functional.cross_entropy(model(part[0]), part[1])

    loops = []
    for wrap in wraps:
        more = (may_shrink,) if wrap is carpool_loop else ()
        loops.append(wrap(model, optimizer, batch, loss_fn, *more))
    for loop in loops:
        loop(steps)
    times = []
    for pair in range(pairs):
        order = loops if pair % 2 == 0 else loops[::-1]
        measured = {id(loop): seconds(loop, steps) for loop in order}
        times.append((measured[id(loops[0])], measured[id(loops[1])]))
    plain, with_carpool = (statistics.quantiles(column, n=4)[0] for column in zip(*times, strict=True))
    return {"plain_us": plain * 1e6, "extra_us": (with_carpool - plain) * 1e6, "ratio": with_carpool / plain - 1}


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
        small = {"width": 32, "samples": 32, "steps": max(int(50 * scale), 2), "pairs": 100}
        large = {"width": 1024, "samples": 256, "steps": max(int(3 * scale), 1), "pairs": 80}
        found["noise: small, plain twice"] = measure(**small, wraps=(plain_loop, plain_loop))
        found["small network"] = measure(**small, may_shrink=False)
        found["small network, may shrink"] = measure(**small, may_shrink=True)
        found["noise: larger, plain twice"] = measure(**large, wraps=(plain_loop, plain_loop))
        found["larger network"] = measure(**large, may_shrink=False)
        found["larger network, may shrink"] = measure(**large, may_shrink=True)
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
    parser.add_argument("--scale", type=float, default=1.0, help="more or fewer steps")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = rows(args.scale)
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        print(f"{'':30} {'plain':>10} {'added':>10} {'ratio':>8}")
        for name, row in found.items():
            plain = f"{row['plain_us']:7.1f} µs" if "plain_us" in row else ""
            ratio = f"{row['ratio']:8.2%}" if "ratio" in row else ""
            print(f"{name:30} {plain:>10} {row['extra_us']:7.1f} µs {ratio}")
    late = [name for name, row in found.items() if not within(row)]
    if late:
        print(f"over {BOUND_US:.0f} µs and {BOUND_RATIO:.0%}: {', '.join(late)}", file=sys.stderr)
    sys.exit(bool(late))


if __name__ == "__main__":
    main()
