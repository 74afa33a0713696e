"""Kill the service, wrappers and workers from outside while clients submit short jobs; look for violated guarantees.

`python tests/live/chaos_outside.py --kills 20 --seed 1`. Only the command line is used. A service runs as a process of
its own and is killed at random moments, also while it starts. Clients submit jobs of 0.2 to 1 s on one or two GPUs, and
submit again where the answer was lost and no job of that name is listed. Workers append whole lines to one ledger when
they start, while they run and when they end; nothing else is believed. The policy pauses jobs, which keep their GPU and
write nothing meanwhile: `RESIDENTS` may be on a GPU, and one of them computes where a service is up. A service that is
killed before it has paused a job leaves it running; the next one pauses it. Exit code 1: a guarantee was violated.
"""

import argparse
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

GPUS = 3
RESIDENTS = 3
"""Most jobs on a GPU, all but one of them paused."""
BEAT_S = 0.05
"""Seconds between two lines of a worker."""
SETTLE_S = 2.0
"""Seconds that a service has, from when it listens, to pause what must not compute."""
MIXED = 3
"""Number of lines in a row, each of them between two lines of another job that was not paused between them, from which
two jobs compute at once. A switch makes one."""
CLIENTS = 2
DRAIN_S = 120.0
ARRAY = 4
"""Number of jobs that a client submits at a time: starting a client takes as long as a job."""
PATIENCE_S = 60.0
"""Seconds after which a client that gets no answer gives up."""
WORKER = """
import os, sys, time
ledger = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND)
names = ("CARPOOL_ATTEMPT", "RANK", "WORLD_SIZE", "CARPOOL_GPUS")
me = [sys.argv[2] + "." + os.environ["CARPOOL_ARRAY_INDEX"]] + [os.environ[name] for name in names]
def say(what):
    words = [what, *me, str(os.getpid()), str(os.getppid()), str(time.monotonic())]
    os.write(ledger, (" ".join(words) + "\\n").encode())
say("start")
for _ in range(int(float(sys.argv[3]) / float(sys.argv[4]))):
    time.sleep(float(sys.argv[4]))
    say("beat")
say("end")
"""


