"""A slow simulator: the same scheduler, driven in small steps by a loop that adds up progress.

It has no heap, no lazy progress and no pace versions; which jobs share is read from the plans alone.
"""

from carpool.core import events as ev
from carpool.core.scheduler import Scheduler

STEP = 1.0 / 64


def step_through(jobs, nodes, policy, perf, jobs_per_gpu) -> dict[str, float]:
    """Return when each job ends. The times are exact where all event times are multiples of the step."""
    scheduler = Scheduler(policy, perf, jobs_per_gpu)
    scheduler.step(0.0, [ev.NodeJoined(0.0, node) for node in nodes])
    by_name = {job.id: job for job in jobs}
    done = dict.fromkeys(by_name, 0.0)
    where, attempts, starts, ended = {}, {}, {}, {}
    tick = 0
    while len(ended) < len(jobs):
        now = tick * STEP
        events = [ev.Submitted(now, job) for job in jobs if job.submitted == now]
        for name in [n for n in where if done[n] >= by_name[n].iterations - 1e-9]:
            events.append(ev.Finished(now, name, attempts[name]))
            ended[name] = now
            del where[name]
        for name in [n for n, at in starts.items() if at == now]:
            events.append(ev.Started(now, name, attempts[name]))
            del starts[name]
        wake = scheduler.policy.wake(scheduler.state)
        due = wake is not None and abs(wake - now) < STEP / 2
        while events or due:
            planned = scheduler.step(now, events, wake=due or not scheduler.in_rounds)
            events, due = [], False
            for decision in planned.decisions if planned else ():
                name = decision.job
                if decision.allocation is None:
                    del where[name]
                    starts.pop(name, None)
                    events.append(ev.Stopped(now, name, attempts[name], done[name]))
                else:
                    where[name] = decision.allocation.gpus
                    attempts[name] = attempts.get(name, 0) + 1
                    starts[name] = now + (policy.restart_s if attempts[name] > 1 else policy.start_s)
                    if starts[name] == now:
                        del starts[name]
                        events.append(ev.Started(now, name, attempts[name]))
        for name, gpus in where.items():
            if name not in starts:
                done[name] += STEP / _iteration(by_name[name], gpus, where, starts)
        tick += 1
        assert tick < 10**6
    return ended


def _iteration(job, gpus, where, starts) -> float:
    """Return the iteration time: duration / iterations alone, and as much again for each mate (ξ = 2) on the GPU with
    the most mates."""
    mates = max(
        sum(gpu in others and name not in starts for name, others in where.items() if name != job.id) for gpu in gpus
    )
    return job.duration_s / job.iterations * (1.0 + mates)
