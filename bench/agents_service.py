"""`carpool serve` that also writes how long each decision took, with an executor that talks to no agent.

`bench/agents.py` starts it as `python bench/agents_service.py FILE NODES SPREAD serve …`. Each line of the file is the
time at which a decision ended, its seconds on the clock and its CPU seconds. `--executor timed` has NODES nodes with
one GPU each in the memory of the service; a job is an entry in a dictionary that ends after its time, as with the
simulated agents.
"""

import asyncio
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from carpool.cli import main
from carpool.core.events import Event
from carpool.live.executors.base import GangKey, GangOutcome, Launch
from carpool.live.executors.memory import MemoryExecutor
from carpool.live.executors.registry import BUILT_IN
from carpool.live.service.driver import Driver

JOB_S = 20.0
"""Seconds that a simulated job takes."""


def job_seconds(spread: float) -> float:
    """Return how long a simulated job takes. `spread`: standard deviation of the logarithm."""
    return JOB_S * random.lognormvariate(0.0, spread)


class TimedExecutor(MemoryExecutor):
    """Nodes without agents, on which jobs take their time."""

    def __init__(self, nodes: int, spread: float) -> None:
        names = [f"n{number}" for number in range(nodes)]
        super().__init__(gpus=1, memory=2**40, node_names=names, automatic=True)
        self.spread = spread

    def launch(self, launch: Launch) -> None:
        super().launch(launch)
        asyncio.get_running_loop().call_later(job_seconds(self.spread), self._end, launch.key)

    def report(self, key: GangKey) -> None:
        """Report nothing, like the simulated agents."""

    def _end(self, key: GangKey) -> None:
        if key in self.gangs:
            self.end(key, GangOutcome.FINISHED, exit_code=0)


def write_decisions(file: TextIO) -> None:
    """Let the driver write a line after every step in which the policy was asked."""
    step = Driver._step

    def timed(driver: Driver, now: float, events: Sequence[Event]) -> float | None:
        cpu_s = time.thread_time()
        decision_s = step(driver, now, events)
        if decision_s is not None:
            file.write(f"{time.monotonic()} {decision_s} {time.thread_time() - cpu_s}\n")
        return decision_s

    Driver._step = timed  # type: ignore[method-assign]


if __name__ == "__main__":
    path, nodes, spread, *words = sys.argv[1:]
    BUILT_IN["timed"] = lambda options: TimedExecutor(int(nodes), float(spread))
    with Path(path).open("w", buffering=1) as lines:
        write_decisions(lines)
        sys.argv[1:] = words
        main()
