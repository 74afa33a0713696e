"""What each host offers to guests, and a log of how that changed.

A policy that found too few hosts for a job need not look at all of them again: what the hosts have left only becomes
less with time, so that the changes since then decide. `Hosts` owns the log, which begins when a policy first asks.
"""

from carpool.core.record import JobRecord
from carpool.core.view import HostKind, JobView, Offer, OfferChange, OtherHost

MOST_CHANGES = 4096
"""Number of changes that the log keeps at most. A policy that did not read it for so long looks at all hosts again."""


class Offers:
    """The offers of all hosts, and the latest changes."""

    def __init__(self) -> None:
        self.by_seq: dict[int, Offer] = {}
        """The offer of each host, by the host's `seq`."""
        self.changes: list[OfferChange] = []
        """The latest changes, in order."""
        self.forgotten = 0
        """Number of changes before the first of `changes`."""
        self.added = 0
        """Number of GPUs that changes so far added, those that took GPUs away aside."""

    def update(self, record: JobRecord, described: HostKind | OtherHost | None) -> None:
        """Replace what a job offers by what its new entry in the index of hosts says."""
        before = self.by_seq.pop(record.seq, None)
        if described is not None:
            offer = self.by_seq[record.seq] = offer_of(record, described)
            if before is not None and offer.lasts_like(before):
                self._note(offer.gpus - before.gpus, offer)
                return
            self._note(offer.gpus, offer)
        if before is not None and record.gpus:  # that of a job that has ended has run out by itself
            self._note(-before.gpus, before)

    def _note(self, gpus: int, offer: Offer) -> None:
        if not gpus:
            return
        if gpus > 0:
            self.added += gpus
        if len(self.changes) == MOST_CHANGES:
            del self.changes[: MOST_CHANGES // 2]
            self.forgotten += MOST_CHANGES // 2
        self.changes.append((gpus, offer))


def offer_of(record: JobView, described: HostKind | OtherHost) -> Offer:
    """Return what a host offers, by its entry in the index of hosts."""
    if isinstance(described, HostKind):  # a lone host runs at full speed
        return Offer(described, record.job, 1.0, record.end(), len(record.gpus))
    gpus = len(described.alone_on)
    if record.computing:
        return Offer(described.kind, record.job, record.slowdown, record.end(), gpus)
    left = (record.job.iterations - record.done) * record.alone_iteration_s + record.startup_s
    return Offer(described.kind, record.job, 0.0, left, gpus)
