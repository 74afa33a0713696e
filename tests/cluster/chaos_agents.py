"""Kill, stop and cut off everything of a cluster by hand while jobs run; judge by the jobs' own ledger.

`python -m tests.cluster.chaos_agents --faults 40 --seed 1 [--without lease|silence]`. Three agents with two logical
GPUs each; jobs of one to three workers that outlast the lease. Faults, several at a time: SIGKILL and SIGSTOP of the
service, agents and supervisors, SIGKILL of wrappers and workers, roads cut both ways and one way, nodes that stay away
until they are lost. Exit code 1: a job was lost, ran twice, or a GPU held too many.
"""

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.cluster import world as worlds
from tests.cluster.judge import spans, violations
from tests.cluster.world import ClusterWorld, until

NODES = ("a", "b", "c")
LEASE_S, MARGIN_S = 3.0, 1.5
DRAIN_S = 180.0


class Chaos:
    """Faults on a world, each of which ends by itself after a while."""

    def __init__(self, world: ClusterWorld, seed: int) -> None:
        self.world, self.drawn = world, random.Random(seed)
        self.counts: dict[str, int] = {}
        self.jobs: list[str] = []
        self._busy: set[str] = set()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def submit(self) -> None:
        name, gpus = f"j{len(self.jobs)}", self.drawn.choice([1, 1, 2, 3])
        seconds = self.drawn.uniform(3.0, 2.5 * (LEASE_S + MARGIN_S))
        with contextlib.suppress(ValueError, OSError):  # the service may be away
            self.world.submit_ledger(name, round(seconds, 2), gpus=gpus, retries=100)
        self.jobs.append(name)

    def keep_busy(self) -> None:
        """Keep three jobs under way: with more of them, a job that lost its node would wait and not run twice."""
        with contextlib.suppress(ValueError, OSError):
            client = self.world.client()
            client._connection.timeout = 1.0
            for _ in range(3 - len(client.jobs())):
                self.submit()

    def kinds(self) -> list[Callable[[str, float], None]]:
        """The faults to draw from."""
        kinds = [self.kill_worker, self.kill_wrapper, self.kill_agent, self.lose_node, self.stop_agent]
        return [*kinds, self.cut_road, self.cut_road, self.kill_service, self.stop_service]

    def nodes(self) -> Sequence[str]:
        """The nodes that a fault may hit."""
        return NODES

    def target_of(self, kind: str, node: str) -> str:
        """Return what a fault keeps busy, so that no two faults hit it at a time; empty: nothing."""
        return "service" if "service" in kind else node if "_w" not in kind else ""

    def fault(self) -> None:
        kind, nodes = self.drawn.choice(self.kinds()), self.nodes()
        if not nodes:
            return
        node, over = self.drawn.choice(nodes), LEASE_S + MARGIN_S
        seconds = self.drawn.choice([self.drawn.uniform(0.3, LEASE_S), self.drawn.uniform(over + 1.0, over + 4.0)])
        target = self.target_of(kind.__name__, node)
        with self._lock:
            if target in self._busy:
                return
            if target:
                self._busy.add(target)
        self.counts[kind.__name__] = self.counts.get(kind.__name__, 0) + 1

        def run() -> None:
            try:
                kind(node, seconds)
            finally:
                with self._lock:
                    self._busy.discard(target)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        self._threads.append(thread)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(60.0)

    # ---- faults ----------------------------------------------------------------------------------------------------

    def kill_worker(self, node: str, seconds: float) -> None:
        self._kill_recent("pid")

    def kill_wrapper(self, node: str, seconds: float) -> None:
        self._kill_recent("wrapper")

    def _kill_recent(self, which: str) -> None:
        lines = [line for line in self.world.lines()[-8:] if line["what"] != "end"]
        if lines:
            line = self.drawn.choice(lines)
            with contextlib.suppress(OSError):
                if worlds.WORKER.name.encode() in Path(f"/proc/{line['pid']}/cmdline").read_bytes():
                    os.kill(line[which], signal.SIGKILL)

    def kill_agent(self, node: str, seconds: float) -> None:
        for pid in self.world.agent_pids(node)[1:]:
            os.kill(pid, signal.SIGKILL)

    def lose_node(self, node: str, seconds: float) -> None:
        self.world.kill_agent(node)
        time.sleep(seconds)
        self.world.start_agent(node)

    def stop_agent(self, node: str, seconds: float) -> None:
        self.world.signal_agent(node, signal.SIGSTOP)
        time.sleep(seconds)
        self.world.signal_agent(node, signal.SIGCONT)

    def cut_road(self, node: str, seconds: float) -> None:
        ways = self.drawn.choice([{}, {"to_service": True}, {"to_agent": True}])
        self.world.relays[node].cut(**ways)
        time.sleep(seconds)
        self.world.relays[node].mend()

    def kill_service(self, node: str, seconds: float) -> None:
        self.world.kill_service()
        time.sleep(min(1.0, seconds))
        self.world.serve()

    def stop_service(self, node: str, seconds: float) -> None:
        self.world.service.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        self.world.service.send_signal(signal.SIGCONT)


def play(folder: Path, faults: int, seed: int, show: bool = False) -> list[str]:
    """Play a round of chaos and return what was violated."""
    with ClusterWorld(folder, NODES, gpus=2, lease_s=LEASE_S, margin_s=MARGIN_S) as world:
        return play_in(world, Chaos(world, seed), faults, show)


def play_in(world: ClusterWorld, chaos: Chaos, faults: int, show: bool) -> list[str]:
    """Play a round of chaos in a world and return what was violated."""
    done = 0
    while done < faults:
        chaos.keep_busy()
        before = sum(chaos.counts.values())
        chaos.fault()
        done += sum(chaos.counts.values()) - before
        time.sleep(chaos.drawn.uniform(0.2, 2.5))
    chaos.join()
    until(world._answers, 60, world.said)
    with contextlib.suppress(AssertionError):
        until(lambda: not world.client().jobs(), DRAIN_S)
    rows, lines = world.client().jobs(all=True), world.lines()
    broken = violations(lines)
    for row in rows:
        if row["status"] != "finished":
            broken.append(f"job {row['name']} is {row['status']}: {row['reason']}")
            continue
        ended = {line["rank"] for line in lines if line["job"] == row["name"] and line["what"] == "end"}
        if ended != set(range(row["gpus"])):
            broken.append(f"job {row['name']} finished and only ranks {sorted(ended)} of {row['gpus']} ended")
    with contextlib.suppress(AssertionError):
        until(lambda: not world.job_processes(), 15)
    if world.job_processes():
        broken.append(f"processes {world.job_processes()} are left behind")
    if show or broken:
        tried = ", ".join(f"{name} {number}" for name, number in sorted(chaos.counts.items()))
        print(f"{len(rows)} jobs, {len(spans(lines))} workers; {tried}", flush=True)
    if broken:
        print(world.said()[-6000:], file=sys.stderr)
    return broken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--without", choices=["lease", "silence"])
    options = parser.parse_args()
    if options.without:
        worlds.COMMAND = [sys.executable, str(Path(__file__).with_name("mutated.py")), options.without]
    with tempfile.TemporaryDirectory() as folder:
        broken = play(Path(folder), options.faults, options.seed, show=True)
    for line in broken:
        print(f"violated: {line}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
