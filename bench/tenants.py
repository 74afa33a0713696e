"""Measure what shares cost: decisions with 10,000 pending jobs of 200 users in 20 groups, and the Philly trace.

    python bench/tenants.py [--policy sjf] [--strength 0.5]
    CARPOOL_DATA=… python bench/tenants.py --philly [--policy sjf] [--strength 0.5] [--load 2] [--runs 2]

The first prints the CPU time of a step. The second runs `carpool simulate` on the whole Philly trace, whose virtual
clusters are its groups, without and with shares in turn, and prints the least CPU seconds of both.
"""

import argparse
import os
from pathlib import Path
from random import Random
from time import thread_time

from speed import command

from carpool import policies
from carpool.core import events as ev
from carpool.core.model import FairShare, Job, Status
from carpool.core.perf import ConstantInterference, FittedModel
from carpool.core.scheduler import Scheduler
from carpool.profile.schema import load
from carpool.sim.metrics import percentile
from carpool.sim.run import Setup, cluster_nodes, no_garbage_collection

PENDING, USERS, GROUPS, STEPS = 10_000, 200, 20, 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="sjf")
    parser.add_argument("--strength", type=float, default=0.5)
    parser.add_argument("--philly", action="store_true", help="measure the Philly trace instead of decisions")
    parser.add_argument("--load", type=float, default=1.0, help="arrival-rate multiplier of the Philly trace")
    parser.add_argument("--runs", type=int, default=2, help="number of runs of each kind on the Philly trace")
    options = parser.parse_args()
    if options.philly:
        measure_philly(options.policy, options.strength, options.load, options.runs)
    else:
        measure_decisions(options.policy, options.strength)


def measure_philly(policy: str, strength: float, load: float, runs: int) -> None:
    """Print how fast the Philly trace is simulated with shares, relative to without."""
    trace = Path(os.environ["CARPOOL_DATA"]) / "philly" / "philly.csv"
    without, with_shares = [], []
    for _ in range(runs):
        for seconds, more in ((without, []), (with_shares, ["--fair-share", str(strength)])):
            seconds.append(command(policy, trace, "64x8", "--load", str(load), *more)["cpu_s"])
    speed = min(without) / min(with_shares)
    shown = f"{min(without):.2f} CPU s without shares, {min(with_shares):.2f} with, {speed:.2f} of the speed"
    print(f"{policy}, Philly trace at load {load:g}, strength {strength:g}: {shown}")


def measure_decisions(policy: str, strength: float) -> None:
    """Print the CPU time of steps that begin with many pending jobs of many users."""
    random, tasks = Random(1), load("t4").core_tasks()
    scheduler = Scheduler(policies.make(policy), FittedModel(tasks, ConstantInterference(1.5), 8))
    state, now, number = scheduler.state, 0.0, 0
    scheduler.step(now, [ev.NodeJoined(0.0, node) for node in cluster_nodes(Setup(cluster="64x8"))])
    scheduler.step(now, [ev.FairShareChanged(now, FairShare(strength))])

    def submitted() -> ev.Event:
        nonlocal number
        number += 1
        user = int(USERS * random.random() ** 2)
        model, gpus = random.choice(sorted(tasks)), random.choice([1, 1, 1, 2, 4, 8])
        seconds = random.lognormvariate(8.0, 1.5)
        job = Job(f"j{number}", now, model, gpus, 16, 1000, f"u{user}", seconds, group=f"g{user % GROUPS}")
        return ev.Submitted(now, job)

    times = []
    with no_garbage_collection():
        scheduler.step(now, [submitted() for _ in range(PENDING + 512)])
        for _ in range(STEPS):
            now += random.expovariate(1 / 30.0)
            starting = [r for r in state.holders.values() if r.status is Status.STARTING]
            scheduler.step(now, [ev.Started(now, r.job.id, r.attempt) for r in starting])
            done = random.choice([r for r in state.holders.values() if r.computing])
            batch = [ev.Finished(now, done.job.id, done.attempt), submitted()]
            before = thread_time()
            scheduler.step(now, batch)
            times.append(thread_time() - before)
    times.sort()
    shown = f"mean {1e3 * sum(times) / len(times):.2f} ms, p99 {1e3 * percentile(times, 0.99):.2f} ms"
    waiting = f"{len(state.queue)} jobs wait, {len(state.queue.buckets)} buckets"
    print(f"{policy}, strength {strength:g}: {waiting}; CPU time of a step: {shown}")


if __name__ == "__main__":
    main()
