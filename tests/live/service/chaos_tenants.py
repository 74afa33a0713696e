"""What tenants and operators do in chaos.py, and whether the rules about them held.

Users of two groups submit jobs, one group with a cap on its GPUs. Weights, guarantees and the strength of shares change
all the time. Some jobs have a time limit far below what they compute, and some of these go on from where they were.
GPUs are drained and reserved, at once or a little later. The judges believe the workers' own lines and the order of the
journal: a cap is never exceeded, a job at its limit and a job on closed GPUs is gone within a stated time, nothing
starts that would run into a closure, and the accounts contain every second in which a worker computed.
"""

import asyncio
import contextlib
import random
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from carpool.core import events as ev
from carpool.core.model import Closure, FairShare, Status, UserGroup
from carpool.errors import InputError
from carpool.live.accounts import ADMIN
from carpool.live.service import due_events
from carpool.live.service.service import Service
from carpool.live.spec import Spec

BEAT_S = 0.03
"""Seconds that a worker computes between two lines."""
GRACE_S = 0.3
"""Seconds in which a worker may save, and then again in which it may leave."""
GROUPS = {"ann": "red", "bob": "blue"}
STATED = {"ann": 1.5}
"""How many times their true durations users state: each user errs in one way, so that it can be learned. Others: 10."""
CAPS = {"red": 2}
"""Most GPUs of a group at a time."""
LIMIT_S = 1.0
TOO_LONG_S = 40.0
"""Seconds that a job computes that its time limit must end."""
LATE_S = due_events.EVERY_S + 2 * GRACE_S + 8.0
"""Seconds of services that are up in which a job at its limit, or on closed GPUs, must be gone: the pause between two
looks, the time to save and the time to leave, and what a busy machine adds."""
LONGEST_BEAT_S = 1.0
"""Seconds after a line of a worker in which it surely computes, if it writes again by then. Else it was paused."""
SURE = 0.5
"""Part of the time that a job really computes which a guess of it surely contains."""


@dataclass(frozen=True)
class Run:
    """One worker of one attempt, by its own lines."""

    job: str
    attempt: int
    rank: int
    gpu: int
    group: str
    limit_s: float
    """0: none."""
    times: list[float]
    """When it wrote."""


# ---- acts -----------------------------------------------------------------------------------------------------------


async def describe_tenants(service: Service, drawn: random.Random) -> None:
    """Describe users and groups. The caps are there before the first job of their groups."""
    for name, group in GROUPS.items():
        if name not in service.users.rows:
            row = {"role": "user", "uid": 1000, "token_hash": "", "revoked": False, "group": group}
            await service.requests.put_user(name, row)
    for group in GROUPS.values():
        weight, guarantee = drawn.choice([0.5, 1.0, 4.0]), drawn.choice([0, 1])
        await service.requests.set_group(UserGroup(group, weight, guarantee, CAPS.get(group)))
    await service.requests.set_fair_share(FairShare(drawn.choice([0.0, 0.5, 1.0]), drawn.choice([1.0, 100.0])))


def with_limit(spec: Spec, drawn: random.Random) -> tuple[Spec, float, bool]:
    """Return a job that its limit ends or, if it goes on after it, stops several times; how long it computes, and
    whether it goes on from where it was."""
    requeue = drawn.random() < 0.6
    seconds = 2.5 if requeue else TOO_LONG_S
    # not watched, because the first seconds of what may be a training do not count for its limit
    spec = replace(spec, limit_s=LIMIT_S, requeue=requeue, duration_s=10 * seconds, gpus=1, watch=False)
    return spec, seconds, requeue


def owner(drawn: random.Random) -> str:
    return drawn.choice([ADMIN, *GROUPS])


async def act(service: Service, drawn: random.Random, gpus: int) -> None:
    """Do what an operator may do at any time."""
    if drawn.random() < 0.15:
        await describe_tenants(service, drawn)
    else:
        await change_closures(service, drawn, gpus)


async def change_closures(service: Service, drawn: random.Random, gpus: int) -> None:
    """Drain or reserve a GPU, now or soon, or take back what is closed."""
    if service.state.closures and drawn.random() < 0.5:
        with contextlib.suppress(InputError):
            await service.requests.remove_closure(drawn.choice(sorted(service.state.closures)))
        return
    gpu, now = drawn.randrange(gpus), service.clock.now()
    begins = now + drawn.choice([0.0, 0.5, 3.0, 30.0])
    if drawn.random() < 0.5:
        closure = Closure(f"node0:{gpu}", (gpu,), begins, lets_finish=drawn.random() < 0.3)
    else:
        name, ends = f"r{drawn.randrange(100)}", begins + drawn.choice([0.5, 3.0, 20.0])
        closure = Closure(name, (gpu,), begins, ends, drawn.choice(sorted(GROUPS.values())))
    if closure.lets_finish:
        closure = replace(closure, start=now)
    await service.requests.set_closure(closure)


