"""Kill the service, wrappers and workers from outside while clients submit short jobs; look for violated guarantees.

`python tests/live/chaos_outside.py --kills 20 --seed 1`. Only the command line is used. A service runs as a process of
its own and is killed at random moments, also while it starts. Clients submit jobs of 0.2 to 1 s on one or two GPUs, and
submit again where the answer was lost and no job of that name is listed. Workers append whole lines to one ledger when
they start, while they compute and when they end; nothing else is believed. Some are commands that compute at once, some
are Python scripts of which that cannot be known, and some are trainings that start up and then report steps, so that
the policy starts them ahead of their turn. One client is a user of a group with a cap whose jobs have time limits, and
an operator drains and reserves GPUs (outside_tenants.py). The policy pauses jobs, which keep their GPU and write
nothing meanwhile: `RESIDENTS` may be on a GPU, and one of them computes, whether or not a service is up. Exit code 1: a
guarantee was violated; the folder with ledger, journal and log is kept.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from carpool import channel

if __name__ == "__main__":  # the folder of this file has a package `http`
    sys.path[0] = str(Path(__file__).parents[2])
from tests.live import outside_tenants as tenants
from tests.live.service import chaos_tenants

GPUS = 3
RESIDENTS = 3
"""Most jobs on a GPU, all but one of them paused."""
BEAT_S = 0.05
"""Seconds between two lines of a worker."""
STARTUP_S = 0.3
"""Seconds that a training takes before its first step."""
MIXED = 3
"""Number of lines in a row, each of them between two lines of the other job, from which two jobs compute at once. A
switch makes one, and a job that starts ahead of its turn may make a step before it stands."""
LONGEST_BEAT_S = 0.5
"""Seconds between two lines of a worker that computes on a busy machine."""
CLIENTS = 2
DRAIN_S = 120.0
ARRAY = 6
"""Number of jobs that a client submits at a time: starting a client takes as long as a job."""
BACKLOG = 24
"""Number of jobs that wait or run from which clients submit no more: the processor is for the service and the jobs."""
LOOK_S = 0.1
"""Seconds between two looks of a client whether a service listens, or whether few enough jobs are left."""
QUICK_START_S = 2.5
"""Seconds that a service takes at most to start where the machine is quiet. On a slower one, where a client takes as
much longer, a service lives longer before it is killed, so that jobs run at all."""
PATIENCE_S = 60.0
"""Seconds after which a client that gets no answer gives up."""
KINDS = ("command", "script", "training")
"""What a client submits: a command that is not watched, a script that reports nothing, or a training."""
TIMES = ("1s", "4s", "30s")
"""Durations that clients state, so that jobs are paused for shorter ones."""
WORKER = """
import importlib.util, os, sys, time
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
ledger, beat = os.open(given["--out"], os.O_WRONLY | os.O_APPEND), float(given["--run"])
names = ("CARPOOL_ATTEMPT", "RANK", "WORLD_SIZE", "CARPOOL_GPUS")
me = [given["--name"] + "." + os.environ["CARPOOL_ARRAY_INDEX"]] + [os.environ[name] for name in names]
def say(what):
    words = [what, *me, str(os.getpid()), str(os.getppid()), repr(time.time())]
    os.write(ledger, (" ".join(words) + "\\n").encode())
