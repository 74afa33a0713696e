"""Kill the service, its wrappers and its workers at random moments, restart it, and look for violated guarantees.

`python tests/live/service/chaos.py --rounds 20 --seed 1`. Each round forks a service that submits, cancels, holds,
pauses, resumes and requeues jobs at random, and kills it: after some time, or at a chosen step of its work. Owners and
the policy pause jobs. Users of groups with shares and caps submit them, some with time limits, and operators drain and
reserve GPUs (chaos_tenants.py). Workers write into one ledger when they start, every few hundredths of a second, and
when they end. Lines are appended whole, so their order is that of events. All the time the service compares its jobs
with the kernel (which of them are stopped), and this process counts the jobs that are not stopped on each GPU. In the
end the service runs until all jobs have ended, and the ledger is compared with the journal. Exit code 1: a guarantee
was violated.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from carpool.core import events as ev
from carpool.core.codec import decode
from carpool.core.model import Status
from carpool.errors import InputError
from carpool.live.executors import gang, launching, local, switching
from carpool.live.executors.processes import process_stat, start_ticks, strays
from carpool.live.home import Home, read_json
from carpool.live.journal import store
from carpool.live.service import dispatcher, driver, requests
from carpool.live.service import users as user_rows
from carpool.live.service.config import ServiceConfig
from carpool.live.service.service import Service, open_service
from carpool.live.spec import Spec

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.live.service import chaos_tenants as tenants
from tests.support.processes import is_paused

GPUS, PER_GPU, RESIDENTS = 3, 2, 4
RESTLESS = f"{Path(__file__).with_name('chaos_policy.py')}:Restless"
POLICIES = ["sjf-bsbf", "sjf-ffs", "fifo", "tiresias:threshold_gpu_s=0.3", RESTLESS, RESTLESS, RESTLESS]
PATIENCE_S = 5.0
"""Seconds in which what ended jobs leave behind must be gone."""
LOOKS = 3
"""Number of looks in a row at which a GPU must have too many jobs: a switch may happen during one."""
WORKER = """
import os, signal, sys, time
if sys.argv[3]: signal.signal(signal.SIGTERM, signal.SIG_IGN)
ledger, seconds = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND), float(sys.argv[2])
names = ("CARPOOL_JOB", "CARPOOL_ATTEMPT", "RANK", "WORLD_SIZE", "CARPOOL_GPUS")
me = [os.environ[name] for name in names] + [str(os.getpid())]
def say(what): os.write(ledger, (" ".join([what, *me, *sys.argv[4:6], repr(time.time())]) + "\\n").encode())
done, kept = 0, None
if sys.argv[6]:  # it goes on from where it was
    kept = os.open(os.path.join(os.environ["CARPOOL_CHECKPOINT_DIR"], "done-" + me[2]), os.O_RDWR | os.O_CREAT, 0o600)
    done = int(os.read(kept, 9) or 0)
say("start")
for step in range(done, int(seconds / 0.03)):  # a clock would count pauses
    time.sleep(0.03)
    say("beat")
    if kept: os.pwrite(kept, b"%9d" % (step + 1), 0)
