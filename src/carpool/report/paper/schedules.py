"""Figure 1: three schedules of two jobs, each from a simulation.

A small policy starts the second job at a given time.
"""

from dataclasses import dataclass
from pathlib import Path

from carpool.core import events as ev
from carpool.core.draft import Draft
from carpool.core.model import Decision, Job
from carpool.core.perf import GENERIC
from carpool.core.view import JobView, View
from carpool.policies.base import BasePolicy, option
from carpool.report.paper.config import PaperConfig
from carpool.report.paper.drawing import GRID, picture
from carpool.report.plots import BLUE, ORANGE
from carpool.sim.metrics import jct
from carpool.sim.run import Setup, simulate
from carpool.sim.timeline import Segment, segments

FIRST, SECOND = "job 1", "job 2"


@dataclass
class StartAt(BasePolicy):
    """Start jobs in the order of submission; the second joins the first at a given time, or waits for its end."""

    name = "start-at"
    restart_s: float = 0.0  # type: ignore[misc]
    second_s: float = option(0.0, "when the second job may join the first")

    def key(self, job: JobView, now: float) -> tuple[float, ...]:
        return (float(job.job.id == SECOND),)

    def decide(self, view: View) -> list[Decision]:
        draft = Draft(view)
        for job in draft.pending():
            if job.job.id == SECOND and view.now < self.second_s:
                continue
            if not draft.start(job, "its GPU is free"):
                draft.assign(job, [0], job.shape.sizes[0], "joins the first")
        return draft.decisions

    def wake(self, view: View) -> float | None:
        return self.second_s if view.now < self.second_s and len(view.queue) else None


@dataclass(frozen=True)
class Schedule:
    """One schedule: what was on the GPU, and the completion times of both jobs."""

    title: str
    segments: list[Segment]
    jcts_s: dict[str, float]

    @property
    def mean_s(self) -> float:
        return sum(self.jcts_s.values()) / len(self.jcts_s)


def schedules(config: PaperConfig) -> list[Schedule]:
    """Simulate the three schedules of the paper's figure: one after the other, together, partly together."""
    rule = config.figure1
    first_s, second_s = (60.0 * minutes for minutes in rule.minutes)
    starts = (
        ("(a) one after the other", first_s),
        ("(b) together from the start", 0.0),
        (f"(c) together after {rule.overlap_after:g} min", 60.0 * rule.overlap_after),
    )
    jobs = [
        Job(name, 0.0, GENERIC, 1, 1, round(alone_s), duration_s=alone_s)
        for name, alone_s in ((FIRST, first_s), (SECOND, second_s))
    ]
    found = []
    for title, second_at in starts:
        events: list[ev.Event] = []
        setup = Setup(cluster="1x1", truth=f"{rule.xi:g}", memory_limit=False)
        result = simulate(jobs, StartAt(second_s=second_at), setup, log=events.append)
        found.append(Schedule(title, segments(events), {record.job.id: jct(record) for record in result.jobs}))
    return found


def draw(folder: Path, config: PaperConfig, found: list[Schedule]) -> None:
    colour = {FIRST: BLUE, SECOND: ORANGE}
    longest = max(segment.end for schedule in found for segment in schedule.segments) / 60
    with picture(folder, "figure1", 7.6, 4.2, rows=3) as (_, panels):
        for axes, schedule in zip(panels.flat, found, strict=True):
            for segment in schedule.segments:
                for job in segment.jobs:
                    row = 1 if job == FIRST else 0
                    shared = len(segment.jobs) > 1
                    axes.barh(
                        row,
                        (segment.end - segment.start) / 60,
                        left=segment.start / 60,
                        height=0.72,
                        color=colour[job],
                        hatch="///" if shared else None,
                        edgecolor="white",
                        linewidth=0.8,
                    )
            axes.set_yticks([0, 1], [SECOND, FIRST])
            axes.set_xlim(0, 1.05 * longest)
            axes.set_ylim(-0.6, 1.6)
            axes.grid(axis="x", **GRID)
            axes.set_axisbelow(True)
            times = ", ".join(f"{job} {schedule.jcts_s[job] / 60:.0f}" for job in (FIRST, SECOND))
            axes.set_title(
                f"{schedule.title}: mean JCT {schedule.mean_s / 60:.1f} min ({times})", loc="left", fontsize=9
            )
        hatched = f"hatched: both share the GPU, each takes {config.figure1.xi:g}× as long"
        panels[-1, 0].set_xlabel(f"time (minutes); {hatched}")
