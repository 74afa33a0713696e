"""Measure what pausing brings: mean JCT of the joint rule against the sharing lower bound and SJF-BSBF.

    CARPOOL_DATA=… python bench/pausing.py [--held-out]

The calibrated workloads (seeds 1-8), or with --held-out generated ones (philly-like, seeds 101-108), on 64 GPUs with
Gavel's interference table, two jobs per GPU. `SrptSharing` is the comparison that suggests itself: shortest remaining
service first, preemptive, with a second job on a GPU wherever the two together get more done.
"""

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from carpool.core.draft import Draft
from carpool.core.model import Decision, Status
from carpool.core.view import JobView, View
from carpool.policies.base import BasePolicy, option
from carpool.sim import Setup, read, simulate
from carpool.sim.bound import lower_bound
from carpool.sim.sources import generated

SETUP = Setup(cluster="16x4", truth="gavel", ignore_placement=True, memory_limit=False)
POLICIES = ("sjf-bsbf", "carpool:pause=false", "carpool:pause=false,suspend=true", "carpool", "carpool:suspend=true")


@dataclass
class SrptSharing(BasePolicy):
    """Shortest remaining service first, preemptive; jobs that find no GPUs of their own join others."""

    name = "srpt-sharing"
    restart_s: float = option(30.0, "seconds that a suspended job needs to start again")

    def key(self, job: JobView, now: float) -> tuple[float, ...]:
        return (job.shape.gpus * job.whole_left(now),)

    def decide(self, view: View) -> list[Decision]:
        if not len(view.queue):
            return []
        draft = Draft(view)
        running = [job for job in view.running if job.status is Status.RUNNING]
        running.sort(key=lambda job: (self.key(job, view.now), job.seq), reverse=True)  # the longest go first
        for job in view.queue:
            victims = []
            for victim in running:
                if self.key(victim, view.now) <= self.key(job, view.now):
                    break
                if sum(len(v.gpus) for v in victims) + draft.free_count >= job.shape.gpus:
                    break
                if all(len(draft.jobs_on(gpu)) == 1 for gpu in victim.gpus):
                    victims.append(victim)
            if sum(len(v.gpus) for v in victims) + draft.free_count >= job.shape.gpus:
                for victim in victims:
                    draft.stop(victim, "another job has less service left")
                    running.remove(victim)
                draft.start(job, "it has the least service left")
            else:
                self._share(draft, job)
        return draft.decisions

    def _share(self, draft: Draft, job: JobView) -> None:
        """Join one lone host where total speed rises most."""
        view, size = draft.view, job.shape.sizes[0]
        best, speed = None, 1.0
        for host in view.running:
            if len(host.gpus) < job.shape.gpus or any(len(draft.jobs_on(gpu)) != 1 for gpu in host.gpus):
                continue
            ours = 1.0 / view.perf.slowdown(job.job, size.accumulation, [(host.job, host.accumulation)])
            theirs = 1.0 / view.perf.slowdown(host.job, host.accumulation, [(job.job, size.accumulation)])
            gpus = host.gpus[: job.shape.gpus]
            if ours + theirs > speed and all(draft.accepts(gpu, job, size) for gpu in gpus):
                best, speed = gpus, ours + theirs
        if best is not None:
            draft.assign(job, best, size, "the two get more done together")


def workloads(jobs: int, held_out: bool):
    if held_out:
        return [generated("philly-like", "t4", jobs=jobs, load=jobs / 240, seed=seed) for seed in range(101, 109)]
    path = Path(os.environ["CARPOOL_DATA"]) / "calibrated" / "workloads.csv"
    return [read(path, {"n": str(jobs), "seed": str(seed)}) for seed in range(1, 9)]


def main() -> None:
    held_out = "--held-out" in sys.argv[1:]
    print("| jobs | policy | × lower bound | pauses per job | suspensions per job | with memory limits, × sjf-bsbf |")
    print("| --- | --- | --- | --- | --- | --- |")
    for jobs in (240, 480):
        loads = workloads(jobs, held_out)
        bounds = [lower_bound(workload, SETUP).sharing_s for workload in loads]
        limited = replace(SETUP, memory_limit=True)
        base = [simulate(workload, "sjf-bsbf", limited).summary.mean_jct_s for workload in loads]
        for policy in (*POLICIES, SrptSharing()):
            runs = [simulate(workload, policy, SETUP).summary for workload in loads]
            ratio = fmean(run.mean_jct_s / bound for run, bound in zip(runs, bounds, strict=True))
            tight = [simulate(workload, policy, limited).summary.mean_jct_s for workload in loads]
            against = fmean(one / other for one, other in zip(tight, base, strict=True))
            pauses, stops = (fmean(getattr(run, what) for run in runs) / jobs for what in ("pauses", "preemptions"))
            name = policy if isinstance(policy, str) else policy.name
            print(f"| {jobs} | `{name}` | {ratio:.3f} | {pauses:.2f} | {stops:.2f} | {against:.3f} |", flush=True)


if __name__ == "__main__":
    main()