class World:
    """A home, its service and the ledger of its workers."""

    def __init__(self, folder: Path) -> None:
        self.home, self.ledger, self.worker = folder / "home", folder / "ledger", folder / "worker.py"
        self.log = folder / "serve.log"
        self.ledger.touch()
        self.worker.write_text(WORKER)
        self.service: subprocess.Popen | None = None
        self.accepted: set[str] = set()
        """Tickets of arrays of jobs that clients know to be accepted."""
        self.unsure: set[str] = set()
        """Tickets whose clients gave up."""
        self.touched: set[str] = set()
        """Tickets of jobs of which a process was killed."""
        self.done = threading.Event()
        self.up: list[tuple[float, float]] = []
        """From when to when a service listened, on the clock of the ledger."""

    def carpool(self, *words: str, timeout: float = 30.0) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "carpool.cli", *words, "--home", str(self.home)]
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout)

    def serve(self) -> None:
        command = [sys.executable, "-m", "carpool.cli", "serve", "--home", str(self.home), "--port", "0"]
        with self.log.open("ab") as log:
            self.service = subprocess.Popen(
                [*command, "--gpus", str(GPUS), "--jobs-per-gpu", "1", "--resident-per-gpu", str(RESIDENTS)],
                stdout=log,
                stderr=log,
            )

    def rows(self) -> dict[str, list[dict]] | None:
        """Return all jobs by ticket; None if there was no answer."""
        try:
            found = self.carpool("jobs", "--all", "--json")
        except subprocess.TimeoutExpired:
            return None
        if found.returncode:
            return None
        rows: dict[str, list[dict]] = defaultdict(list)
        for row in json.loads(found.stdout):
            rows[re.split(r"[^t0-9-]", row["name"])[0]].append(row)
        return rows

    def submit(self, ticket: str, gpus: int, seconds: float) -> None:
        """Submit a job until its client knows that it was accepted."""
        until = time.monotonic() + PATIENCE_S
        doubtful = False
        while time.monotonic() < until:
            if doubtful:
                rows = self.rows()
                if rows is None:
                    time.sleep(0.1)
                    continue
                if ticket in rows:
                    self.accepted.add(ticket)
                    return
            numbers = [str(seconds), str(BEAT_S)]
            command = [sys.executable, "-I", "-S", str(self.worker), str(self.ledger), ticket, *numbers]
            fields = ["--name", ticket, "--gpus", str(gpus), "--retries", "9", "--time", "1s", "--directory", "/tmp"]
            fields += ["--array", f"1-{ARRAY}"]
            options = ["submit", *fields, "--no-watch", "--home", str(self.home), "--", *command]
            try:
                answer = subprocess.run(
                    [sys.executable, "-m", "carpool.cli", *options], capture_output=True, text=True, timeout=PATIENCE_S
                )
            except subprocess.TimeoutExpired:  # a stopped service accepts connections, and never answers
                doubtful = True
                continue
            if answer.returncode == 0:
                self.accepted.add(ticket)
                return
            doubtful = True
        self.unsure.add(ticket)

    def is_up(self) -> bool:
        """Return whether the present service listens."""
        try:
            return f'"pid": {self.service.pid}' in (self.home / "address.json").read_text()
        except OSError:
            return False

    def wait_until_up(self) -> None:
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until and self.service.poll() is None and not self.is_up():
            time.sleep(0.05)

    def client(self, number: int, seed: float) -> None:
        drawn, count = random.Random(seed), 0
        while not self.done.is_set():
            count += 1
            self.submit(f"t{number}-{count}", drawn.choice([1, 1, 2]), drawn.uniform(0.2, 1.0))

    def lines(self) -> list[list[str]]:
        return [line.split() for line in self.ledger.read_text().splitlines()]

    def kill_a_process(self, drawn: random.Random) -> bool:
        """Kill a worker or its wrapper that wrote into the ledger lately."""
        recent = [words for words in self.lines()[-6:] if words[0] != "end"]
        if not recent:
            return False
        words = drawn.choice(recent)
        pid = int(drawn.choice(words[6:8]))
        try:  # the worker's own command line names its ticket; a wrapper is its parent
            worker = Path(f"/proc/{words[6]}/cmdline").read_bytes().split(b"\0")
            ticket = words[1].partition(".")[0]
            if ticket.encode() not in worker:
                return False
            self.touched.add(ticket)
            os.kill(pid, signal.SIGKILL)
        except OSError:
            return False
        return True


def judge(world: World, rows: dict[str, list[dict]]) -> list[str]:
    broken = []
    for ticket in world.accepted:
        found = rows.get(ticket, [])
        if len(found) != ARRAY:
            broken.append(f"{ticket} was accepted with {ARRAY} jobs and has {len(found)}")
        for row in found:
            if row["status"] != "finished" and not (row["status"] == "failed" and ticket in world.touched):
                broken.append(f"{ticket} is {row['status']} at the end: {row.get('reason')}")
    return broken + judge_ledger(world)


def judge_ledger(world: World) -> list[str]:
    broken = []
    runs: dict[tuple[str, int, int], dict] = {}
    for at, (what, ticket, attempt, rank, size, gpu, pid, _, _) in enumerate(world.lines()):
        run = runs.setdefault((ticket, int(attempt), int(rank)), {"first": at, "pid": pid, "gpu": gpu, "ended": False})
        run.update(last=at, size=int(size), ended=run["ended"] or what == "end")
        if run["pid"] != pid:
            broken.append(f"{ticket}, attempt {attempt}, worker {rank} was started twice")
    attempts: dict[str, dict[int, list[dict]]] = defaultdict(lambda: defaultdict(list))
    busy = defaultdict(list)
    for (ticket, attempt, _), run in runs.items():
        attempts[ticket][attempt].append(run)
        busy[run["gpu"]].append((run["first"], run["last"], ticket))
    for ticket, found in attempts.items():
        for earlier, later in pairwise(sorted(found)):
            if max(run["last"] for run in found[earlier]) > min(run["first"] for run in found[later]):
                broken.append(f"{ticket}: attempts {earlier} and {later} ran at once")
        whole = [n for n, ranks in found.items() if len(ranks) == ranks[0]["size"] and all(r["ended"] for r in ranks)]
        if whole and ticket.partition(".")[0] not in world.touched and (len(whole) > 1 or max(found) > min(whole)):
            broken.append(f"{ticket} was complete as attempt {min(whole)} and ran again up to attempt {max(found)}")
        if not whole and ticket.partition(".")[0] not in world.touched:
            broken.append(f"{ticket} was never complete")
    return broken + judge_residents(busy) + judge_computing(world.lines(), world.up)