async def clear_at_once(service: Service, jobs: Sequence[Spec], gpus: int) -> list[str]:
    """Let long jobs run, drain all GPUs, and wait until none of them may compute any more. Return the jobs."""
    await open_all(service)
    names = list(await service.requests.submit(jobs, ADMIN))
    until = time.monotonic() + LATE_S
    while time.monotonic() < until and not any(service.state.jobs[name].status is Status.RUNNING for name in names):
        await asyncio.sleep(0.05)
    await service.requests.set_closure(Closure("node0", tuple(range(gpus)), service.clock.now()))
    await asyncio.sleep(LATE_S + 1.0)
    return names


async def open_all(service: Service) -> None:
    """Take back all closures, so that all jobs can end."""
    for name in list(service.state.closures):
        with contextlib.suppress(InputError):
            await service.requests.remove_closure(name)


# ---- judging --------------------------------------------------------------------------------------------------------


def read_runs(ledger: Iterable[Sequence[str]]) -> list[Run]:
    """Return the workers that wrote into the ledger."""
    runs: dict[tuple[str, str, str], Run] = {}
    for _, job, attempt, rank, _, gpu, _, group, limit, at in ledger:
        found = runs.get((job, attempt, rank))
        if found is None:
            slot = int(gpu.rpartition(":")[2])
            found = runs[job, attempt, rank] = Run(job, int(attempt), int(rank), slot, group, float(limit), [])
        found.times.append(float(at))
    return list(runs.values())


@dataclass(frozen=True)
class Uptime:
    """When services were up, by the process that killed them."""

    spans: Sequence[tuple[float, float]]

    def between(self, start: float, end: float) -> float:
        """Return for how long a service was up."""
        return sum(max(0.0, min(end, down) - max(start, up)) for up, down in self.spans)


def read_uptime(words: Iterable[Sequence[str]]) -> Uptime:
    """Return the spans of lines that say `up` and `down`. A service that was killed before it was up says only that."""
    spans, since = [], None
    for what, at in words:
        if what == "up":
            since = float(at)
        elif since is not None:
            spans.append((since, float(at)))
            since = None
    return Uptime(spans)


def judge_caps(runs: Iterable[Run]) -> list[str]:
    """Count the workers of each group with a cap; paused ones hold their GPUs, too."""
    broken = []
    for group, cap in CAPS.items():
        there: list[Run] = []
        for run in sorted((run for run in runs if run.group == group), key=lambda run: run.times[0]):
            there = [*(one for one in there if one.times[-1] > run.times[0]), run]
            if len(there) > cap:
                named = ", ".join(f"{one.job} attempt {one.attempt}" for one in there)
                overlap_s = min(one.times[-1] for one in there) - run.times[0]
                held = f"held {len(there)} for at least {overlap_s:.3f} s"
                broken.append(f"group {group} with a cap of {cap} GPUs {held}: jobs {named}")
    return broken


def judge_limits(runs: Iterable[Run], uptime: Uptime, beat_s: float = BEAT_S, late_s: float = LATE_S) -> list[str]:
    """Look for workers that computed long after their limit while a service was up. Pauses are no computing."""
    broken = []
    for run in runs:
        beats = int(run.limit_s / beat_s) + 1
        if run.limit_s and len(run.times) > beats + 1:
            spans = pairwise(run.times[beats:])
            late = sum(uptime.between(start, end) for start, end in spans if end - start <= LONGEST_BEAT_S)
            if late > late_s:
                broken.append(f"job {run.job}, attempt {run.attempt} computed for {late:.1f} s after its limit")
    return broken


@dataclass(frozen=True)
class Closed:
    """A closure, and when it was taken back or over."""

    closure: Closure
    until: float


def closed_times(events: Iterable[ev.Event], end: float) -> list[Closed]:
    """Return the closures of a journal."""
    there: dict[str, Closure] = {}
    found = []
    for event in events:
        if isinstance(event, ev.ClosureSet | ev.ClosureRemoved):
            name = event.closure.id if isinstance(event, ev.ClosureSet) else event.closure
            if name in there:
                found.append(Closed(there.pop(name), event.at))
            if isinstance(event, ev.ClosureSet):
                there[name] = event.closure
    return found + [Closed(closure, end) for closure in there.values()]


