"""The joint rule: every move is judged by what it does to the guest, to its hosts and to all jobs that wait.

`moves` says what can be done, the modules of candidates find what could be done, `objective` prices it, `choice` keeps
the best, and this module goes through the jobs: start alone, share now, wait for certain GPUs, pause or suspend other
jobs, or stay in the queue. A paused job waits too: for its own GPUs.
docs/explanation/joint-rule.md describes the rule in words.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from carpool.core.draft import Draft
from carpool.core.model import Decision, JobId, Status
from carpool.core.rules import may_start_ahead
from carpool.core.shapes import Shape
from carpool.core.view import JobView, ScanView, View
from carpool.policies.base import BasePolicy, Explanation, option
from carpool.policies.joint.cell_speeds import CellSpeedsCache
from carpool.policies.joint.choice import Choice
from carpool.policies.joint.displacements import starts_up
from carpool.policies.joint.finders import Finders
from carpool.policies.joint.kept_gpus import KeptGpus
from carpool.policies.joint.moves import ClaimGpus, Displace, Join, Move, Relocate, StartAlone, Suspend, names
from carpool.policies.joint.objective import CLOSE, Objective
from carpool.policies.joint.order import goes_before, service_left
from carpool.policies.joint.patience import is_overdue, paused_in_order, resumable, starved_first
from carpool.policies.joint.start_up_candidates import next_start_up
from carpool.policies.joint.trial_candidates import TrialCache, TrialCandidates, is_new, sharing_anew, unseen_so_far
from carpool.policies.sharing.candidates import OptionCache
from carpool.policies.sharing.explain import ASKED_NOT_TO_SHARE, FITS_BESIDE_NO_JOB, compare_hosts

LOOK_AGAIN_S = 60.0
"""Smallest time in seconds between two looks at jobs that were paused for too long."""

AGAIN = 1.0 / 64.0
"""Part of a job's length after which it is tried again if it has found no place."""

ENOUGH = 96
"""Number of hosts simulated in a pass from which on no more jobs are tried, except those that fit on free GPUs."""


@dataclass
class Carpool(BasePolicy):
    """The joint rule: make the move that most lowers the completion times of guest, hosts and queue together."""

    name = "carpool"
    jobs_per_gpu = 6
    pause: bool = option(True, "pause and resume jobs on their GPUs, where that lowers the sum")
    suspend: bool = option(False, "suspend running jobs that can checkpoint, where that lowers the sum")
    restart_s: float = option(30.0, "seconds that a suspended job needs to start again; the simulator charges them")  # type: ignore[misc]
    patience: float = option(
        10.0, "a job goes first once it has waited or been paused this many times its length and the mean JCT; 0: never"
    )
    trials: bool = option(True, "try pairs of jobs that nothing is known of, where that may pay and the belief learns")
    look_ahead: int = option(48, "number of waiting jobs that count when a move is judged")
    tries: int = option(8, "number of jobs that may find no place before a pass ends")

    def __post_init__(self) -> None:
        self.option_cache = OptionCache()
        self.cell_speeds = CellSpeedsCache()
        self.trial_cache = TrialCache()

    def key(self, job: JobView, now: float) -> tuple[float, ...]:
        return (service_left(job, now),)

    def decide(self, view: View) -> list[Decision]:
        draft = Draft(view, pauses=self.pause)
        _ = view.end_times, draft.hosts  # up to date in every pass: a later one would pay for all that changed since
        shareable = draft.shareable()  # counted before the first move, and kept up to date from then on
        paused = resumable(view, self.patience) if self.pause and view.paused else []
        can_place = len(view.queue) and (draft.free_count or shareable or self.suspend)
        can_spread = self.suspend and draft.free_count  # jobs that share, if there are any
        learns = self.pause and view.learner is not None
        sharing = sharing_anew(view) if learns else []
        unseen = unseen_so_far(view) if learns and self.trials else []
        if not (can_place or can_spread or paused or sharing or unseen or view.trials.running):
            return []
        return JointPass(self, draft, paused, sharing, unseen).run()

    def wake(self, view: View) -> float | None:
        """Return when the patience of the first paused job ends, or when the next job should start up so that it is up
        when another one ends."""
        if not self.pause:
            return None
        moments = []
        if self.patience and view.paused:
            first = view.overdue(self.patience).first(self.patience * view.mean_jct_s)
            moments.append(max(first, view.now + LOOK_AGAIN_S))
        startup = view.queue.first(1)[0][3].startup_s if len(view.queue) else 0.0
        if startup:
            moments += next_start_up(view, startup)
        for trial in view.trials.running.values():
            if trial.began >= 0.0:
                spent = trial.spent_at([view.jobs[side.job] for side in trial.sides], view.now)
                moments += [spent] if spent > view.now else []
        return min(moments, default=None)

    @property
    def pauses(self) -> bool:
        """Whether the policy pauses and resumes jobs."""
        return self.pause

    def explain(self, view: View, job: JobView) -> Explanation | None:
        if view.jobs_per_gpu == 1:
            return None
        if job.shape.exclusive:
            return ASKED_NOT_TO_SHARE
        compared = tuple(compare_hosts(view, job))
        if not compared:
            return FITS_BESIDE_NO_JOB
        allowed = tuple(c for c in compared if view.jobs[c.host].shape.priority <= job.shape.priority)
        if not allowed:
            return Explanation("but every host that it fits beside has a higher priority", compared)
        return Explanation(
            "and no move was found that lowers the sum of completion times over it, its hosts and the queue", allowed
        )