say("end")
"""
STEPS = [
    (store.Store, "_write"),
    (dispatcher.Dispatcher, "act"),
    (driver.Driver, "_step"),
    (launching.GangLauncher, "prepare"),
    (launching.GangLauncher, "_start_wrappers"),
    (local.LocalExecutor, "_stop_workers"),
    (dispatcher.Dispatcher, "switch"),
    (gang.LocalGang, "ask_to_switch"),
    (switching, "write_private"),
    (switching, "_has_answered"),
    (local.LocalExecutor, "_report_switch"),
    (local.LocalExecutor, "_forget"),
    (launching, "_spawn_wrapper"),
    (local, "write_exclusive"),
    (requests.Requests, "_write_specs"),
]
"""Steps before or after which a service may be killed."""


class World:
    def __init__(self, folder: Path) -> None:
        self.home = Home(folder / "home")
        self.worker, self.ledger = folder / "worker.py", folder / "ledger"
        self.accepted, self.touched = folder / "accepted", folder / "touched"
        self.mistakes, self.looks, self.up = folder / "mistakes", folder / "looks", folder / "up"
        """What was seen to be wrong while services ran, one line for each look at a paused job, and when a service was
        up."""
        self.worker.write_text(WORKER)
        for path in (self.ledger, self.accepted, self.touched, self.mistakes, self.looks, self.up):
            path.touch()

    def spec(self, drawn: random.Random, user: str) -> tuple[Spec, float]:
        """Return a job, and how long it computes."""
        seconds, keeps = drawn.choice([0.02, 0.2, 0.5, 1.0, 1.5]), False
        spec = Spec(
            command=("true",),
            directory="/tmp",
            gpus=drawn.choice([1, 1, 2, 3]),
            duration_s=seconds * tenants.STATED.get(user, 10),
            retries=drawn.choice([0, 3]),
            grace_s=tenants.GRACE_S,
            exclusive=drawn.random() < 0.1,
            can_pause=drawn.random() < 0.9,
            watch=drawn.random() < 0.5,
        )
        if drawn.random() < 0.3:
            spec, seconds, keeps = tenants.with_limit(spec, drawn)
        deaf, group = drawn.choice(["", "deaf"]), tenants.GROUPS.get(user, "-")
        command = self.command(seconds, group, deaf, spec.limit_s or 0.0, "keeps" if keeps else "").command
        return replace(spec, command=command), seconds

    def command(self, seconds: float, group: str, deaf: str = "", limit_s: float = 0.0, keeps: str = "") -> Spec:
        """Return a job of the worker. `keeps`: it goes on from where it was."""
        program = (sys.executable, "-I", "-S", str(self.worker), str(self.ledger))
        words = (str(seconds), deaf, group, str(limit_s), keeps)
        return Spec((*program, *words), "/tmp", grace_s=tenants.GRACE_S, priority=1000)

    def config(self, policy: str) -> ServiceConfig:
        numbers = {"gpus": GPUS, "jobs_per_gpu": PER_GPU, "resident_per_gpu": RESIDENTS}
        return ServiceConfig(self.home, policy, **numbers, gang_pause_s=10.0)


def note(path: Path, *words: object) -> None:
    with path.open("a") as file:
        file.write(" ".join(map(str, words)) + "\n")


def lines(path: Path) -> list[list[str]]:
    return [line.split() for line in path.read_text().splitlines()]


# ---- one run of the service -----------------------------------------------------------------------------------------


def die_at(drawn: random.Random) -> None:
    """Make this process kill itself at the n-th call of a step, before it or after it."""
    place, name = drawn.choice(STEPS)
    left, before = drawn.randint(1, 6), drawn.random() < 0.5
    real = getattr(place, name)

    def deadly(*arguments, **named):
        nonlocal left
        left -= 1
        if left == 0 and before:
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*arguments, **named)
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(place, name, deadly)


def pause_slowly(drawn: random.Random) -> None:
    """Make some pauses take long, as those of large jobs do, so that what does not wait for them is seen."""
    real = switching.GangSwitch.run

    async def slow(self, gang, mine):
        if gang.paused and drawn.random() < 0.5:
            await asyncio.sleep(0.25)
        return await real(self, gang, mine)

    switching.GangSwitch.run = slow


async def live(world: World, drawn: random.Random, down: int) -> None:
    service = await open_service(world.config(drawn.choice(POLICIES)))
    note(world.up, "up", time.time())
    os.close(down)
    running = asyncio.create_task(service.run())
    await tenants.describe_tenants(service, drawn)
    while not running.done():
        rows = service.queries.jobs()
        known, held = [row["job"] for row in rows], [row["job"] for row in rows if row["held"]]
        paused = [job for job in known if service.state.jobs[job].paused_by_owner]
        busy = len(rows) - len(held) - len(paused)
        with contextlib.suppress(InputError):  # the job may have ended meanwhile
            action = drawn.random()
            if busy < 12 and action < 0.4:
                user = tenants.owner(drawn)
                wanted = [world.spec(drawn, user) for _ in range(drawn.randint(1, 5))]
                jobs = await service.requests.submit([spec for spec, _ in wanted], user)
                for job, (_, seconds) in zip(jobs, wanted, strict=True):
                    note(world.accepted, job, seconds)
            elif known and 0.4 < action < 0.45:
                job = drawn.choice(known)
                note(world.touched, "cancel", job)
                await service.requests.cancel(job)
            elif known and 0.45 < action < 0.53:
                await service.requests.requeue(drawn.choice(known))
            elif known and 0.53 < action < 0.56:
                await service.requests.hold(drawn.choice(known))
            elif held and action > 0.9:
                await service.requests.release(drawn.choice(held))
            elif 0.56 < action < 0.63:
                await tenants.act(service, drawn, GPUS)
        with contextlib.suppress(InputError):
            up = [row["job"] for row in rows if row["status"] in ("starting", "running")]
            if up and drawn.random() < 0.4:
                await service.requests.pause(drawn.choice(up))
            elif paused and drawn.random() < 0.6:
                await service.requests.resume(drawn.choice(paused))
        await asyncio.sleep(drawn.choice([0.0, 0.01, 0.03]))
        if drawn.random() < 0.3:
            await compare(world, service)
    await running


async def compare(world: World, service) -> None:
    """Compare jobs that run and jobs that are paused with the kernel. A process that was just killed may look odd."""
    for wrong in mismatches(world, service):
        await asyncio.sleep(0.1)
        if wrong in mismatches(world, service):
            note(world.mistakes, wrong)


def mismatches(world: World, service) -> list[str]:
    wrong = []
    for record in service.state.jobs.values():
        if record.status not in (Status.RUNNING, Status.PAUSED):
            continue
        paused, attempt = record.status is Status.PAUSED, world.home.attempt(record.job.id, record.attempt)
        if any(attempt.glob("rank-*/stop.json")):  # one of its workers failed, so the others are ended
            continue
        for path in attempt.glob("rank-*"):
            pid = living_worker(path)
            if pid is not None:
                note(world.looks, "paused" if paused else "running")
            if pid is not None and is_paused(pid) is not paused:
                state = "stopped" if is_paused(pid) else "running"
                wrong.append(f"job {record.job.id}, attempt {record.attempt}, {path.name} is {state}: {record.status}")
    return wrong


def living_worker(path: Path) -> int | None:
    """Return the worker of a rank's directory, unless it has ended."""
    record = read_json(path / "process.json")
    worker = record.get("worker") if isinstance(record, dict) else None
    if worker is None or start_ticks(worker["pid"]) != worker["start"]:
        return None
    return worker["pid"]


