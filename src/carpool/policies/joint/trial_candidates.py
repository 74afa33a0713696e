"""Trials of the joint rule: a guest joins a host beside which nothing like it was ever observed.

Such a pair is tried if it would gain at the low end of what is believed of it. `core.trials` bounds and counts what a
trial costs; `policy` conducts it and decides afterwards by the ordinary rule.
"""

from itertools import islice

from carpool.core.draft import Draft
from carpool.core.model import Job
from carpool.core.perf import UncertainModel
from carpool.core.shapes import Shape
from carpool.core.view import HostKind, JobView, View
from carpool.policies.joint.choice import Choice
from carpool.policies.joint.moves import Join
from carpool.policies.joint.objective import Objective
from carpool.policies.sharing.pair import SharingOption, best, host_needs

PER_KIND = 4
"""Number of hosts of a kind that are looked at."""
PRICED = 3
"""Number of the cheapest trials that are priced."""
WORTH_S = 10.0
"""Seconds that jobs must have left for one of them to be observed alone: the others wait for about a second."""
SLACK = 1.0 - 1e-9
"""Factor that cuts the hosts of a kind a little early: the exact test on each host decides."""


class TrialCache:
    """The low end of the belief about pairs that were never observed, valid for one state of the belief."""

    def __init__(self) -> None:
        self._of: tuple[object, int] = (None, -1)
        self._known: dict[tuple[Shape, HostKind], SharingOption | None] = {}

    def option(self, view: View, guest: JobView, kind: HostKind, host: Job) -> SharingOption | None:
        """Return the sharing option at the low end of the belief; None where the pair is not to be tried."""
        if self._of != (view.perf, view.belief_version):
            self._of = (view.perf, view.belief_version)
            self._known.clear()
        key = (guest.shape, kind)
        if key not in self._known:
            learner = view.learner
            self._known[key] = None if learner is None else _optimistic(learner, guest, kind, host)
        return self._known[key]


def is_new(learner: UncertainModel, guest: Job, accumulation: int, host: Job, host_accumulation: int) -> bool:
    """Return whether the slow-down of one of two jobs beside the other was never observed."""
    return not (
        learner.is_observed(guest, accumulation, host, host_accumulation)
        and learner.is_observed(host, host_accumulation, guest, accumulation)
    )


def sharing_anew(view: View) -> list[JobView]:
    """Return the jobs whose slow-down beside their mates became known at this moment."""
    return [job for job in view.awakened.values() if job.computing and job.pace_seen and job.slowdown > 1.0]


def unseen_so_far(view: View) -> list[JobView]:
    """Return the jobs that began to compute beside others at this moment and were never seen alone."""
    return [job for job in view.awakened.values() if job.computing and not job.alone_seen and job.slowdown > 1.0]


def _optimistic(learner: UncertainModel, guest: JobView, kind: HostKind, host: Job) -> SharingOption | None:
    size = next((size for size in guest.shape.sizes if size.memory <= kind.memory_left), None)
    if size is None or not is_new(learner, guest.job, size.accumulation, host, kind.accumulation):
        return None
    own = learner.slowdown_range(guest.job, size.accumulation, [(host, kind.accumulation)])
    other = learner.slowdown_range(host, kind.accumulation, [(guest.job, size.accumulation)])
    for seen, limit in ((own, guest.job.max_slowdown), (other, kind.max_slowdown)):
        if limit is not None and seen.high > limit:  # the limit must hold while they are tried, too
            return None
    relative_time = size.relative_time * guest.whole_iteration_s / guest.alone_iteration_s
    return SharingOption(size, other.low, own.low, relative_time, host_needs(other.low, own.low, relative_time))


