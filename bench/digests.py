"""Print a digest of the events of simulations under every policy: has a change of the code changed decisions?

    CARPOOL_DATA=… python bench/digests.py > before.txt      (then again with the change, and compare the two files)

The cases are a calibrated workload and the first jobs of the Philly trace, in worlds that use what the core offers:
shares, learned and unknown jobs, more jobs per GPU, delays, time limits, guesses, closures. `--case` and `--policy`
choose some of them. A digest covers every event with all of its fields, times and reasons included.
"""

import argparse
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from hashlib import sha256
from itertools import islice
from pathlib import Path

from carpool.core.events import Event
from carpool.core.model import Closure, Job, UserGroup
from carpool.errors import InputError
from carpool.policies.registry import BUILT_IN
from carpool.sim.engine import Costs
from carpool.sim.run import Setup, simulate
from carpool.sim.workload import read

PHILLY = Setup(cluster="64x8")
CALIBRATED = Setup(ignore_placement=True, memory_limit=False)
MEMORY = Setup(truth="gavel", costs=Costs(launch_s=20.0, stop_s=5.0))
GROUPS = (UserGroup("g0", weight=2.0), UserGroup("g1", guarantee=16), UserGroup("g2", cap=24))


def with_users(jobs: Iterable[Job]) -> list[Job]:
    """Return jobs that belong to seven users in three groups."""
    return [replace(job, user=f"u{n % 7}", group=f"g{n % 7 % 3}") for n, job in enumerate(jobs)]


def with_limits(jobs: Iterable[Job]) -> list[Job]:
    """Return jobs of which every third may compute for an hour, and goes on from its checkpoint or not."""
    return [replace(job, limit_s=3600.0 if n % 3 == 0 else None, requeue=n % 2 == 0) for n, job in enumerate(jobs)]


CASES: dict[str, tuple[Setup, Callable[[Iterable[Job]], Iterable[Job]]]] = {
    "calibrated": (CALIBRATED, list),
    "four jobs per GPU": (replace(CALIBRATED, jobs_per_gpu=4, truth="1.2"), list),
    "memory and delays": (MEMORY, list),
    "shares": (replace(CALIBRATED, fair_share=0.5, groups=GROUPS), with_users),
    "shares above all": (replace(CALIBRATED, fair_share=1.0, groups=GROUPS), with_users),
    "learned": (replace(MEMORY, belief="learned", report_error=0.1), list),
    "unknown": (replace(MEMORY, belief="unknown"), list),
    "guesses": (replace(CALIBRATED, guesses=(("u1", 0.1), ("u2", 3.0))), with_users),
    "limits and closures": (
        replace(CALIBRATED, closures=(Closure("c", tuple(range(8)), 7200.0, 18_000.0),), fair_share=0.5),
        with_limits,
    ),
    "Philly": (PHILLY, list),
    "Philly with shares": (replace(PHILLY, fair_share=0.5), list),
}


def digest(jobs: Iterable[Job], policy: str, setup: Setup) -> str:
    """Return the digest of all events of a simulation, and their number."""
    hashed, number = sha256(), 0

    def log(event: Event) -> None:
        nonlocal number
        number += 1
        hashed.update(repr(event).encode())

    simulate(jobs, policy, setup, log=log)
    return f"{hashed.hexdigest()[:16]} {number}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", action="append", choices=CASES, help="the world to simulate; may be repeated")
    parser.add_argument("--policy", action="append", help="the policy to simulate; may be repeated")
    parser.add_argument("--jobs", type=int, default=3000, help="number of jobs of the Philly trace")
    options = parser.parse_args()
    data = Path(os.environ["CARPOOL_DATA"])
    calibrated = read(data / "calibrated" / "workloads.csv", {"n": "240", "seed": "1"}).jobs
    philly = list(islice(sorted(read(data / "philly" / "philly.csv").jobs, key=lambda j: j.submitted), options.jobs))
    for name in options.case or CASES:
        setup, change = CASES[name]
        jobs = list(change(philly if name.startswith("Philly") else calibrated))
        for policy in options.policy or BUILT_IN:
            try:
                shown = digest(jobs, policy, setup)
            except InputError as error:
                shown = str(error)
            print(f"{name}, {policy}: {shown}", flush=True)


if __name__ == "__main__":
    main()