async def drain(world: World) -> list[dict]:
    """Run until all jobs have ended, and return their rows."""
    service = await open_service(world.config(POLICIES[0]))
    note(world.up, "up", time.time())
    running = asyncio.create_task(service.run())
    long = [world.command(tenants.TOO_LONG_S, "-") for _ in range(GPUS)]
    for job in await tenants.clear_at_once(service, long, GPUS):
        note(world.accepted, job, tenants.TOO_LONG_S)
        note(world.touched, "cancel", job)
        await service.requests.cancel(job)
    await tenants.open_all(service)
    async with asyncio.timeout(60):
        while service.state.switching:
            await asyncio.sleep(0.02)
    await compare(world, service)
    async with asyncio.timeout(180):
        while rows := service.queries.jobs():
            for row in rows:
                with contextlib.suppress(InputError):  # it may have ended meanwhile
                    if row["held"]:
                        await service.requests.release(row["job"])
                    elif (record := service.state.jobs.get(row["job"])) is not None and record.paused_by_owner:
                        await service.requests.resume(row["job"])
            await compare(world, service)
            await asyncio.sleep(0.05)
    rows = service.queries.jobs(all=True)
    compare_usage(world, service, rows)
    note(world.up, "down", time.time())
    await service.close()
    await running
    return rows


def compare_usage(world: World, service: Service, rows: list[dict]) -> None:
    """The accounts went through all kills: they know every job, and their hours are those of the GPUs and workers."""
    jobs = Counter(row["user"] for row in rows)
    for wrong in tenants.judge_usage(service.queries.usage(("user",)), tenants.read_runs(lines(world.ledger)), jobs):
        note(world.mistakes, wrong)