def judge_cleared(runs: Iterable[Run], closed: Sequence[Closed], uptime: Uptime, late_s: float = LATE_S) -> list[str]:
    """Look for workers that computed on closed GPUs: all jobs can be saved, so all of them have to leave."""
    broken = []
    for run in runs:
        for one in closed:
            closure = one.closure
            if run.gpu not in closure.gpus or closure.lets_finish or run.group == closure.group:
                continue
            there = [at for at in run.times if closure.start < at < one.until]  # a paused one writes nothing
            late = uptime.between(closure.start, there[-1]) if there else 0.0
            if late > late_s:
                broken.append(f"job {run.job} computed on GPU {run.gpu} for {late:.1f} s after {closure.id} had begun")
    return broken


def judge_starts(events: Iterable[ev.Event], seconds: Mapping[str, float]) -> tuple[list[str], int]:
    """Look for starts on GPUs that were closed, or were to be closed before the job could have ended. Return also how
    many starts on GPUs with a closure were looked at. `seconds`: how long jobs compute."""
    broken, looked = [], 0
    closures: dict[str, Closure] = {}
    jobs, placed, first = {}, {}, set()
    for event in events:
        if isinstance(event, ev.ClosureSet):
            closures[event.closure.id] = event.closure
        elif isinstance(event, ev.ClosureRemoved):
            closures.pop(event.closure, None)
        elif isinstance(event, ev.Submitted):
            jobs[event.job.id] = event.job
        elif isinstance(event, ev.Stopped | ev.Failed | ev.Requeued):
            placed.pop(event.job, None)
        elif isinstance(event, ev.Planned):
            for decision in event.decisions:
                gpus = decision.allocation.gpus if decision.allocation is not None else None
                begins, placed[decision.job] = gpus != placed.get(decision.job), gpus
                if gpus is None or not begins:
                    continue
                new = decision.job not in first
                first.add(decision.job)
                job = jobs[decision.job]
                least = SURE * min(seconds.get(job.id, 0.0), job.limit_s or 1e9) if new else 0.0
                for closure in closures.values():
                    if closure.is_for(job) or not set(gpus) & set(closure.gpus):
                        continue
                    looked += 1
                    if event.at + least > closure.start:
                        broken.append(f"job {job.id} was started at {event.at:.2f} on GPUs that {closure.id} closes "
                                      f"at {closure.start:.2f}")  # fmt: skip
    return broken, looked


def computed_gpu_s(runs: Iterable[Run]) -> float:
    """Return the GPU-seconds in which workers computed by their own lines, those that share a GPU counted once."""
    by_gpu: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for run in runs:
        for before, after in zip(run.times, run.times[1:], strict=False):
            if after - before < 10 * BEAT_S:  # else it was paused
                by_gpu[run.gpu].append((before, after))
    total = 0.0
    for spans in by_gpu.values():
        end = 0.0
        for start, stop in sorted(spans):
            total += max(0.0, stop - max(start, end))
            end = max(end, stop)
    return total


def judge_usage(told: Mapping[str, Any], runs: Iterable[Run], jobs: Mapping[str, int]) -> list[str]:
    """Compare the accounts by user with the workers' lines, and with the number of jobs of each user."""
    broken = []
    rows = {row["user"]: row for row in told["rows"]}
    for user, number in jobs.items():
        if rows.get(user, {}).get("jobs") != number:
            broken.append(f"the accounts know {rows.get(user, {}).get('jobs')} jobs of {user}, and {number} ended")
    total, gpus = told["total"], told["gpus"]
    missing = gpus["existed_gpu_s"] - total["held_gpu_s"] - gpus["idle_gpu_s"] - gpus["closed_gpu_s"]
    if abs(missing) > 1e-6 * gpus["existed_gpu_s"]:
        broken.append(f"the accounts miss {missing} GPU-seconds of {gpus['existed_gpu_s']}")
    wrote = computed_gpu_s(runs)
    if total["held_gpu_s"] < wrote - 1.0:
        broken.append(f"workers computed for {wrote:.1f} GPU-seconds, and the accounts have {total['held_gpu_s']:.1f}")
    return broken


def read_seconds(path: Path) -> dict[str, float]:
    """Return how long jobs compute, from the lines that were written when they were accepted."""
    return {words[0]: float(words[1]) for line in path.read_text().splitlines() if len(words := line.split()) > 1}
