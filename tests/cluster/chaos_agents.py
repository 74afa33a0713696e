"""Kill, stop and cut off everything of a cluster by hand while jobs run; judge by the jobs' own ledger.

`python -m tests.cluster.chaos_agents --faults 40 --seed 1 [--without lease|silence]`. Four agents with two logical
GPUs each; jobs of one to three workers, most of which outlast the lease, on two thirds of the GPUs, so that a job that
loses its node finds room elsewhere. Faults, several at a time, most of them where jobs run: SIGKILL and SIGSTOP of the
service, agents and supervisors, SIGKILL of wrappers and workers, roads cut both ways and one way, nodes that stay away
until they are lost. Exit code 1: a job was lost, ran twice, or a GPU held too many.

`--without` switches a safety rule off (`mutated.py`). Such a chaos ends as soon as a job runs twice.
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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.cluster import world as worlds
from tests.cluster.judge import double_runs, spans, violations
from tests.cluster.world import ClusterWorld, until

NODES = ("a", "b", "c", "d")
LEASE_S, MARGIN_S = 3.0, 1.5
DRAIN_S = 180.0
TAKEN = 2 / 3
"""Share of the GPUs that jobs want together: without room elsewhere, a job that lost its node would wait."""
WHERE_JOBS_RUN = 0.7
"""Share of the faults that hit a node on which jobs run, if there is one."""
AT_ONCE = 2
"""Faults that last at a time, at most: with more of them, little runs that a fault could hit."""


class Over(Exception):
    """The chaos ends before its faults do."""


class Chaos:
    """Faults on a world, each of which ends by itself after a while.

    The seed fixes the faults, how long they last and how long it is until the next. The processes decide what a fault
    meets.
    """

    def __init__(self, world: ClusterWorld, seed: int) -> None:
        self.world, self.drawn, self._drawn_jobs = world, random.Random(seed), random.Random(seed)
        self.counts: dict[str, int] = {}
        self.jobs = 0
        self._busy: set[str] = set()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []

    @property
    def over_s(self) -> float:
        """Seconds of silence after which a node is lost."""
        return self.world.lease_s + self.world.margin_s

    def keep_busy(self) -> None:
        """Submit jobs until they want their share of the GPUs."""
        with contextlib.suppress(ValueError, OSError):  # the service may be away
            client = self.world.client()
            client._connection.timeout = 1.0
            room = TAKEN * self.world.all_gpus - sum(row["gpus"] for row in client.jobs())
            while room >= (gpus := self._drawn_jobs.choice([1, 1, 2, 3])):
                self.submit(gpus)
                room -= gpus

    def submit(self, gpus: int) -> None:
        """Submit a job that ends soon, or, twice as often, one that outlasts several faults."""
        over = self.over_s
        least, most = self._drawn_jobs.choice([(0.5, over), (over, 4.0 * over), (over, 4.0 * over)])
        self.jobs += 1
        seconds = round(self._drawn_jobs.uniform(least, most), 2)
        self.world.submit_ledger(f"j{self.jobs}", seconds, gpus=gpus, retries=100)

    def kinds(self) -> list[Callable[[str, float], None]]:
        """The faults to draw from: most often those that make a node silent while its workers may run on."""
        kills = [self.kill_worker, self.kill_wrapper, self.kill_agent, self.kill_service, self.stop_service]
        silent = [self.lose_node, self.stop_agent, self.cut_road, self.cut_to_agent, self.cut_to_service]
        return [*kills, *silent, *silent]

    def nodes(self) -> Sequence[str]:
        """The nodes that a fault may hit."""
        return NODES

    def target_of(self, kind: str, node: str) -> str:
        """Return what a fault keeps busy, so that no two faults hit it at a time; empty: nothing."""
        return "service" if "service" in kind and "cut" not in kind else node if "_w" not in kind else ""

    def fault(self) -> bool:
        """Begin a fault; return False if too much is going on for it."""
        kind, brief = self.drawn.choice(self.kinds()), self.drawn.random() < 0.5
        least, most = (0.3, self.world.lease_s) if brief else (self.over_s + 1.0, self.over_s + 5.0)
        seconds, aimed, which = self.drawn.uniform(least, most), self.drawn.random(), self.drawn.random()
        nodes = self.nodes()
        with_jobs = sorted({_node(line) for line in self._running()}.intersection(nodes))
        nodes = with_jobs if with_jobs and aimed < WHERE_JOBS_RUN else nodes
        if not nodes:
            return False
        node = nodes[int(which * len(nodes))]
        target = self.target_of(kind.__name__, node)
        with self._lock:
            if target and (target in self._busy or len(self._busy) == AT_ONCE):
                return False
            self._busy.update([target] if target else [])
        self.counts[kind.__name__] = self.counts.get(kind.__name__, 0) + 1

        def run() -> None:
            try:
                with contextlib.suppress(Over):
                    kind(node, seconds)
            finally:
                with self._lock:
                    self._busy.discard(target)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        self._threads.append(thread)
        return True

    def play(self, faults: int, enough: Callable[[], object] = lambda: False) -> None:
        """Make so many faults, or fewer if there is enough, and wait until they have ended."""
        done = 0
        self.keep_busy()
        until(self._running, 30.0, self.world.said)
        while done < faults and not enough():
            self.keep_busy()
            done += self.fault()
            time.sleep(self.drawn.uniform(0.2, 2.5))
        if enough():
            self._over.set()
        for thread in self._threads:
            thread.join(60.0)

    def last(self, seconds: float) -> None:
        """Wait for as long as a fault lasts. Raise `Over`."""
        if self._over.wait(seconds):
            raise Over

    def _running(self) -> list[dict]:
        """Return the latest lines of the ledger: of workers that run now."""
        latest = time.clock_gettime(time.CLOCK_BOOTTIME) - 0.5
        return [line for line in self.world.lines(last=200) if line["at"] > latest and line["what"] != "end"]

    # ---- faults ----------------------------------------------------------------------------------------------------

    def kill_worker(self, node: str, seconds: float) -> None:
        self._kill_on(node, "pid")

    def kill_wrapper(self, node: str, seconds: float) -> None:
        self._kill_on(node, "wrapper")

    def _kill_on(self, node: str, which: str) -> None:
        for line in [line for line in self._running() if _node(line) == node][-1:]:
            with contextlib.suppress(OSError):
                if worlds.WORKER.name.encode() in Path(f"/proc/{line['pid']}/cmdline").read_bytes():
                    os.kill(line[which], signal.SIGKILL)

    def kill_agent(self, node: str, seconds: float) -> None:
        for pid in self.world.agent_pids(node)[1:]:
            os.kill(pid, signal.SIGKILL)

    def lose_node(self, node: str, seconds: float) -> None:
        self.world.kill_agent(node)
        self.last(seconds)
        self.world.start_agent(node)

    def stop_agent(self, node: str, seconds: float) -> None:
        self.world.signal_agent(node, signal.SIGSTOP)
        self.last(seconds)
        self.world.signal_agent(node, signal.SIGCONT)

    def cut_road(self, node: str, seconds: float) -> None:
        self._cut(node, seconds)

    def cut_to_agent(self, node: str, seconds: float) -> None:
        self._cut(node, seconds, to_service=True)

    def cut_to_service(self, node: str, seconds: float) -> None:
        self._cut(node, seconds, to_agent=True)

    def _cut(self, node: str, seconds: float, **passes: bool) -> None:
        self.world.relays[node].cut(**passes)
        self.last(seconds)
        self.world.relays[node].mend()

    def kill_service(self, node: str, seconds: float) -> None:
        self.world.kill_service()
        self.last(min(1.0, seconds))
        self.world.serve()

    def stop_service(self, node: str, seconds: float) -> None:
        self.world.service.send_signal(signal.SIGSTOP)
        self.last(seconds)
        self.world.service.send_signal(signal.SIGCONT)


def _node(line: dict) -> str:
    return line["gpu"].partition(":")[0]


def play_in(chaos: Chaos, faults: int, without: str = "") -> list[str]:
    """Play a round of chaos, and return what was violated; without a safety rule, until a job runs twice."""
    lines = chaos.world.lines
    if without:
        chaos.play(faults, lambda: double_runs(lines()))
        broken = double_runs(lines())
    else:
        chaos.play(faults)
        broken = judge_all(chaos.world)
        if broken:
            print(chaos.world.said()[-6000:], file=sys.stderr)
    tried = ", ".join(f"{name} {number}" for name, number in sorted(chaos.counts.items()))
    print(f"{chaos.jobs} jobs, {len(spans(lines()))} workers; {tried}", flush=True)
    return broken


def judge_all(world: ClusterWorld) -> list[str]:
    """Wait until all jobs have ended, and return what was violated."""
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
    return broken


@contextlib.contextmanager
def switched_off(rule: str) -> Iterator[None]:
    """Start services and agents without a safety rule; empty: with all."""
    honest = worlds.COMMAND
    if rule:
        worlds.COMMAND = [sys.executable, str(Path(__file__).with_name("mutated.py")), rule]
    try:
        yield
    finally:
        worlds.COMMAND = honest


def play(folder: Path, faults: int, seed: int, without: str = "") -> list[str]:
    """Play a round of chaos on nodes by hand, and return what was violated."""
    with switched_off(without), ClusterWorld(folder, NODES, gpus=2, lease_s=LEASE_S, margin_s=MARGIN_S) as world:
        return play_in(Chaos(world, seed), faults, without)


def main(parser: argparse.ArgumentParser, play: Callable[..., list[str]], rules: Sequence[str]) -> int:
    """Play as the command line says, show what was violated, and return the exit code."""
    parser.add_argument("--faults", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--without", choices=rules, default="")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        broken = play(folder=Path(folder), **vars(parser.parse_args()))
    for line in broken:
        print(f"violated: {line}")
    print(f"{time.monotonic() - began:.0f} s")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(argparse.ArgumentParser(description=__doc__), play, ("lease", "silence")))