def fork(run) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        run()
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def one_round(world: World, drawn: random.Random) -> None:
    seed, by_step, early = drawn.random(), drawn.random() < 0.5, drawn.random() < 0.2
    up, down = os.pipe()

    def run() -> None:
        inner = random.Random(seed)
        os.close(up)
        launching.GangLauncher.cgroups = inner.random() < 0.5
        pause_slowly(inner)
        if by_step:
            die_at(inner)
        asyncio.run(live(world, inner, down))

    pid = fork(run)
    os.close(down)
    if not early:  # count from the moment at which the service is open; on a busy machine that takes a while
        os.read(up, 1)
    os.close(up)
    long = drawn.random() < 0.2  # long enough for GPUs to fill up and for many switches
    until = time.monotonic() + (drawn.uniform(2.0, 4.0) if long else drawn.uniform(0.0, 0.8))
    while time.monotonic() < until:
        look_for_too_many(world)
        if drawn.random() < 0.08:
            kill_a_process(world, drawn)
        time.sleep(0.03)
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            break
    else:
        os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
    note(world.up, "down", time.time())
    if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
        raise SystemExit(f"a service ended by itself with status {status}")


def look_for_too_many(world: World) -> None:
    """Count the jobs on each GPU that are not stopped, except those that are being ended, which must go on for that."""
    crowded = None
    for _ in range(LOOKS):
        found = {f"GPU {gpu}: {sorted(jobs)}" for gpu, jobs in computing(world).items() if len(jobs) > PER_GPU}
        crowded = found if crowded is None else crowded & found
        if not crowded:
            return
    for place in crowded:
        note(world.mistakes, f"too many jobs compute on {place}")


def computing(world: World) -> dict[int, set[str]]:
    there: dict[int, set[str]] = defaultdict(set)
    for name in os.listdir(world.home.running) if world.home.running.exists() else ():
        job, _, attempt = name.partition("-")
        for path in world.home.attempt(job, int(attempt)).glob("rank-*"):
            pid = living_worker(path)
            slots = (read_json(path.parent / "gang.json") or {}).get("slots")
            if pid is None or slots is None or is_paused(pid) or any(path.parent.glob("rank-*/stop.json")):
                continue
            if (process_stat(pid) or "Z")[0] not in "ZX":
                there[slots[int(path.name.partition("-")[2])]["id"]].add(name)
    return there


def kill_a_process(world: World, drawn: random.Random) -> None:
    """Kill a worker or a wrapper that runs now."""
    found = []
    for name in os.listdir(world.home.running) if world.home.running.exists() else ():
        job, _, attempt = name.partition("-")
        for record in world.home.attempt(job, int(attempt)).glob("rank-*/process.json"):
            with contextlib.suppress(OSError, ValueError):
                data = json.loads(record.read_text())
                found += [(job, process) for process in (data, data.get("worker")) if process]
    if found:
        job, process = drawn.choice(found)
        if start_ticks(process["pid"]) == process["start"]:
            note(world.touched, "kill", job)
            with contextlib.suppress(OSError):
                os.kill(process["pid"], signal.SIGKILL)


# ---- judging ---------------------------------------------------------------------------------------------------------


def judge(world: World, rows: list[dict]) -> list[str]:
    broken = [" ".join(words) for words in lines(world.mistakes)]
    states = {row["job"]: row for row in rows}
    touched = defaultdict(set)
    for what, job in lines(world.touched):
        touched[job].add(what)
    for job, _ in lines(world.accepted):
        state = states.get(job, {}).get("status")
        if state is None:
            broken.append(f"job {job} was accepted and is lost")
        elif state not in ("finished", "failed", "cancelled"):
            broken.append(f"job {job} is {state} at the end")
        elif state == "cancelled" and "cancel" not in touched[job]:
            broken.append(f"job {job} was cancelled without a request")
        elif state == "failed" and "kill" not in touched[job] and not ended_at_limit(states[job]):
            broken.append(f"job {job} failed although none of its processes was killed: {states[job]['reason']}")
    broken += judge_ledger(lines(world.ledger), states)
    broken += judge_journal(world, lines(world.ledger), states)
    broken += judge_tenants(world)
    broken += judge_exits(world, states)
    left = [pid for path in world.home.jobs.glob("*/attempt-*/rank-*") for pid in strays(str(path))]
    records = (read_json(path) or {} for path in world.home.jobs.glob("*/attempt-*/rank-*/process.json"))
    cgroups = [found for record in records if (found := record.get("cgroup"))]
    until = time.monotonic() + PATIENCE_S  # a wrapper removes its cgroup after it has recorded the exit
    while (cgroups := [path for path in cgroups if os.path.exists(path)]) and time.monotonic() < until:
        time.sleep(0.05)
    broken += [f"cgroups are left: {cgroups}"] * bool(cgroups)
    return broken + [f"processes are left: {left}"] * bool(left)


