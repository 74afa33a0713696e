"""The joint rule's candidates for jobs that hold GPUs: paused ones that go on or move, and sharing ones that give way.

A paused job goes on where it is: alone, or beside one of the active jobs there, those with least left, or all. It can
also move to free GPUs, as a job that shares can. A job that shares is paused where its mates gain more by that.
"""

from collections.abc import Sequence

from carpool.core.draft import Draft
from carpool.core.rules import Resident
from carpool.core.view import JobView
from carpool.policies.joint.choice import Choice
from carpool.policies.joint.displacements import SWITCH_S, Displacements, starts_up
from carpool.policies.joint.moves import Displace, Relocate
from carpool.policies.joint.objective import Objective
from carpool.policies.joint.simulate_ends import Participant, simulate_ends

MOST_DOUBLINGS = 20
"""Number of pauses after which the price of withdrawing a job stays as it is."""


class ResumeCandidates:
    """The moves of one scheduling pass for jobs that are paused or share their GPUs."""

    def __init__(self, draft: Draft, objective: Objective, displacements: Displacements) -> None:
        self.draft = draft
        self.objective = objective
        self.displacements = displacements
        self.view = draft.view

    def offer(self, guest: JobView, choice: Choice) -> None:
        """Offer ways to let a paused job go on where it is."""
        if guest.swapped and not all(self.draft.fits(gpu, self._memory(guest), again=True) for gpu in guest.gpus):
            return
        size = next(size for size in guest.shape.sizes if size.accumulation == guest.accumulation)
        now = self.objective.now
        left, beside = guest.alone_left(now), self.displacements.active(guest.gpus)
        starting = [resident for resident in beside if starts_up(resident.record, now)]
        active = [resident for resident in beside if resident not in starting]
        shares = not guest.shape.exclusive
        choices = self.displacements.kept(guest, guest.gpus, active, left, several=shares)
        if shares and len(active) > 1 and self.displacements.room_beside(guest.gpus, active) == len(active):
            choices.append(tuple(active))
        for kept in choices:
            self.displacements.offer(guest, guest.gpus, size, left, kept, choice, starting=starting)

    def _memory(self, guest: JobView) -> int:
        return self.view.perf.memory(guest.job, guest.accumulation)

    def offer_relocation(self, guest: JobView, choice: Choice) -> None:
        """Offer to move a job to free GPUs, if there are enough; its mates speed up."""
        place = self.draft.place_alone(guest)
        if place is None or not guest.job.can_suspend or guest.batch is not None:
            return
        gpus, size = place
        objective = self.objective
        now = objective.now
        cost = guest.whole_left(now) * size.relative_time + objective.restart_s
        ends = {guest.seq: now + cost}
        beside = self.displacements.active(guest.gpus) if guest.active else []
        mates = [resident.record for resident in beside if resident.record is not guest]
        for mate in mates:
            if mate.seq in objective.moved or not mate.gpus:
                return
            if len(self.displacements.active(mate.gpus)) == 2:  # it will be the only one
                ends[mate.seq] = now + mate.alone_left(now)
                cost -= objective.end(mate) - ends[mate.seq]
        choice.offer(Relocate(guest, gpus, ends, cost, size, tuple(mates)))

    # ---- for a job that shares --------------------------------------------------------------------------------------

    def offer_withdrawal(self, job: JobView, choice: Choice) -> None:
        """Offer to pause the job with most left among a job that shares and its mates, unless it must not be.

        Its mates speed up, and it goes on after them.
        """
        objective, now = self.objective, self.objective.now
        beside = [resident.record for resident in self.displacements.active(job.gpus)]
        guest = max(beside, key=lambda record: (record.alone_left(now), record.seq))
        mates = [resident for resident in self.displacements.active(guest.gpus) if resident.record is not guest]
        if not mates or not all(self._outlives(guest, resident.record) for resident in mates):
            return
        # the price doubles with every pause, so that contradicting estimates cannot make it pause and resume in turn
        cost, ends = SWITCH_S * 2.0 ** min(guest.pauses, MOST_DOUBLINGS), {}
        for resident in mates:
            mate = resident.record
            ends[mate.seq] = now + mate.alone_left(now) * self._without(resident, guest)
            cost += ends[mate.seq] - objective.end(mate)
        ends[guest.seq] = max(ends.values()) + guest.alone_left(now)
        cost += ends[guest.seq] - now
        if sum(ends.values()) - now * len(ends) + SWITCH_S >= self._believed_sum(guest, mates):
            return  # by the belief it would go on again at once
        size = next(size for size in guest.shape.sizes if size.accumulation == guest.accumulation)
        hosts = tuple([resident.record for resident in mates])
        move = Displace(guest, guest.gpus, ends, cost, size, hosts, (), withdraws=True)
        if objective.delay_paused(move, choice.most):
            choice.offer(move)

    def _outlives(self, guest: JobView, mate: JobView) -> bool:
        """Return whether a job may be paused for a mate that computes, and has more left."""
        now = self.objective.now
        return (
            mate.computing
            and mate.seq not in self.objective.moved
            and self.displacements.may_pause(guest, mate)
            and mate.alone_left(now) < guest.alone_left(now)
        )

    def _believed_sum(self, guest: JobView, mates: Sequence[Resident]) -> float:
        """Return the sum of the completion times, counted from now, of jobs that go on sharing, as believed."""
        beside = [Resident(guest, guest.accumulation, guest.memory), *mates]
        number = {resident.record.seq: index for index, resident in enumerate(beside)}
        cells = {
            tuple([number[r.record.seq] for r in self.draft.active_on(gpu) if r.record.seq in number])
            for resident in beside
            for gpu in resident.record.gpus
        }
        participants = [
            Participant(r.record.alone_left(self.objective.now), r.record.job, r.accumulation) for r in beside
        ]
        return sum(simulate_ends(participants, sorted(cells), self.view.perf))

    def _without(self, resident: Resident, gone: JobView) -> float:
        """Return the slow-down of a resident without one of its mates."""
        worst = 1.0
        for gpu in resident.record.gpus:
            beside = [r for r in self.draft.active_on(gpu) if r.record is not resident.record and r.record is not gone]
            if beside:
                mates = [(r.record.job, r.accumulation) for r in beside]
                worst = max(worst, self.view.perf.slowdown(resident.record.job, resident.accumulation, mates))
        return worst
