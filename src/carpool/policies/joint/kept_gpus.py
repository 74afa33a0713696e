"""The free GPUs that the joint rule keeps for starved jobs, and the short jobs that use them meanwhile.

A starved gang waits until enough GPUs are free at once. `policy` keeps the first of them here, and lets a job that will
end in good time fill in. Otherwise these GPUs are idle until the last GPU for the gang is free.
"""

from carpool.core.draft import Draft
from carpool.core.model import GpuId
from carpool.core.view import JobView
from carpool.policies.joint.moves import ClaimGpus, FillIn

IN_GOOD_TIME = 2.0
"""A job fills in if this many times its time left pass before the GPUs are needed, because estimates may be wrong."""


class KeptGpus:
    """The free GPUs of one scheduling pass that are kept for jobs which wait for more."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._kept: list[tuple[float, JobView, list[GpuId]]] = []  # when they are needed, and for which job

    def keep(self, claim: ClaimGpus) -> None:
        """Keep the free ones of the GPUs that a job claims."""
        draft, guest = self._draft, claim.guest
        free = [gpu for gpu in claim.gpus if not draft.jobs_on(gpu)]
        draft.hold(free)
        if free:
            needed = claim.ends[guest.seq] - guest.alone_left(draft.view.now) - guest.startup_s
            self._kept.append((needed, guest, free))

    def fill_in(self, job: JobView) -> FillIn | None:
        """Return a start of a job on GPUs that are kept, if it will end in good time. They are free again in the draft,
        so that the move can be made."""
        draft, now = self._draft, self._draft.view.now
        left = job.whole_left(now)
        for number, (needed, claimant, gpus) in enumerate(self._kept):
            if now + IN_GOOD_TIME * (left + job.startup_s) > needed:
                continue
            draft.release(gpus)
            place = draft.place_alone(job)
            end = now + left * place[1].relative_time + job.startup_s if place is not None else needed
            if place is None or now + IN_GOOD_TIME * (end - now) > needed:
                draft.hold(gpus)
                continue
            chosen, size = place
            rest = [gpu for gpu in gpus if gpu not in chosen]
            draft.hold(rest)
            self._kept[number] = needed, claimant, rest
            return FillIn(job, chosen, {job.seq: end}, end - now, size, claimant)
        return None