def ended_at_limit(row: dict) -> bool:
    return bool(row.get("limit_s")) and row["reason"].startswith("ran to its limit")


def judge_tenants(world: World) -> list[str]:
    runs, uptime = tenants.read_runs(lines(world.ledger)), tenants.read_uptime(lines(world.up))
    events = read_events(world)
    closed = tenants.closed_times(events, time.time())
    starts, _ = tenants.judge_starts(events, tenants.read_seconds(world.accepted))
    late = tenants.judge_limits(runs, uptime) + tenants.judge_cleared(runs, closed, uptime)
    return tenants.judge_caps(runs) + late + starts


def read_events(world: World) -> list[ev.Event]:
    book = store.Store(world.home.journal)
    book.open()
    rows = book.rows(10**7)
    book.close()
    return [decode(json.loads(row["data"])) for row in rows if row["kind"] not in ("Note", "Damaged")]


def judge_ledger(ledger: list[list[str]], states: dict[str, dict]) -> list[str]:
    broken: list[str] = []
    runs: dict[tuple[str, int, int], dict] = {}
    for at, (what, job, attempt, rank, size, gpu, pid, *_) in enumerate(ledger):
        key = (job, int(attempt), int(rank))
        run = runs.setdefault(key, {"first": at, "gpu": gpu, "pid": pid, "size": int(size), "ended": False})
        run["last"] = at
        run["ended"] |= what == "end"
        if run["pid"] != pid:
            broken.append(f"job {job}, attempt {attempt}, worker {rank} was started twice")
    by_job: dict[str, dict[int, list[dict]]] = defaultdict(lambda: defaultdict(list))
    for (job, attempt, _), run in runs.items():
        by_job[job][attempt].append(run)
    for job, attempts in by_job.items():
        order = sorted(attempts)
        for earlier, later in pairwise(order):
            if max(run["last"] for run in attempts[earlier]) > min(run["first"] for run in attempts[later]):
                broken.append(f"job {job}: attempts {earlier} and {later} ran at once")
        whole = [
            n for n, found in attempts.items() if len(found) == found[0]["size"] and all(r["ended"] for r in found)
        ]
        if states.get(job, {}).get("status") == "finished" and not whole:
            broken.append(f"job {job} is called finished, but no attempt was complete")
    for job, row in states.items():
        if row["status"] == "finished" and job not in by_job:
            broken.append(f"job {job} is called finished, but it never ran")
    return broken + judge_gpus(runs)


def judge_exits(world: World, states: dict[str, dict]) -> list[str]:
    """Look for jobs that ran again after they had succeeded, in the wrappers' own records.

    What the workers wrote does not tell: one that wrote that it ended may have been killed before it exited.
    """
    broken = []
    attempts = defaultdict(list)
    for path in world.home.jobs.glob("*/attempt-*"):
        number = path.name.removeprefix("attempt-")
        if number.isdigit():
            attempts[path.parent.name].append((int(number), path))
    for job, found in attempts.items():
        last = max(number for number, _ in found)
        for number, path in found:
            ranks = (read_json(path / "gang.json") or {}).get("ranks", 0)
            exits = [read_json(path / f"rank-{rank}" / "exit.json") or {} for rank in range(ranks)]
            if not exits or any(e.get("code") != 0 or e.get("stage") in ("ending", "killed") for e in exits):
                continue
            if number < last:
                broken.append(f"job {job} succeeded as attempt {number} and ran again up to attempt {last}")
            elif states.get(job, {}).get("status") not in ("finished", None):
                broken.append(f"job {job} succeeded as attempt {number}, and is called {states[job]['status']}")
    return broken