class JointPass:
    """One scheduling pass: waiting jobs are tried in order, starved ones first, then those with least service left."""

    def __init__(
        self,
        policy: Carpool,
        draft: Draft,
        resumable: Sequence[JobView] = (),
        sharing: Sequence[JobView] = (),
        unseen: Sequence[JobView] = (),
    ) -> None:
        self.policy = policy
        self.draft = draft
        self.view = draft.view
        self.starved = starved_first(draft, policy.patience)
        self.objective = Objective(draft, policy.look_ahead, policy.restart_s, self.starved)
        self._finders: Finders | None = None
        self.kept = KeptGpus(draft)
        self._hopeless: dict[Shape, tuple[float, float, int]] = {}
        """What the first job of a general shape that found no place had: see `_prospects_of`."""
        self.resumable = deque(resumable)
        self.trial_over = False
        """Whether a trial, which kept other jobs waiting, has lasted or cost enough."""
        self._started_alone = 0  # number of jobs that this pass started on free GPUs
        self.sharing = list(sharing)
        self.unseen = unseen
        tries = policy.trials and policy.pause and draft.view.learner is not None
        self.trying = TrialCandidates(draft, self.objective, policy.trial_cache) if tries else None

    @property
    def find(self) -> Finders:
        """What finds moves for the jobs of this pass."""
        if self._finders is None:
            policy = self.policy
            self._finders = Finders(
                self.draft, self.objective, policy.patience, policy.option_cache, policy.cell_speeds
            )
        return self._finders

    def run(self) -> list[Decision]:
        """Try the waiting jobs in order, and return what was decided."""
        draft = self.draft
        if self.view.trials.running:
            self._conduct_trials()
        for job in self.unseen:
            self._look_alone(job)
        for job in self.sharing:
            self._reconsider(job)
        pending = draft.pending()
        one_waits = False
        blocked = 0
        for job, from_scan in self._in_order(pending):
            if not self._is_tried(job, from_scan):
                alike_too = True
            elif (not one_waits and self._start_alone(job)) or self._fill_in(job):
                continue
            else:
                alike_too = self._fails(job, from_scan)
                one_waits = one_waits or alike_too or bool(self.objective.claimed)
                blocked += alike_too
            if alike_too and from_scan:
                pending.skip_alike()
            if blocked >= self.policy.tries:
                break
        while self.resumable:
            self._resume(self.resumable.popleft())
        if self.policy.pause:
            self._start_up_next(blocked)
        if self.policy.pause and self.policy.suspend:
            self._spread()
        return draft.decisions

    def _in_order(self, pending: ScanView) -> Iterator[tuple[JobView, bool]]:
        """Yield the pending jobs and whether the scan yielded them; a starved job comes first in its priority.

        Before each of them, paused jobs with less service left get the chance to go on.

        Where too few GPUs are free for any job and none was given back just now, only starved and new jobs are tried.
        The others have found no place since, and as time passes the hosts have less left, so that joining them pays
        less.
        """
        if not len(self.view.queue):
            return
        first = list(self.starved)
        none_fits = min([shape.gpus for shape in self.view.queue.buckets]) > self.draft.free_count
        nothing_opened = self.view.last_capacity_change < self.view.now and not self.trial_over
        if none_fits and nothing_opened:
            new = [job for job in self._new() if job not in first]
            for job in sorted([*first, *new], key=lambda job: -job.shape.priority):
                yield job, False
            return
        for job in pending:
            while first and first[0].shape.priority >= job.shape.priority:
                yield first.pop(0), False
            while self.resumable and goes_before(self.resumable[0], job, self.view):
                self._resume(self.resumable.popleft())
            if job not in self.starved:
                yield job, True

    def _is_tried(self, job: JobView, from_scan: bool) -> bool:
        """Return whether a job may start, and no job like it has failed before it in the scan."""
        return self.draft.may_start(job) and not (from_scan and self._is_hopeless(job))

    def _is_hopeless(self, job: JobView) -> bool:
        """Return whether a job of another tenant that differs in nothing else found no place in this pass, although it
        had no more service left, counted no less and might use as many free GPUs."""
        failed = self._hopeless.get(job.shape.general)
        return failed is not None and all(
            one <= other for one, other in zip(failed, self._prospects_of(job), strict=True)
        )

    def _fails(self, job: JobView, from_scan: bool) -> bool:
        """Make the best move for a job, or note that there is none; return whether there is none."""
        if self._place(job):
            return False
        if from_scan and self.view.shares_count:
            self._hopeless.setdefault(job.shape.general, self._prospects_of(job))
        return True

    def _prospects_of(self, job: JobView) -> tuple[float, float, int]:
        """Return what decides between jobs of a general shape, the best first."""
        left = service_left(job, self.view.now)
        return left, -self.objective.weight_of(job), -self.draft.free_for(job)

    def _is_due(self, job: JobView) -> bool:
        """Return whether a job is to be tried in this pass, although it cannot simply start.

        Where jobs end all the time, a job that finds no place is tried in vain again and again. So it is tried once in
        a part of its length, unless it is new or this pass has changed something. A longer job can wait longer. Jobs
        that were started on free GPUs change nothing for it: they took what was too little for it, and as hosts they
        have less left than it, so that joining them does not pay.

        Where thousands wait for thousands of GPUs, one end can make room for many gangs on many hosts. Once a pass has
        simulated ENOUGH hosts, it leaves the others to the next one, which is not far away on so many GPUs.
        """
        view, draft = self.view, self.draft
        if job.shape.gpus <= draft.free_count or job.startup_s:
            return True
        if self._finders is not None and self._finders.joins.simulated >= ENOUGH:
            return False
        if self.trial_over or len(draft.decisions) > self._started_alone:
            return True
        every = AGAIN * job.alone_left(view.now)
        before = view.previous_capacity_change if view.last_capacity_change == view.now else view.last_capacity_change
        return not every or job.pending_since == view.now or view.now // every > before // every

    def _new(self) -> list[JobView]:
        """Return the jobs that were submitted just now, in the queue's order."""
        now = self.view.now
        new = takewhile(lambda job: job.pending_since == now, self.view.newest_first())
        waiting = [job for job in new if job.status is Status.PENDING]
        return sorted(waiting, key=lambda job: (-job.shape.priority, self.policy.key(job, now), job.seq))

    # ---- the choice ------------------------------------------------------------------------------------------------

    def _start_alone(self, job: JobView) -> bool:
        """Start a job on free GPUs. No job before it waits, so none can lose."""
        move = self._alone(job)
        if move is None:
            return False
        self.objective.note(move)
        self.draft.assign(job, move.gpus, move.size, "its GPUs are free, and no job before it waits")
        self._started_alone += 1
        return True

    def _fill_in(self, job: JobView) -> bool:
        """Start a job on GPUs that are kept for a starved one, if it ends before they are needed: none can lose."""
        move = self.kept.fill_in(job)
        if move is None:
            return False
        self.objective.note(move)
        why = f"its GPUs are kept for {move.claimant.job.id}, and it is expected to end before they are needed"
        self.draft.assign(job, move.gpus, move.size, why)
        self._started_alone += 1
        return True

    def _place(self, job: JobView) -> bool:
        """Make the best move for a job, if there is one. A starved job without one gets GPUs reserved."""
        starved = job in self.starved
        move = self._choose(job, at_any_price=starved) if self._is_due(job) else None
        if move is None and starved:
            move = self.find.deferred.reservation(job)
        if move is None:
            return False
        self._make(move)
        return True

    def _choose(self, job: JobView, at_any_price: bool) -> Move | None:
        """Return the best move for a job. A starved one may pause other jobs at any price where no move gains."""
        move = None
        if self.policy.suspend or job.shape.gpus <= self.draft.free_count + self.draft.shareable().bit_count():
            move = self._choose_by_gain(job)
        if move is None and at_any_price and self.policy.pause:
            choice = Choice(self.objective, job, at_any_price=True)
            self._offer_displacements(job, choice)
            move = choice.best
        return move

    def _choose_by_gain(self, job: JobView) -> Move | None:
        alone = self._alone(job)
        if alone is not None:
            gain = self.objective.price(alone)
            if gain is not None and gain >= -CLOSE:
                return alone
        choice = Choice(self.objective, job)
        self.find.joins.offer(job, choice)
        if choice.best is not None:
            self.find.deferred.offer_later(job, choice)
        if self.trying is not None:
            self.trying.offer(job, choice)
        if self.policy.pause:
            self._offer_displacements(job, choice)
            self.find.pausing.offer_swaps(job, choice)
        if self.policy.suspend:
            self.find.deferred.offer_suspensions(job, choice)
        return choice.best

    def _offer_displacements(self, job: JobView, choice: Choice) -> None:
        """Offer to pause other jobs for a pending one. If it takes time to start up, they go on until it is up."""
        if job.startup_s and may_start_ahead(self.view, job.job):
            self.find.starting_up.offer(job, choice)
        else:
            self.find.pausing.offer(job, choice)

    def _resume(self, job: JobView) -> None:
        """Make the best move for a paused job, if there is one. It goes on in any case if its GPUs are idle."""
        idle = all(starts_up(mate.record, self.view.now) for mate in self.find.displacements.active(job.gpus))
        overdue = is_overdue(job, self.view.now, self.policy.patience, self.view.mean_jct_s)
        choice = Choice(self.objective, job, at_any_price=idle or overdue)
        self.find.resuming.offer(job, choice)
        if self.policy.suspend:
            self.find.resuming.offer_relocation(job, choice)
        self._make_best(choice)

    # ---- trials ----------------------------------------------------------------------------------------------------

    def _conduct_trials(self) -> None:
        """Let each trial take its next step. First the guest runs alone until it has reported, if its speed alone is
        not known; then all run until all have reported."""
        view, now = self.view, self.view.now
        for trial in view.trials.running.values():
            guest, *hosts = records = [view.jobs[side.job] for side in trial.sides]
            if trial.began < 0.0:
                self._keep_apart(records)
            elif trial.spent(records, now):
                self._end_trial(guest, hosts)
            else:
                self._keep_apart(records)
                self._continue_trial(guest, hosts)
        self.resumable = deque([job for job in self.resumable if job.seq not in self.objective.moved])

    def _keep_apart(self, jobs: Iterable[JobView]) -> None:
        """Let no other job of this pass join these, or pause one of them."""
        seqs = [job.seq for job in jobs]
        self.objective.moved.update(seqs)
        self.objective.closed.update(seqs)

    def _look_alone(self, job: JobView) -> None:
        """Pause the mates of a job for a moment, if its speed alone is not known."""
        mates = self.trying.in_the_way(job) if self.trying is not None else []
        for mate in mates:
            self._pause_for_look(mate, job, trial=job.job.id)
        if mates:
            self._keep_apart([job, *mates])

    def _pause_for_look(self, mate: JobView, job: JobView, trial: JobId | None = None) -> None:
        self.draft.pause(mate, f"paused for a moment, to see how fast {job.job.id} is alone", trial=trial)

    def _continue_trial(self, guest: JobView, hosts: Sequence[JobView]) -> None:
        draft, measure = self.draft, guest.computing and not guest.alone_seen
        for host in hosts:
            if measure and host.computing and host.job.can_pause and host.batch is None:
                self._pause_for_look(host, guest, trial=guest.job.id)
            elif not measure and host.status is Status.PAUSED and self._may_go_on(host):
                draft.resume(host, f"it goes on beside {guest.job.id}, to see how fast both are", trial=guest.job.id)
        if measure:
            self._keep_out(guest)

    def _keep_out(self, guest: JobView) -> None:
        """Pause the jobs that began to compute beside a guest while it is seen alone."""
        for resident in [one for gpu in guest.gpus for one in self.draft.active_on(gpu)]:
            mate = resident.record
            if mate.computing and mate.seq not in self.objective.moved and mate.job.can_pause and mate.batch is None:
                self._pause_for_look(mate, guest)
                self._keep_apart([mate])

    def _may_go_on(self, host: JobView) -> bool:
        """Return whether a paused host may compute beside those that do now."""
        most = self.view.jobs_per_gpu
        return not host.paused_by_owner and all(len(self.draft.active_on(gpu)) < most for gpu in host.gpus)

    def _end_trial(self, guest: JobView, hosts: Sequence[JobView]) -> None:
        """End a trial that has lasted or cost enough: the ordinary rule decides about its jobs and those that it kept
        waiting."""
        self.trial_over = True
        there = [job for host in (guest, *hosts) for gpu in host.gpus for job in self.draft.jobs_on(gpu)]
        self.resumable.extend([job for job in paused_in_order(there, self.view.now) if job not in self.resumable])
        self.sharing += [job for job in (guest, *hosts) if job.computing and job not in self.sharing]

    def _reconsider(self, job: JobView) -> None:
        """Pause a job that shares, or its mate with most left, if that gains."""
        if job.seq in self.objective.moved or not job.computing:
            return
        choice = Choice(self.objective)
        self.find.resuming.offer_withdrawal(job, choice)
        self._make_best(choice)

    def _spread(self) -> None:
        """Let jobs that share move to free GPUs, as long as that gains."""
        draft, now = self.draft, self.view.now
        while draft.free_count:
            sharing = [
                job
                for job in self.view.running
                if job.slowdown > 1.0 and job.shape.gpus <= draft.free_count and job.seq not in self.objective.moved
            ]
            sharing.sort(key=lambda job: (job.alone_left(now), job.seq))
            choice = Choice(self.objective)
            for job in sharing:
                self.find.resuming.offer_relocation(job, choice)
            if not self._make_best(choice):
                return

    def _start_up_next(self, blocked: int) -> None:
        """Let the first jobs of the queue that this pass has not tried start up, if their turn comes soon."""
        if blocked or not len(self.view.queue):
            return
        for *_, job in self.view.queue.first(self.policy.tries):
            if not job.startup_s:
                return
            if job.seq not in self.objective.moved and self.draft.may_start(job):
                choice = Choice(self.objective, job)
                self.find.starting_up.offer(job, choice)
                self._make_best(choice)

    def _alone(self, job: JobView) -> StartAlone | None:
        place = self.draft.place_alone(job)
        if place is None:
            return None
        gpus, size = place
        now = self.view.now
        left = job.whole_left(now) * size.relative_time + job.startup_s
        return StartAlone(job, gpus, {job.seq: now + left}, left, size)

    def _make_best(self, choice: Choice) -> bool:
        """Make the move that was chosen, and return whether there is one."""
        if choice.best is None:
            return False
        self._make(choice.best)
        return True

    def _make(self, move: Move) -> None:
        draft, guest = self.draft, move.guest
        self.objective.note(move)
        saves = f"saves {max(0.0, move.gain):.0f} s in sum"
        if isinstance(move, ClaimGpus):
            self.kept.keep(move)
        elif isinstance(move, Suspend):
            for victim in move.victims:
                draft.stop(victim, f"suspended so that {guest.job.id} can run first, which {saves}")
            draft.start(guest, f"it starts in place of {names(move.victims)}, which {saves}")
        elif isinstance(move, Displace):
            self._displace(move, saves)
        elif isinstance(move, Relocate):
            draft.move(
                guest, move.gpus, move.size, f"moved to free GPUs, which {saves} over it, its mates and the queue"
            )
        elif isinstance(move, Join):
            draft.assign(guest, move.gpus, move.size, self._why_join(move, saves), trial=self._tried_with(move))
        elif isinstance(move, StartAlone):
            why = f"its GPUs are free, and starting it {saves} over it and the queue"
            draft.assign(guest, move.gpus, move.size, why)
            self._started_alone += 1

    def _displace(self, move: Displace, saves: str) -> None:
        draft, guest = self.draft, move.guest
        if move.withdraws:
            draft.pause(guest, f"paused so that {names(move.hosts)} can run first, which {saves}")
            return
        if move.starts_up:
            beside = names([resident.record for gpu in move.gpus[:1] for resident in draft.residents(gpu)])
            why = f"it starts up beside {beside}, so that it is up when its turn comes, which {saves}"
            draft.start_up(guest, move.gpus, move.size, why)
            return
        for victim in move.victims:
            how = "swapped out" if victim is move.swapped else "paused"
            draft.pause(
                victim, f"{how} so that {guest.job.id} can run first, which {saves}", swapped=victim is move.swapped
            )
        instead = f"while {names(move.victims)} waits, which {saves}" if move.victims else f"on its GPUs, which {saves}"
        if guest.gpus:
            draft.resume(guest, f"it goes on {instead}")
        else:
            draft.assign(guest, move.gpus, move.size, f"it runs {instead}")

    def _tried_with(self, move: Join) -> str | None:
        """Return the host of a pair that was never observed: such a pair begins as a trial in any case."""
        learner, guest = self.view.learner, move.guest
        if self.trying is None or learner is None or len(move.hosts) != 1:
            return None
        host = move.hosts[0]
        alone = host.computing and all(len(self.draft.active_on(gpu)) <= 1 for gpu in move.gpus)
        new = is_new(learner, guest.job, move.size.accumulation, host.job, host.accumulation)
        can_pause = host.job.can_pause or guest.job.can_pause
        if not (alone and new and can_pause) or host.seq in self.trying.busy:
            return None
        self.trying.busy |= {guest.seq, host.seq}  # a host of several GPUs may get another guest in this pass
        return host.job.id

    def _why_join(self, move: Join, saves: str) -> str:
        if move.trial:
            return f"it is tried beside {names(move.hosts)}: nothing like them was observed together, and it may pay"
        now, size = self.view.now, move.size
        alone = move.guest.alone_left(now)
        ratio = (move.ends[move.guest.seq] - now) / alone if alone else 1.0  # stopped at its very end: none left
        split = f", batch split into {size.accumulation}" if size.accumulation > 1 else ""
        longer = f"it takes {ratio:.2f}× as long as alone{split}"
        return f"it shares with {names(move.hosts)}: {longer}, and still {saves} over it, its hosts and the queue"
