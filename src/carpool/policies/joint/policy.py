"""The joint rule: every move is judged by what it does to the guest, to its hosts and to all jobs that wait.

`moves` says what can be done, `join_candidates` and `deferred_candidates` find the candidates, `objective` prices them,
and this module chooses: start alone, share now, wait for certain GPUs, suspend a job, or stay in the queue.
docs/explanation/joint-rule.md describes the rule in words.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile

from carpool.core.draft import Draft
from carpool.core.model import Decision, Status
from carpool.core.view import JobView, ScanView, View
from carpool.policies.base import BasePolicy, Explanation, option, shortest_first
from carpool.policies.joint.deferred_candidates import DeferredCandidates
from carpool.policies.joint.join_candidates import JoinCandidates
from carpool.policies.joint.moves import ClaimGpus, Join, Move, StartAlone, Suspend, names
from carpool.policies.joint.objective import CLOSE, Objective
from carpool.policies.sharing.candidates import Candidates, OptionCache
from carpool.policies.sharing.explain import ASKED_NOT_TO_SHARE, FITS_BESIDE_NO_JOB, compare_hosts


@dataclass
class Carpool(BasePolicy):
    """The joint rule: make the move that most lowers the completion times of guest, hosts and queue together."""

    name = "carpool"
    suspend: bool = option(False, "suspend running jobs that can checkpoint, where that lowers the sum")
    restart_s: float = option(30.0, "seconds that a suspended job needs to start again; the simulator charges them")  # type: ignore[misc]
    patience: float = option(
        10.0, "a job goes first once it has waited this many times its length and the mean JCT; 0: never"
    )
    look_ahead: int = option(48, "number of waiting jobs that count when a move is judged")
    tries: int = option(8, "number of jobs that may find no place before a pass ends")

    def __post_init__(self) -> None:
        self._options = OptionCache()

    def key(self, job: JobView, now: float) -> tuple[float, ...]:
        return shortest_first(job, now)

    def decide(self, view: View) -> list[Decision]:
        draft = Draft(view)
        shareable = draft.shareable()  # counted before the first move, and kept up to date from then on
        if not len(view.queue) or not (draft.free_count or shareable or self.suspend):
            return []
        return JointPass(self, draft, self._options).run()

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
    """One scheduling pass: waiting jobs are tried in order, starved ones first, then the shortest."""

    def __init__(self, policy: Carpool, draft: Draft, cache: OptionCache) -> None:
        self.policy = policy
        self.draft = draft
        self.view = draft.view
        self.starved = _starved(draft.view, policy.patience) if policy.patience else []
        self.objective = Objective(draft, policy.look_ahead, policy.restart_s, self.starved)
        self.joins = JoinCandidates(draft, Candidates(draft, cache), self.objective)
        self.deferred = DeferredCandidates(draft, self.objective)

    def run(self) -> list[Decision]:
        """Try the waiting jobs in order, and return what was decided."""
        draft = self.draft
        pending = draft.pending()
        one_waits = False
        blocked = 0
        for job, from_scan in self._in_order(pending):
            if not draft.may_start(job):
                alike_too = True
            elif not one_waits and self._start_alone(job):
                continue
            else:
                alike_too = not self._place(job)
                one_waits = one_waits or alike_too or bool(self.objective.claimed)
                blocked += alike_too
            if alike_too and from_scan:
                pending.skip_alike()
            if blocked >= self.policy.tries:
                break
        return draft.decisions

    def _in_order(self, pending: ScanView) -> Iterator[tuple[JobView, bool]]:
        """Yield the waiting jobs and whether the scan yielded them; a starved job comes first in its priority.

        Where too few GPUs are free for any job and none was given back just now, only new jobs are tried. The others
        have found no place since, and as time passes the hosts have less left, so that joining them pays less.
        """
        starved = list(self.starved)
        none_fits = min([shape.gpus for shape in self.view.queue.buckets]) > self.draft.free_count
        if none_fits and not starved and self.view.last_capacity_change < self.view.now:
            for job in self._new():
                yield job, False
            return
        for job in pending:
            while starved and starved[0].shape.priority >= job.shape.priority:
                yield starved.pop(0), False
            if job not in self.starved:
                yield job, True

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
        return True

    def _place(self, job: JobView) -> bool:
        """Make the best move for a job, if there is one. A starved job without one gets GPUs reserved."""
        within = job.shape.gpus <= self.draft.free_count + self.draft.shareable().bit_count()
        move = self._choose(job) if within or self.policy.suspend else None
        if move is None and job in self.starved:
            move = self.deferred.reservation(job)
        if move is None:
            return False
        self._make(move)
        return True

    def _choose(self, job: JobView) -> Move | None:
        alone = self._alone(job)
        if alone is not None:
            gain = self.objective.price(alone)
            if gain is not None and gain >= -CLOSE:
                return alone
        best = self._best(self.joins.now(job))
        if best is not None:
            best = self._best(self.deferred.later(job, best.gain), best)
        if self.policy.suspend:
            best = self._best(self.deferred.suspensions(job), best)
        return best

    def _best(self, moves: Iterable[Move], best: Move | None = None) -> Move | None:
        """Return the move with the largest gain, provided that it beats `best`, or doing nothing."""
        objective = self.objective
        for move in moves:
            bar = best.gain if best is not None else CLOSE
            if not isinstance(move, Suspend) and objective.budget(move.guest) - move.cost <= bar:
                continue  # not even if the waiting jobs lose nothing
            gain = objective.price(move)
            if gain is not None and gain > bar:
                best = move
        return best

    def _alone(self, job: JobView) -> StartAlone | None:
        place = self.draft.place_alone(job)
        if place is None:
            return None
        gpus, size = place
        now = self.view.now
        left = job.whole_left(now) * size.relative_time
        return StartAlone(job, gpus, {job.seq: now + left}, left, size)

    def _make(self, move: Move) -> None:
        draft, guest = self.draft, move.guest
        self.objective.note(move)
        saves = f"saves {max(0.0, move.gain):.0f} s in sum"
        if isinstance(move, ClaimGpus):
            draft.hold([gpu for gpu in move.gpus if not draft.jobs_on(gpu)])
        elif isinstance(move, Suspend):
            for victim in move.victims:
                draft.stop(victim, f"suspended so that {guest.job.id} can run first, which {saves}")
            draft.start(guest, f"it starts in place of {names(move.victims)}, which {saves}")
        elif isinstance(move, Join):
            draft.assign(guest, move.gpus, move.size, self._why_join(move, saves))
        elif isinstance(move, StartAlone):
            why = f"its GPUs are free, and starting it {saves} over it and the queue"
            draft.assign(guest, move.gpus, move.size, why)

    def _why_join(self, move: Join, saves: str) -> str:
        now, size = self.view.now, move.size
        alone = move.guest.alone_left(now)
        ratio = (move.ends[move.guest.seq] - now) / alone if alone else 1.0  # stopped at its very end: none left
        split = f", batch split into {size.accumulation}" if size.accumulation > 1 else ""
        longer = f"it takes {ratio:.2f}× as long as alone{split}"
        return f"it shares with {names(move.hosts)}: {longer}, and still {saves} over it, its hosts and the queue"


def _starved(view: View, patience: float) -> list[JobView]:
    """Return the jobs that have waited more than `patience` times their length and the mean JCT, in queue order."""
    now, least = view.now, patience * view.mean_jct_s
    found = []
    young = now - least
    for _, record in view.queue.by_age:
        if record.job.submitted >= young:
            break
        waited = record.waited(now)
        if waited > least and waited > patience * record.alone_left(now):
            found.append(record)
    found.sort(key=lambda record: (-record.shape.priority, record.seq))
    return found