def judge_gpus(runs: dict[tuple[str, int, int], dict]) -> list[str]:
    broken = []
    changes = defaultdict(list)
    for (job, _, _), run in runs.items():
        changes[run["gpu"]] += [(run["first"], 1, job), (run["last"] + 0.5, -1, job)]
    for gpu, moments in changes.items():
        there = 0
        for _, change, _ in sorted(moments):
            there += change
            if there > RESIDENTS:
                broken.append(f"GPU {gpu} held {there} jobs at once")
                break
    return broken


def judge_journal(world: World, ledger: list[list[str]], states: dict[str, dict]) -> list[str]:
    """Compare the journal with what the workers wrote."""
    broken = []
    events = read_events(world)
    planned, placed = defaultdict(int), {}
    ends = {type(event).__name__: set() for event in events}
    for event in events:
        if isinstance(event, ev.Planned):
            for decision in event.decisions:
                gpus = decision.allocation.gpus if decision.allocation is not None else None
                planned[decision.job] += gpus is not None and gpus != placed.get(decision.job)  # else it stays
                placed[decision.job] = gpus
        elif isinstance(event, ev.Stopped | ev.Failed | ev.Requeued):
            placed.pop(event.job, None)
            ends[type(event).__name__].add(event.job)
        elif hasattr(event, "job") and not isinstance(event, ev.Submitted):
            ends[type(event).__name__].add(event.job)
    for job, attempt in {(words[1], int(words[2])) for words in ledger}:
        if attempt > planned[job]:
            broken.append(f"job {job} ran as attempt {attempt}, and the journal knows {planned[job]}")
    for job, row in states.items():
        kind = {"finished": "Finished", "failed": "Failed"}.get(row["status"])
        kind = "LimitReached" if ended_at_limit(row) else kind
        if kind and job not in ends.get(kind, ()):
            broken.append(f"job {job} {row['status']}, and the journal does not say so")
    return broken


def acts(world: World) -> dict[str, int]:
    """Return how often what the judges look at happened: a run without it says little."""
    events = read_events(world)
    kinds = Counter(type(event).__name__ for event in events)
    _, beside = tenants.judge_starts(events, {})
    named = {"pauses": "Paused", "closures": "ClosureSet", "limits": "LimitReached", "tenants": "GroupChanged"}
    return {**{name: kinds[kind] for name, kind in named.items()}, "starts_before_closures": beside}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--show", action="store_true", help="print progress after every 50 rounds")
    parser.add_argument("--keep", type=Path, help="folder for a copy of everything if a guarantee was violated")
    given = parser.parse_args()
    user_rows.own_uid = lambda: 1000  # all jobs run as this user, also where that is root
    drawn = random.Random(given.seed)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="carpool-chaos-") as folder:
        world = World(Path(folder))
        for number in range(given.rounds):
            one_round(world, drawn)
            if given.show and number % 50 == 49:
                print(f"{number + 1} rounds, {len(lines(world.accepted))} jobs", file=sys.stderr)
        rows = asyncio.run(drain(world))
        broken = judge(world, rows)
        result = {
            "rounds": given.rounds,
            "jobs": len(lines(world.accepted)),
            "states": {
                state: sum(row["status"] == state for row in rows) for state in sorted({r["status"] for r in rows})
            },
            "killed": sum(words[0] == "kill" for words in lines(world.touched)),
            "looks": {kind: sum(words == [kind] for words in lines(world.looks)) for kind in ("paused", "running")},
            **acts(world),
            "attempts": len({(words[1], words[2]) for words in lines(world.ledger)}),
            "seconds": round(time.monotonic() - began, 1),
            "violations": broken,
        }
        print(json.dumps(result))
        if broken and given.keep:
            shutil.copytree(folder, given.keep, dirs_exist_ok=True)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
