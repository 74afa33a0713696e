"""The ranks of the jobs that hold GPUs, for policies that compare them with jobs that wait.

What a group is entitled to goes to its jobs in the order of submission, and one that is too large for the rest of it
takes nothing. So a job that starts because its group is entitled to it stays entitled, whatever else starts; otherwise
a policy that preempts would stop it at once, and start it again for ever.

Most decisions change the jobs of few groups, and tiers change seldom, so the ranks are kept, group by group. `State`
creates the index when a policy first uses it.
"""

from collections.abc import Iterable, Mapping

from carpool.core.record import JobRecord
from carpool.core.tenants import Rank, Tenants


class HolderRanks:
    """The ranks that the jobs that hold GPUs would have if they waited, by `seq`."""

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self._ranks: dict[int, Rank] = {}
        self._holders: dict[str, dict[int, tuple[int, JobRecord]]] = {}
        """The jobs of each group and the number of GPUs that each holds, by `seq`."""
        self._versions: dict[str, int] = {}
        """The version of each group for which its ranks were computed (`Tenant.version`)."""
        self._changed: dict[str, set[int]] = {}
        """The jobs of each group that got GPUs or gave them back since then, by `seq`."""
        self._equal: dict[Rank, Rank] = {}
        """One object for all equal ranks, so that comparing them costs less."""

    def touch(self, record: JobRecord) -> None:
        """Enter a job again: it may have got GPUs or given them back."""
        seq, gpus, name = record.seq, len(record.gpus), record.job.group
        holders = self._holders.setdefault(name, {})
        if (holders[seq][0] if seq in holders else 0) == gpus:
            return
        if gpus:
            holders[seq] = gpus, record
        else:
            del holders[seq]
            self._ranks.pop(seq, None)
        self._changed.setdefault(name, set()).add(seq)

    def refresh(self) -> Mapping[int, Rank]:
        """Return the ranks of all jobs. They are computed again where those of a group may be others now."""
        groups = self._tenants.groups
        for name, holders in self._holders.items():
            if not holders:
                continue
            group = groups[name]
            if self._versions.get(name) != group.version:
                self._versions[name] = group.version
                self._rank(holders, holders)
            elif name in self._changed:
                self._rank(holders, holders if self._tenants.may_be_entitled(group) else self._changed[name])
        self._changed.clear()
        return self._ranks

    def _rank(self, holders: Mapping[int, tuple[int, JobRecord]], wanted: Iterable[int]) -> None:
        """Compute the ranks of some jobs of a group: of all, if it may be entitled to any."""
        entitled = 0  # GPUs of the jobs to which the group is entitled
        for seq in sorted(wanted):
            if seq not in holders:
                continue
            gpus, record = holders[seq]
            rank = self._tenants.rank(record.shape, entitled + gpus)
            self._ranks[seq] = self._equal.setdefault(rank, rank)
            if not rank[0]:
                entitled += gpus
