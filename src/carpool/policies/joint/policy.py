"""The joint rule: every move is judged by what it does to the guest, to every host and to everybody who waits.

`joint_scene.py` is the objective, `joint_places.py` and `joint_openings.py` find the candidates, and here is the
choice: start alone, share now, wait for certain GPUs, suspend somebody, or stay in the queue.
docs/explanation/joint-rule.md tells the rule in words.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile

from carpool.core.draft import Draft
from carpool.core.model import Decision, Status
from carpool.core.shapes import Size
from carpool.core.view import JobView, ScanView, View
from carpool.policies.base import BasePolicy, option, shortest_first
from carpool.policies.joint.deferred_candidates import DeferredCandidates
from carpool.policies.joint.join_candidates import JoinCandidates
from carpool.policies.joint.objective import CLOSE, Move, Objective, names
from carpool.policies.sharing.candidates import Candidates, OptionCache


@dataclass
class Carpool(BasePolicy):
    """The joint rule: make the move that most lowers the completion times of guest, hosts and queue together."""

    name = "carpool"
    suspend: bool = option(False, "suspend running jobs that can checkpoint, where that lowers the sum")
    restart_s: float = option(30.0, "seconds that a suspended job needs to start again; the simulator charges them")  # type: ignore[misc]
    patience: float = option(
        10.0, "who waited longer than so many times its length and the mean JCT goes first; 0: off"
    )
    look_ahead: int = option(48, "so many waiting jobs count when a move is judged")
    tries: int = option(8, "so many jobs may find no place before a pass ends")

    def __post_init__(self) -> None:
        self._options = OptionCache()

    def key(self, job: JobView, now: float) -> tuple[float, ...]:
        return shortest_first(job, now)

    def decide(self, view: View) -> list[Decision]:
        draft = Draft(view)
        shareable = draft.shareable()  # counted before the first move, and kept up to date from then on
        if not len(view.queue) or not (draft.free_count or shareable or self.suspend):
            return []
        return Pass(self, draft, self._options).run()


class Pass:
    """One scheduling pass: who waits is tried in order, the starved first, then the shortest."""

    def __init__(self, policy: Carpool, draft: Draft, cache: OptionCache) -> None:
        self.policy = policy
        self.draft = draft
        self.view = draft.view
        self.starved = _starved(draft.view, policy.patience) if policy.patience else []
        self.objective = Objective(draft, policy.look_ahead, policy.restart_s, self.starved)
        self.places = JoinCandidates(draft, Candidates(draft, cache), self.objective)
        self.openings = DeferredCandidates(draft, self.objective)

    def run(self) -> list[Decision]:
        draft = self.draft
        pending = draft.pending()
        somebody_waits = False
        blocked = 0
        for job, from_scan in self._in_order(pending):
            if not draft.may_start(job):
                alike_too = True
            elif not somebody_waits and self._start_alone(job):
                continue
            else:
                alike_too = not self._place(job)
                somebody_waits = somebody_waits or alike_too or bool(self.objective.claimed)
                blocked += alike_too
            if alike_too and from_scan:
                pending.skip_alike()
            if blocked >= self.policy.tries:
                break
        return draft.decisions

    def _in_order(self, pending: ScanView) -> Iterator[tuple[JobView, bool]]:
        """The waiting jobs, and whether the scan handed them out; who starves comes before others of its priority.

        Where too few GPUs are free for anybody and none was given back just now, only new jobs are tried: the others
        found no place since, and as time passes the hosts have less left, so that joining them pays less.
        """
        starved = list(self.starved)
        nobody_fits = min([shape.gpus for shape in self.view.queue.buckets]) > self.draft.free_count
        if nobody_fits and not starved and self.view.last_capacity_change < self.view.now:
            for job in self._new():
                yield job, False
            return
        for job in pending:
            while starved and starved[0].shape.priority >= job.shape.priority:
                yield starved.pop(0), False
            if job not in self.starved:
                yield job, True

    def _new(self) -> list[JobView]:
        """The jobs that were submitted just now, in the queue's order."""
        now = self.view.now
        new = takewhile(lambda job: job.pending_since == now, self.view.newest_first())
        waiting = [job for job in new if job.status is Status.PENDING]
        return sorted(waiting, key=lambda job: (-job.shape.priority, self.policy.key(job, now), job.seq))

    # ---- the choice ------------------------------------------------------------------------------------------------

    def _start_alone(self, job: JobView) -> bool:
        """Nobody before it waits, so nobody can lose."""
        move = self._alone(job)
        if move is None:
            return False
        self.objective.note(move)
        assert move.size is not None
        self.draft.assign(job, move.gpus, move.size, "its GPUs are free, and it keeps nobody before it waiting")
        return True

    def _place(self, job: JobView) -> bool:
        """Make the best move for a job, if there is one; for a job that starves, keep GPUs for it otherwise."""
        within = job.shape.gpus <= self.draft.free_count + self.draft.shareable().bit_count()
        move = self._choose(job) if within or self.policy.suspend else None
        if move is None and job in self.starved:
            move = self.openings.reservation(job)
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
        best = self._best(self.places.now(job))
        if best is not None:
            best = self._best(self.openings.later(job, best.gain), best)
        if self.policy.suspend:
            best = self._best(self.openings.suspensions(job), best)
        return best

    def _best(self, moves: Iterable[Move], best: Move | None = None) -> Move | None:
        """The move with the largest gain, provided that it beats `best`, or doing nothing."""
        objective = self.objective
        for move in moves:
            bar = best.gain if best is not None else CLOSE
            if not move.victims and objective.budget(move.guest) - move.cost <= bar:
                continue  # not even if those who wait lose nothing
            gain = objective.price(move)
            if gain is not None and gain > bar:
                best = move
        return best

    def _alone(self, job: JobView) -> Move | None:
        place = self.draft.place_alone(job)
        if place is None:
            return None
        gpus, size = place
        now = self.view.now
        left = job.whole_left(now) * size.relative_time
        return Move(job, gpus, size, {job.seq: now + left}, left)

    def _make(self, move: Move) -> None:
        draft, guest, size = self.draft, move.guest, move.size
        self.objective.note(move)
        if size is None:
            draft.hold([gpu for gpu in move.gpus if not draft.jobs_on(gpu)])
            return
        if move.victims:
            for victim in move.victims:
                draft.stop(
                    victim, f"suspended so that {guest.job.id} can run first, which saves {move.gain:.0f} s in sum"
                )
            draft.start(guest, f"starts in place of {names(move.victims)}, which saves {move.gain:.0f} s in sum")
            return
        draft.assign(guest, move.gpus, size, self._why(move, size))

    def _why(self, move: Move, size: Size) -> str:
        if not move.hosts:
            return f"its GPUs are free, and those who wait lose less than it gains, by {max(0.0, move.gain):.0f} s"
        now = self.view.now
        alone = move.guest.alone_left(now)
        ratio = (move.ends[move.guest.seq] - now) / alone if alone else 1.0  # one that was stopped at its very end
        cut = f", batch cut in {size.accumulation}" if size.accumulation > 1 else ""
        shares = f"shares with {names(move.hosts)}{cut}: takes {ratio:.2f} times as long as alone"
        return f"{shares}, yet saves {move.gain:.0f} s in sum over it, them and the queue"


def _starved(view: View, patience: float) -> list[JobView]:
    """Jobs that have waited more than `patience` times their length and the mean JCT so far, longest wait first."""
    now, least = view.now, patience * view.mean_jct_s
    found = []
    young = now - least
    for _, record in view.queue.by_age:
        if record.job.submitted >= young:
            break
        waited = record.waited_s + now - record.pending_since
        if waited > least and waited > patience * record.alone_left(now):
            found.append(record)
    found.sort(key=lambda record: (-record.shape.priority, record.seq))
    return found
