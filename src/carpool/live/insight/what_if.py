"""What if: the jobs that ran here, simulated under other policies, for `carpool replay` and the dashboard.

The simulation of a long history takes seconds of CPU time, so the service runs this module as a process of its own:
`python -m carpool.live.insight.what_if` reads a request as JSON and writes the answer as JSON.
"""

import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from carpool import policies
from carpool.core import events as ev
from carpool.core.model import Job, UserGroup
from carpool.core.perf import GENERIC
from carpool.errors import InputError
from carpool.job_schema import SUBMITTED_COLUMNS
from carpool.profile.schema import load
from carpool.sim.fairness import Fairness, measure_jobs, own_jcts
from carpool.sim.run import Setup, simulate
from carpool.sim.timeline import segments
from carpool.sim.workload import Workload

Row = Mapping[str, Any]
MOST_JOBS = 1000
"""Number of jobs that the dashboard replays: the latest."""
TIMEOUT_S = 60.0
NICE = 10


def jobs_of(rows: Sequence[Row], known: set[str]) -> list[Job]:
    """Return the jobs for the simulator: in order of submission, from time 0 on, with their measured durations."""
    ran = sorted((row for row in rows if row["alone_s"] > 0.0), key=lambda row: row["submitted"])
    ids = {row["job"] for row in ran}
    return [
        Job(
            **{
                **{one.name: row[one.name] for one in SUBMITTED_COLUMNS if one.name in row},
                "id": row["job"],
                "submitted": row["submitted"] - ran[0]["submitted"],
                "user": row["user"],
                "group": row.get("group", ""),
                "model": row["model"] if row["model"] in known else GENERIC,
                "duration_s": row["alone_s"],
                "after": tuple(name for name in row.get("after", ()) if name in ids),
            }
        )
        for row in ran
    ]


def workload_of(rows: Sequence[Row], profile: str) -> Workload:
    """Return the finished jobs of a history as a workload; raise `InputError` if there are none."""
    jobs = jobs_of(rows, set(load(profile).core_tasks()))
    if not jobs:
        raise InputError("no job has finished here; replay when one has")
    return Workload(tuple(jobs), "history")


def fairness_of(rows: Sequence[Row], cluster: str, weights: Mapping[str, float]) -> Fairness | None:
    """Return how evenly the groups (or users) of finished jobs were treated here; None: there is only one."""
    groups = tuple(UserGroup(name, weight) for name, weight in weights.items())
    setup = Setup(cluster=cluster, truth="1.5", memory_limit=False, groups=groups)
    workload, by_id = workload_of(rows, setup.profile), {row["job"]: row for row in rows}
    done = []
    for job in workload.jobs:
        row = by_id[job.id]
        done.append((job, row["finished"] - row["submitted"], row["ran_s"] * job.gpus))
    return measure_jobs(done, own_jcts(workload.jobs, setup), weights)


def compare(rows: Sequence[Row], cluster: str, jobs_per_gpu: int, names: Sequence[str]) -> dict[str, Any]:
    """Simulate a history under each policy. Return what was achieved, and each policy's times and picture."""
    setup = Setup(cluster=cluster, profile="t4", truth="1.5", jobs_per_gpu=jobs_per_gpu, memory_limit=False)
    workload = workload_of(rows, setup.profile)
    done = [row for row in rows if row["alone_s"] > 0.0]
    achieved = {
        "mean_jct_s": fmean(row["finished"] - row["submitted"] for row in done),
        "mean_queue_s": fmean(row["started"] - row["submitted"] for row in done),
    }
    runs = [_simulated(workload, name, setup) for name in names]
    named = {row["job"]: {"name": row["name"], "user": row["user"]} for row in done}
    return {"jobs": len(done), "cluster": cluster, "achieved": achieved, "runs": runs, "names": named}


def _simulated(workload: Workload, name: str, setup: Setup) -> dict[str, Any]:
    events: list[ev.Event] = []
    summary = simulate(workload, name, setup, log=events.append).summary
    slices = [
        {"gpu": one.gpu, "start": one.start, "end": one.end, "jobs": one.jobs, "paused": sorted(one.paused)}
        for one in segments(events)
    ]
    times = {key: getattr(summary, key) for key in ("mean_jct_s", "mean_queue_s", "makespan_s")}
    return {"policy": name, **times, "slices": slices}


class WhatIf:
    """Runs one comparison at a time, in a process of its own."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def ask(self, rows: Sequence[Row], cluster: str, jobs_per_gpu: int, own: str, other: str) -> dict[str, Any]:
        """Return the answer of `compare` for the policy of this service and another one that is built in.

        A policy by the name of a file would run code that a user chose. Raise `InputError` if the request is refused or
        takes too long.
        """
        if other not in policies.BUILT_IN:
            raise InputError(f"policy {ascii(other)[:60]}: is not built in; `carpool policies` lists those that are")
        names = [own, other]
        request = {"rows": list(rows)[-MOST_JOBS:], "cluster": cluster, "jobs_per_gpu": jobs_per_gpu, "names": names}
        async with self._turn:
            return await _in_a_process(json.dumps(request).encode())


async def _in_a_process(request: bytes) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        __name__,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        said, _ = await asyncio.wait_for(process.communicate(request), TIMEOUT_S)
    except TimeoutError:
        raise InputError(f"the simulation takes longer than {TIMEOUT_S:g} s; use `carpool replay`") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    answer: dict[str, Any] = json.loads(said or b"{}")
    if "error" in answer or process.returncode:
        raise InputError(answer.get("error", "the simulation failed; `carpool replay` says why"))
    return answer


def main() -> None:
    """Answer one request."""
    os.nice(NICE)
    try:
        answer = compare(**json.load(sys.stdin))
    except InputError as error:
        answer = {"error": str(error)}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