say("start")
report = None
if "--cache" in given:  # the part of the training library that reports
    spec = importlib.util.spec_from_file_location("channel", given["--cache"])
    channel = sys.modules["channel"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(channel)
    report = channel.ReportWriter(os.environ["CARPOOL_WORKER_DIR"])
    time.sleep(float(given["--id"]))
for step in range(1, 1 + int(float(given["--time"]) / beat)):
    time.sleep(beat)
    if report:
        report.write(channel.Report(attempt=int(me[1]), iteration=step, seconds=beat, time=time.time()))
    say("beat")
say("end")
"""


class World:
    """A home, its service and the ledger of its workers."""

    def __init__(self, folder: Path) -> None:
        self.home, self.ledger = folder / "home", folder / "ledger"
        self.workers = {kind: folder / f"{kind}.py" for kind in KINDS}
        self.shell = folder / "worker.sh"
        self.shell.write_text(tenants.WORKER)
        self.log = folder / "serve.log"
        self.ledger.touch()
        folder.chmod(0o755)  # where this is root, jobs of the group's user have a uid of their own
        self.ledger.chmod(0o666)
        for kind, path in self.workers.items():
            path.write_text(f"# a {kind}\n{WORKER}")
        self.service: subprocess.Popen | None = None
        self.accepted: set[str] = set()
        """Tickets of arrays of jobs that clients know to be accepted."""
        self.unsure: set[str] = set()
        """Tickets whose clients gave up."""
        self.touched: set[str] = set()
        """Jobs of which a process was killed."""
        self.kinds: dict[str, str] = {}
        """Kinds of jobs by ticket."""
        self.up: list[tuple[str, str]] = []
        """When a service was up, as `chaos_tenants.read_uptime` reads it."""
        self.operator: tenants.Operator | None = None
        self.done = threading.Event()
        self.slowness = 1.0
        """How much longer than on a quiet machine a service takes to start."""

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

    def submit(self, ticket: str, kind: str, options: list[str], command: list[str], user: bool = False) -> None:
        """Submit an array of jobs until its client knows that it was accepted. `user`: as the user of the group."""
        until = time.monotonic() + PATIENCE_S
        doubtful, self.kinds[ticket] = False, kind
        token = {"CARPOOL_TOKEN": self.operator.token} if user else {}
        while time.monotonic() < until:
            if not self.is_up():  # a call that is refused at once tells nothing, and takes the processor from the jobs
                time.sleep(LOOK_S)
                continue
            if doubtful:
                rows = self.rows()
                if rows is None:
                    continue
                if ticket in rows:
                    self.accepted.add(ticket)
                    return
            fields = ["--name", ticket, "--retries", "9", "--directory", "/tmp", "--array", f"1-{ARRAY}", *options]
            try:
                answer = subprocess.run(
                    [sys.executable, "-m", "carpool.cli", "submit", *fields, "--home", str(self.home), "--", *command],
                    capture_output=True,
                    text=True,
                    timeout=PATIENCE_S,
                    env={**os.environ, **token},
                )
            except subprocess.TimeoutExpired:  # a stopped service accepts connections, and never answers
                doubtful = True
                continue
            if answer.returncode == 0:
                self.accepted.add(ticket)
                return
            doubtful = True
        self.unsure.add(ticket)

    def submit_any(self, ticket: str, drawn: random.Random) -> None:
        """Submit jobs of the administrator."""
        kind, gpus, seconds = drawn.choice([*KINDS, "training"]), drawn.choice([1, 1, 2]), drawn.uniform(0.2, 1.0)
        command = [sys.executable, "-I", "-S", str(self.workers[kind]), "--out", str(self.ledger), "--name", ticket]
        command += ["--time", str(seconds), "--run", str(BEAT_S)]
        if kind == "training":
            command += ["--cache", channel.__file__, "--id", str(STARTUP_S)]
        options = ["--gpus", str(gpus), "--time", drawn.choice(TIMES), *(["--no-watch"] if kind == "command" else [])]
        self.submit(ticket, kind, options, command)

    def submit_as_user(self, ticket: str, drawn: random.Random) -> None:
        """Submit jobs of the user of the group."""
        kind, seconds, options = tenants.job(drawn)
        words = [ticket, str(int(seconds / BEAT_S)), str(BEAT_S), "keeps" if kind == tenants.GOING_ON else ""]
        command = ["/bin/sh", str(self.shell), str(self.ledger), *words]
        self.submit(ticket, kind, ["--time", drawn.choice(TIMES), *options], command, user=True)

    def is_up(self) -> bool:
        """Return whether the present service listens."""
        try:
            return f'"pid": {self.service.pid}' in (self.home / "address.json").read_text()
        except (AttributeError, OSError):
            return False

    def wait_until_up(self) -> None:
        began = time.monotonic()
        while time.monotonic() < began + PATIENCE_S and self.service.poll() is None and not self.is_up():
            time.sleep(0.05)
        self.slowness = max(1.0, (time.monotonic() - began) / QUICK_START_S)
        if self.is_up():
            self.up.append(("up", repr(time.time())))

    def client(self, number: int, seed: float) -> None:
        drawn, count = random.Random(seed), 0
        while not self.done.is_set():
            if self.number_left() > BACKLOG:
                time.sleep(LOOK_S)
                continue
            count += 1
            submit = self.submit_as_user if number and self.operator is not None else self.submit_any
            submit(f"t{number}-{count}", drawn)

    def number_left(self) -> int:
        """Return the number of jobs of which no worker has come to its end, but for those that their limits end."""
        ended = len({words[1] for words in self.lines() if words[0] == "end"})
        return ARRAY * sum(self.kinds[ticket] != tenants.LIMITED for ticket in list(self.accepted)) - ended

    def lines(self) -> list[list[str]]:
        return [line.split() for line in self.ledger.read_text().splitlines()]

    def kill_a_process(self, drawn: random.Random) -> bool:
        """Kill a worker or its wrapper that wrote into the ledger lately."""
        with self.ledger.open("rb") as ledger:
            ledger.seek(max(0, self.ledger.stat().st_size - 1000))
            tail = ledger.read().decode().splitlines()[1:]
        recent = [words for words in map(str.split, tail[-6:]) if words[0] != "end"]
        if not recent:
            return False
        words = drawn.choice(recent)
        pid = int(drawn.choice(words[6:8]))
        try:  # the worker's own command line names its ticket; a wrapper is its parent
            worker = Path(f"/proc/{words[6]}/cmdline").read_bytes().split(b"\0")
            if words[1].partition(".")[0].encode() not in worker:
                return False
            self.touched.add(words[1])
            os.kill(pid, signal.SIGKILL)
        except OSError:
            return False
        return True


def judge(world: World, rows: dict[str, list[dict]]) -> list[str]:
    broken = []
    complete = complete_jobs(world.lines())
    for ticket in world.accepted:
        found = rows.get(ticket, [])
        if len(found) != ARRAY:
            broken.append(f"{ticket} was accepted with {ARRAY} jobs and has {len(found)}")
        for row in found:
            job = row["name"].replace("[", ".").rstrip("]")
            limited = world.kinds.get(ticket) == tenants.LIMITED
            at_limit = row["status"] == "failed" and str(row.get("reason")).startswith("ran to its limit")
            if limited and row["status"] == "finished":
                broken.append(f"{job} is finished, and its limit should have ended it")
            elif limited and at_limit:
                continue
            elif row["status"] != "finished" and not (row["status"] == "failed" and job in world.touched):
                broken.append(f"{job} is {row['status']} at the end: {row.get('reason')}")
            elif row["status"] == "finished" and job not in complete:
                broken.append(f"{job} is finished, and was never complete")
    return broken + judge_ledger(world) + judge_tenants(world, rows)


def judge_tenants(world: World, rows: dict[str, list[dict]]) -> list[str]:
    """Compare the rules about groups, limits, closures and accounts with the jobs' own ledger."""
    if world.operator is None:
        return []
    runs = tenants.read_runs(world.lines(), world.kinds)
    uptime = chaos_tenants.read_uptime([*world.up, ("down", repr(time.time()))])
    broken = tenants.judge(runs, world.operator.closed, uptime, BEAT_S)
    found = world.carpool("usage", "--by", "user", "--all", "--json")
    if found.returncode:
        return [*broken, f"no usage is shown: {found.stderr[-200:]}"]
    jobs = Counter(row["user"] for own in rows.values() for row in own)
    return broken + chaos_tenants.judge_usage(json.loads(found.stdout), runs, jobs)


def complete_jobs(lines: list[list[str]]) -> set[str]:
    """Return the jobs all of whose workers have come to their end in one attempt."""
    ended = defaultdict(set)
    for what, job, attempt, rank, size, *_ in lines:
        if what == "end":
            ended[job, attempt, int(size)].add(rank)
    return {job for (job, _, size), ranks in ended.items() if len(ranks) == size}


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
        if whole and ticket not in world.touched and (len(whole) > 1 or max(found) > min(whole)):
            broken.append(f"{ticket} was complete as attempt {min(whole)} and ran again up to attempt {max(found)}")
        limited = world.kinds.get(ticket.partition(".")[0]) == tenants.LIMITED
        if not whole and not limited and ticket not in world.touched:
            broken.append(f"{ticket} was never complete")
    clearings = world.operator.clearings if world.operator is not None else []
    return broken + judge_residents(busy) + judge_computing(world.lines(), clearings)


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


def judge_computing(lines: list[list[str]], clearings: Sequence[tuple[int, float, float]] = ()) -> list[str]:
    """Look for jobs on one GPU whose lines mix: one that starts up or is paused writes none. `clearings`: GPUs, and
    from when to when jobs there save and leave, for which paused ones go on, too."""
    broken = []
    written: dict[str, dict[str, list[tuple[int, float]]]] = defaultdict(lambda: defaultdict(list))
    for number, (what, ticket, attempt, _, _, gpu, _, _, at) in enumerate(lines):
        slot = int(gpu.rpartition(":")[2])
        if what != "start" and not any(slot == one and since < float(at) < until for one, since, until in clearings):
            written[gpu][f"{ticket} attempt {attempt}"].append((number, float(at)))
    for gpu, found in written.items():
        there: list[str] = []
        for job, own in found.items():  # in the order of their first lines
            there = [other for other in there if found[other][-1] > own[0]]
            broken += [f"GPU {gpu}: {other} and {job} computed at once" for other in there if mix(found[other], own)]
            there.append(job)
    return broken


def count_breaks(lines: list[list[str]]) -> int:
    """Return how often a job stood still for a while, most likely because it was paused: a run without that says little
    about pauses."""
    latest: dict[tuple[str, ...], float] = {}
    breaks = 0
    for what, *who, _, _, _, at in lines:
        if what != "start":
            breaks += float(at) - latest.get(tuple(who), float(at)) > LONGEST_BEAT_S
            latest[tuple(who)] = float(at)
    return breaks


def mix(one: list[tuple[int, float]], other: list[tuple[int, float]]) -> bool:
    """Return whether the lines of two jobs, by number and time, alternate as only jobs do that compute at once."""
    both = sorted([(*line, 0) for line in one] + [(*line, 1) for line in other])
    mixed = 0
    for (_, before, first), (_, _, between), (_, after, second) in zip(both, both[1:], both[2:], strict=False):
        mixed = mixed + 1 if first == second != between and after - before < LONGEST_BEAT_S else 0
        if mixed == MIXED:
            return True
    return False


def run(world: World, kills: int, drawn: random.Random) -> dict:
    world.serve()
    world.wait_until_up()
    world.operator = tenants.Operator(world, random.Random(drawn.random()), GPUS)
    world.operator.describe()
    clients = [threading.Thread(target=world.client, args=(number, drawn.random())) for number in range(CLIENTS)]
    clients.append(threading.Thread(target=world.operator.run))
    for client in clients:
        client.start()
    hits = 0
    try:
        for _ in range(kills):
            if drawn.random() < 0.8:  # else it is killed while it starts
                world.wait_until_up()
            until = time.monotonic() + world.slowness * drawn.choice([0.2, 1.0, 2.0, 3.0]) * drawn.uniform(0.5, 1.5)
            while time.monotonic() < until:
                hits += drawn.random() < 0.2 and world.kill_a_process(drawn)
                time.sleep(0.05)
            if world.service.poll() is not None:
                raise SystemExit(f"the service ended by itself: {world.log.read_text()[-2000:]}")
            world.up.append(("down", repr(time.time())))
            world.service.kill()
            world.service.wait()
            world.serve()
        world.wait_until_up()
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
        "breaks": count_breaks(world.lines()),
        "closures": len(world.operator.closed),
        "at_limit": sum(str(row.get("reason")).startswith("ran to its") for own in rows.values() for row in own),
        "violations": broken,
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    began = time.monotonic()
    world = World(Path(tempfile.mkdtemp(prefix="carpool-outside-")))
    try:
        result = run(world, given.kills, random.Random(given.seed))
    finally:
        if world.service is not None:
            world.service.terminate()
            world.service.wait()
    if result["violations"]:
        result["folder"] = str(world.ledger.parent)
    else:
        shutil.rmtree(world.ledger.parent, ignore_errors=True)
    print(json.dumps({**result, "seconds": round(time.monotonic() - began, 1)}))
    return 1 if result["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