def judge_residents(busy: dict[str, list[tuple[int, int, str]]]) -> list[str]:
    """Count the jobs on each GPU, paused or not."""
    broken = []
    for gpu, times in busy.items():
        there: list[tuple[int, str]] = []
        for first, last, ticket in sorted(times):
            there = [*(one for one in there if one[0] > first), (last, ticket)]
            if len(there) > RESIDENTS:
                broken.append(f"GPU {gpu} held {', '.join(name for _, name in there)} at once")
    return broken


def judge_computing(lines: list[list[str]], up: list[tuple[float, float]]) -> list[str]:
    """Look for jobs on one GPU whose lines mix while a service is up: one that is paused writes none."""
    broken = []
    written: dict[str, list[tuple[str, float]]] = defaultdict(list)
    for _, ticket, attempt, _, _, gpu, _, _, at in lines:
        written[gpu].append((f"{ticket} attempt {attempt}", float(at)))
    for gpu, found in written.items():
        mixed = 0
        for (one, before), (other, _), (again, after) in zip(found, found[1:], found[2:], strict=False):
            between = one == again != other and after - before < 3 * BEAT_S
            between = between and any(since + SETTLE_S < before and after < until for since, until in up)
            mixed = mixed + 1 if between else 0
            if mixed == MIXED:
                broken.append(f"GPU {gpu}: {one} and {other} computed at once")
    return broken


def run(world: World, kills: int, drawn: random.Random) -> dict:
    world.serve()
    clients = [threading.Thread(target=world.client, args=(number, drawn.random())) for number in range(CLIENTS)]
    for client in clients:
        client.start()
    hits = 0
    try:
        for _ in range(kills):
            if drawn.random() < 0.8:  # else it is killed while it starts
                world.wait_until_up()
            until = time.monotonic() + drawn.choice([0.2, 1.0, 2.0, 3.0]) * drawn.uniform(0.5, 1.5)
            since = math.inf
            while time.monotonic() < until:
                since = min(since, time.monotonic() if world.is_up() else math.inf)
                hits += drawn.random() < 0.2 and world.kill_a_process(drawn)
                time.sleep(0.05)
            if world.service.poll() is not None:
                raise SystemExit(f"the service ended by itself: {world.log.read_text()[-2000:]}")
            world.up.append((since, time.monotonic()))
            world.service.kill()
            world.service.wait()
            world.serve()
        world.wait_until_up()
        world.up.append((time.monotonic(), math.inf))
    finally:
        world.done.set()
        for client in clients:
            client.join()
    until = time.monotonic() + DRAIN_S
    rows: dict[str, list[dict]] = {}
    while time.monotonic() < until:
        rows = world.rows() or {}
        if rows and all(row["status"] in ("finished", "failed", "cancelled") for own in rows.values() for row in own):
            break
        time.sleep(0.2)
    broken = judge(world, rows)
    return {
        "kills": kills,
        "processes_killed": hits,
        "jobs": ARRAY * len(world.accepted),
        "unsure": len(world.unsure),
        "attempts": len({(words[1], words[2]) for words in world.lines()}),
        "violations": broken,
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="carpool-outside-", ignore_cleanup_errors=True) as folder:
        world = World(Path(folder))
        try:
            result = run(world, given.kills, random.Random(given.seed))
        finally:
            if world.service is not None:
                world.service.terminate()
                world.service.wait()
        print(json.dumps({**result, "seconds": round(time.monotonic() - began, 1)}))
    return 1 if result["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