class TrialCandidates:
    """The trials that a guest could begin in one scheduling pass."""

    def __init__(self, draft: Draft, objective: Objective, cache: TrialCache) -> None:
        self.draft = draft
        self.objective = objective
        self.view = draft.view
        self.cache = cache
        self.busy = {seq for trial in draft.view.trials.running.values() for seq in trial.seqs}
        """The jobs of trials that run, by `seq`."""

    def offer(self, guest: JobView, choice: Choice) -> None:
        """Offer trials that would pay at the low end of the belief, the cheapest first."""
        view, objective = self.view, self.objective
        if guest.shape.exclusive or view.jobs_per_gpu == 1:
            return
        now, startup = objective.now, guest.startup_s
        guest_left, budget = guest.alone_left(now), objective.budget(guest)
        moves = []
        for kind, group in self.draft.hosts.lone.items():
            option = self.cache.option(view, guest, kind, group.sample)
            if option is None:
                continue
            least = option.needs * guest_left * SLACK + startup
            for host in islice(group.ending_after(now + least), PER_KIND):
                if self.may_try(guest, host):
                    move = self._move(guest, host, option, guest_left)
                    if move is not None and move.cost < budget:
                        moves.append(move)
        for move in sorted(moves, key=lambda move: (move.cost, move.hosts[0].seq))[:PRICED]:
            choice.offer(move)

    def in_the_way(self, job: JobView) -> list[JobView]:
        """Return the mates to pause so that a job shows how fast it is alone; empty: it is known, or must not be.

        One pause shows how much each of them slows it down, and what it uses of the GPU. A mate that is about to end
        leaves it alone soon, and pairs whose trial ended without a verdict are not looked at again.
        """
        learner, now = self.view.learner, self.objective.now
        if learner is None or learner.knows_alone(job.job, job.accumulation) or job.alone_left(now) < WORTH_S:
            return []
        beside = [resident.record for gpu in job.gpus for resident in self.draft.active_on(gpu)]
        mates = {mate.seq: mate for mate in beside if mate is not job and mate.computing}
        if not all(self._may_interrupt(mate, job) for mate in mates.values()):
            return []
        new = [is_new(learner, job.job, job.accumulation, mate.job, mate.accumulation) for mate in mates.values()]
        return list(mates.values()) if any(new) else []

    def _may_interrupt(self, mate: JobView, job: JobView) -> bool:
        free = not {mate.seq, job.seq} & (self.busy | self.objective.moved)
        can_pause = mate.job.can_pause and mate.batch is None and mate.shape.priority <= job.shape.priority
        return free and can_pause and mate.alone_left(self.objective.now) > WORTH_S

    def may_try(self, guest: JobView, host: JobView) -> bool:
        """Return whether a trial of this pair may begin now: one of them can be paused, and it keeps to the rules."""
        return (
            host.computing
            and host.seq not in self.busy
            and host.seq not in self.objective.moved
            and (host.job.can_pause or guest.job.can_pause)
            and len(host.gpus) >= guest.shape.gpus
            and self.objective.may_join(guest, [host])
        )

    def _move(self, guest: JobView, host: JobView, option: SharingOption, guest_left: float) -> Join | None:
        objective = self.objective
        host_left, startup = host.alone_left(objective.now), guest.startup_s
        if best([option], host_left, guest_left, startup) is None:
            return None
        draft = self.draft
        fitting = [  # a paused job may have been resumed there in this pass
            gpu for gpu in host.gpus if draft.fits(gpu, option.size.memory) and len(draft.active_on(gpu)) == 1
        ]
        if len(fitting) < guest.shape.gpus:
            return None
        gpus = tuple(self.view.topology.most_consolidated(fitting, guest.shape.gpus))
        guest_end, host_end = option.ends(host_left, guest_left * option.relative_time, startup)
        cost = guest_end + max(0.0, host_end - objective.left(host))
        ends = {guest.seq: objective.now + guest_end, host.seq: objective.now + host_end}
        lone = draft.only_resident(host)
        move = Join(guest, gpus, ends, cost, option.size, (host,), lone=lone, trial=True)
        return move if objective.delay_paused(move) else None
