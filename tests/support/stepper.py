"""A slow simulator: the same scheduler, driven in small steps by a loop that adds up progress.

It has no heap, no lazy progress and no pace versions; which jobs share is read from the plans alone.
"""

from carpool.core import events as ev
from carpool.core.scheduler import Scheduler

STEP = 1.0 / 64


def step_through(jobs, nodes, policy, perf, jobs_per_gpu, pause_s=0.0, resident_per_gpu=8) -> dict[str, float]:
    """Return when each job ends. The times are exact where all event times are multiples of the step."""
    world = SteppedWorld(jobs, Scheduler(policy, perf, jobs_per_gpu, resident_per_gpu), pause_s)
    world.scheduler.step(0.0, [ev.NodeJoined(0.0, node) for node in nodes])
    tick = 0
    while len(world.ended) < len(jobs):
        world.tick(tick * STEP)
        tick += 1
        assert tick < 10**6
    return world.ended


class SteppedWorld:
    """The workers of all jobs: where they are, what they wait for, and what they have done."""

    def __init__(self, jobs, scheduler, pause_s) -> None:
        self.jobs = {job.id: job for job in jobs}
        self.scheduler = scheduler
        self.pause_s = pause_s
        self.done = dict.fromkeys(self.jobs, 0.0)
        self.where, self.attempts, self.ended = {}, {}, {}
        self.idle: dict[str, float] = {}
        """When a job that holds GPUs and does not compute begins to; for ever if it is paused."""
        self.pausing: dict[str, float] = {}
        """When the workers of a job that is being paused are still."""

    def tick(self, now: float) -> None:
        """Let everything happen that happens at this moment, then let the jobs compute for one step."""
        events = [ev.Submitted(now, job) for job in self.jobs.values() if job.submitted == now]
        for name in [n for n in self.where if self.done[n] >= self.jobs[n].iterations - 1e-9]:
            events.append(ev.Finished(now, name, self.attempts[name]))
            self.ended[name] = now
            self.leave(name)
        events += self.due(now)
        # A policy that decides by the clock is asked when the scheduler would ask it; others may be asked more often.
        by_clock = self.scheduler.in_rounds or self.scheduler.pauses
        wake = self.scheduler.policy.wake(self.scheduler.state)
        due = wake is not None and abs(wake - now) < STEP / 2
        while events or due:
            planned = self.scheduler.step(now, events, wake=due or not by_clock)
            due = False
            for decision in planned.decisions if planned else ():  # what must be still before others may compute
                if decision.allocation is not None and not decision.allocation.active:
                    self.idle[decision.job], self.pausing[decision.job] = float("inf"), now + self.pause_s
            events = [event for d in (planned.decisions if planned else ()) for event in self.act(now, d)]
            events += self.due(now)
        for name, gpus in self.where.items():
            if name not in self.idle:
                self.done[name] += STEP / self.iteration_s(self.jobs[name], gpus)

    def due(self, now: float) -> list[ev.Event]:
        """Return the confirmations of workers that are still, or up, at this moment."""
        still = [name for name, at in self.pausing.items() if at <= now]
        up = [name for name, at in self.idle.items() if at <= now]
        found: list[ev.Event] = [ev.Paused(now, name, self.attempts[name]) for name in still]
        for name in still:
            del self.pausing[name]
        for name in up:
            del self.idle[name]
            resumed = self.scheduler.state.jobs[name].status == "resuming"
            found.append((ev.Resumed if resumed else ev.Started)(now, name, self.attempts[name]))
        return found

    def act(self, now: float, decision) -> list[ev.Event]:
        """Do what the plan says. What begins to compute waits for what is being paused on the same GPUs."""
        name, policy = decision.job, self.scheduler.policy
        if decision.allocation is None:
            self.leave(name)
            return [ev.Stopped(now, name, self.attempts[name], self.done[name])]
        if not decision.allocation.active:
            return []
        gpus = decision.allocation.gpus
        clear = [at for other, at in self.pausing.items() if set(self.where[other]) & set(gpus)]
        if self.where.get(name) == gpus:
            takes = self.pause_s
        else:
            self.where[name] = gpus
            self.attempts[name] = self.attempts.get(name, 0) + 1
            takes = policy.restart_s if self.attempts[name] > 1 else policy.start_s
        self.idle[name] = max([now, *clear]) + takes
        return []

    def leave(self, name: str) -> None:
        del self.where[name]
        self.idle.pop(name, None)
        self.pausing.pop(name, None)

    def iteration_s(self, job, gpus) -> float:
        """Return the iteration time: duration / iterations alone, and as much again for each mate (ξ = 2) on the GPU
        with the most mates that compute."""
        computing = {name: held for name, held in self.where.items() if name != job.id and name not in self.idle}
        mates = max(sum(gpu in held for held in computing.values()) for gpu in gpus)
        return job.duration_s / job.iterations * (1.0 + mates)
