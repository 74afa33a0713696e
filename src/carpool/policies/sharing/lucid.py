"""Indolent packing after Lucid (Hu et al., ASPLOS 2023): jobs share only where neither slows down noticeably.

Jobs are sorted by their GPU time. One that finds no free GPUs joins a running job of the same gang size on exactly its
GPUs, if neither is predicted to slow down by more than a cap; of several such hosts it takes the one where both
together lose least. At most two jobs share a GPU, as in the original, whatever C is. Simplifications: Lucid classes
jobs by their GPU utilisation and predicts run times with models of its own, where this policy uses the slow-downs and
times that the scheduler believes. Lucid's profiling partition and its more eager packing under load are left out.
"""

from dataclasses import dataclass
from math import inf

from carpool.core.draft import Draft
from carpool.core.model import Decision
from carpool.core.view import JobView, View
from carpool.policies.base import BasePolicy, Explanation, option
from carpool.policies.sharing.explain import ASKED_NOT_TO_SHARE
from carpool.policies.sharing.whole_gang_hosts import WholeGangHosts


@dataclass
class Lucid(BasePolicy):
    """Least GPU time first; a job that finds no free GPUs joins one of its size where neither slows down much."""

    name = "lucid"
    cap: float = option(1.2, "maximum slow-down that sharing may be predicted to cause either job")

    def key(self, job: JobView, now: float) -> tuple[float, ...]:
        return (job.alone_left(now) * job.shape.gpus,)

    def decide(self, view: View) -> list[Decision]:
        draft = Draft(view)
        hosts: WholeGangHosts | None = None  # of the draft as it is
        pending = draft.pending()
        for job in pending:
            if draft.start(job, "least GPU time in the queue that fits"):
                hosts = None
                continue
            hosts = hosts or WholeGangHosts(draft)
            if self._join(draft, job, hosts):
                hosts = None
            else:
                pending.skip_alike()
        return draft.decisions

    def explain(self, view: View, job: JobView) -> Explanation | None:
        if view.jobs_per_gpu == 1:
            return None
        if job.shape.exclusive:
            return ASKED_NOT_TO_SHARE
        fits = WholeGangHosts(Draft(view)).fits(job, inf)
        if not fits:
            return Explanation("no running job of its gang size has room for it")
        worst, host = min(((max(fit.guest_xi, fit.host_xi), host.record.job.id) for fit, host in fits))
        return Explanation(
            f"sharing with job {host}, the best of its gang size, would make one of the two take {worst:.2f}× as long, "
            f"and {self.cap:.2f}× is the limit (option cap)"
        )

    def _join(self, draft: Draft, guest: JobView, hosts: WholeGangHosts) -> bool:
        """Share with the host that suits best."""
        shape = guest.shape
        if shape.exclusive or draft.view.jobs_per_gpu == 1 or shape.general in hosts.none_for:
            return False
        if not draft.may_start(guest):
            return False
        fits = hosts.fits(guest, self.cap)
        for fit, host in sorted(fits, key=lambda found: (found[0].guest_xi + found[0].host_xi, found[1].record.seq)):
            gpus = hosts.admits(guest, fit.size, host)
            if gpus is not None:
                slower = (
                    f"it takes {fit.guest_xi:.2f}× as long, its host {fit.host_xi:.2f}×; the limit is {self.cap:.2f}×"
                )
                draft.assign(guest, gpus, fit.size, f"it shares with job {host.record.job.id}: {slower}")
                return True
        hosts.none_for.add(shape.general)
        return False
