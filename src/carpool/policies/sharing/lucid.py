"""Indolent packing after Lucid (Hu et al., ASPLOS 2023): jobs share only where hardly anybody will notice.

Jobs stand in the order of their GPU time. One that finds no free GPUs joins a running job of the same gang size on
exactly its GPUs, if neither is predicted to slow down by more than a cap; of several such hosts it takes the one
where both together lose least. Two jobs at most share a GPU, as in the original, whatever C is. What we simplify: Lucid
classes jobs by their GPU utilisation and predicts run times with models of its own, where we use the slow-downs and
times that the scheduler believes; its profiling partition, and that it packs more eagerly under load, are left out.
"""

from dataclasses import dataclass

from carpool.core.draft import Draft
from carpool.core.model import Decision
from carpool.core.view import JobView, View
from carpool.policies.base import BasePolicy, option
from carpool.policies.sharing.whole_gang_hosts import WholeGangHosts


@dataclass
class Lucid(BasePolicy):
    """The least GPU time first; what finds no free GPUs joins a job of its size where neither slows down much."""

    name = "lucid"
    cap: float = option(1.2, "the most that a job may be predicted to slow down by sharing")

    def key(self, job: JobView, now: float) -> tuple[float, ...]:
        return (job.alone_left(now) * job.shape.gpus,)

    def decide(self, view: View) -> list[Decision]:
        draft = Draft(view)
        lodgings = WholeGangHosts(draft)
        pending = draft.pending()
        for job in pending:
            before = len(draft.decisions)
            if not draft.start(job, "least GPU time in the queue that fits") and not self._join(draft, job, lodgings):
                pending.skip_alike()
            if len(draft.decisions) > before:
                lodgings = WholeGangHosts(draft)
        return draft.decisions

    def _join(self, draft: Draft, guest: JobView, lodgings: WholeGangHosts) -> bool:
        """Share with the host that suits best."""
        if guest.shape.exclusive or draft.view.jobs_per_gpu == 1 or not draft.may_start(guest):
            return False
        fits = []
        for kind, sample in lodgings.kinds():
            fit = lodgings.fit(guest, kind, sample, self.cap)
            if fit is not None:
                fits += [
                    (fit.guest_xi + fit.host_xi, h.record.seq, fit, h) for h in lodgings.hosts(kind, guest.shape.gpus)
                ]
        for _, _, fit, host in sorted(fits, key=lambda found: found[:2]):
            gpus = lodgings.admits(guest, fit.size, host)
            if gpus is not None:
                slower = f"{fit.guest_xi:.2f} times slower (it {fit.host_xi:.2f}), at most {self.cap:.2f}"
                draft.assign(guest, gpus, fit.size, f"shares with {host.record.job.id}: {slower}")
                return True
        return False
