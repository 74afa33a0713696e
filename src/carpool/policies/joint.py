"""The joint rule: every move is judged by what it does to the guest, to every host and to everybody who waits."""

from collections.abc import Sequence
from dataclasses import dataclass

from carpool.core.draft import Draft
from carpool.core.model import Decision, Status
from carpool.core.record import JobRecord, JobView
from carpool.core.view import View
from carpool.policies.base import BasePolicy, option, shortest_first
from carpool.policies.candidates import Candidates, OptionCache
from carpool.policies.joint_places import Places
from carpool.policies.joint_scene import CLOSE, Move, Scene, names


@dataclass
class Carpool(BasePolicy):
    """Joint rule: the move that lowers the completion times of guest, hosts and queue together the most."""

    name = "carpool"
    suspend: bool = option(False, "suspend running jobs that can checkpoint where that lowers the sum")
    restart_s: float = option(30.0, "seconds a suspended job needs to start again; the simulator charges them")  # type: ignore[misc]
    patience: float = option(10.0, "a job that waited so many times its length, or the mean JCT, goes first; 0: none")
    look_ahead: int = option(64, "so many waiting jobs count when a move is judged")
    later: bool = option(True, "x")
    tries: int = option(16, "so many jobs may find no place before a pass ends")

    def __post_init__(self) -> None:
        self._options = OptionCache()

    def key(self, job: JobView, now: float) -> tuple[float, ...]:
        return shortest_first(job, now)

    def decide(self, view: View) -> list[Decision]:
        if not len(view.queue):
            return []
        draft = Draft(view)
        if not (draft.free_count or draft.shareable() or self.suspend):
            return []
        return _Pass(self, draft, self._options).run()


class _Pass:
    """One scheduling pass."""

    def __init__(self, policy: Carpool, draft: Draft, cache: OptionCache) -> None:
        self.policy = policy
        self.draft = draft
        self.view = draft.view
        self.candidates = Candidates(draft, cache)
        self._scene: Scene | None = None
        self._early: list[Move] = []  # made before a scene was needed

    @property
    def scene(self) -> Scene:
        if self._scene is None:
            self._scene = Scene(self.draft, self.policy.look_ahead, self.policy.restart_s)
            for move in self._early:
                self._scene.note(move)
            self.places = Places(self.draft, self._scene, self.candidates)
        return self._scene

    def run(self) -> list[Decision]:
        draft, policy = self.draft, self.policy
        blocked = 0
        somebody_waits = False
        pending = draft.pending()
        for job in pending:
            within = job.shape.gpus <= draft.free_count + draft.shareable().bit_count()
            if not draft.may_start(job):
                pending.skip_alike()
                continue
            if not within and not policy.suspend:
                somebody_waits = True
                pending.skip_alike()
                continue
            if not somebody_waits and self._start(job, "shortest in the queue, and its GPUs are free"):
                continue
            move = self._choose(job)
            if move is not None:
                self._make(move)
                if move.size is None:
                    somebody_waits = True
            else:
                somebody_waits = True
                pending.skip_alike()
                blocked += 1
                if blocked >= policy.tries:
                    break
        return draft.decisions

    def _start(self, job: JobRecord, why: str) -> bool:
        """Start a job alone if it fits."""
        move = self._alone(job)
        if move is None:
            return False
        self._note(move)
        assert move.size is not None
        self.draft.assign(job, move.gpus, move.size, why)
        return True

    def _note(self, move: Move) -> None:
        if self._scene is not None:
            self._scene.note(move)
        else:
            self._early.append(move)

    # ---- the choice ------------------------------------------------------------------------------------------------

    def _choose(self, job: JobRecord) -> Move | None:
        scene = self.scene
        alone = self._alone(job)
        if alone is not None:
            gain = scene.price(alone)
            if gain is not None and gain >= -CLOSE:
                return alone
        best = self._best(self.places.now(job))
        if best is not None and self.policy.later:
            best = self._best([best, *self.places.later(job)])
        if self.policy.suspend:
            best = self._best([*([best] if best else []), *self.places.suspensions(job)])
        return best

    def _best(self, moves: Sequence[Move]) -> Move | None:
        best: Move | None = None
        for move in moves:
            gain = self.scene.price(move)
            if gain is not None and gain > CLOSE and (best is None or gain > best.gain):
                best = move
        return best

    def _alone(self, job: JobRecord) -> Move | None:
        place = self.draft.place_alone(job)
        if place is None:
            return None
        gpus, size = place
        now = self.view.now
        left = job.whole_left(now) * size.pace
        return Move(job, gpus, size, {job.order: now + left}, left)

    def _make(self, move: Move) -> None:
        self.scene.note(move)
        if move.size is None:
            return
        for victim in move.victims:
            self.draft.stop(victim, f"suspended for {move.guest.job.id}, which is much shorter")
        if move.victims:
            self.draft.start(move.guest, f"starts in place of {names(move.victims)}, which saves {move.gain:.0f} s")
            return
        if not move.hosts:
            why = "its GPUs are free, and nobody who waits loses more than it gains"
        else:
            guest_xi, host_xi = move.slowest
            why = (
                f"shares with {names(move.hosts)}: {guest_xi:.2f} times slower (they {host_xi:.2f}), which saves "
                f"{move.gain:.0f} s in sum over it, them and the queue"
            )
        self.draft.assign(move.guest, move.gpus, move.size, why)
