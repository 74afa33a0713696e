"""Groups and users, what they used of the cluster, and which of them go first.

A GPU-second that a tenant used counts half after a half-life. A GPU that several jobs compute on is charged to each of
them in equal parts. A tenant whose usage is below its share goes before one whose usage is above it: `rank` is where
a waiting job stands for its group and its user, and the queue sorts by it before the policy's own key. `State` owns the
one `Tenants`; `transitions` and what they call report what happens; `Scheduler.step` calls `refresh` before a decision.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, exp2, floor, log, log2, pow
from typing import Any

from carpool.core.codec import builder, plain
from carpool.core.model import FairShare, UserGroup
from carpool.core.record import JobRecord
from carpool.core.shapes import Shape

Rank = tuple[int, int, int]
"""0 for a job that its group is entitled to have started, else 1; the tier of its group; that of its user. The smallest
goes first."""
PLAIN: Rank = (1, 0, 0)
"""The rank of all jobs where shares do not count."""
DEFAULT_STRENGTH = 0.5
"""Strength that operators are advised to begin with."""
LOG_2 = log(2.0)
WIDEST = 10.0
"""Factor, as an exponent of 2, by which usage and share may differ before that counts, at a strength of almost 0."""
BELOW = 5.0
"""Factor, as an exponent of 2, by which a group must be below its share to be entitled to GPUs, at that strength, under
a policy that needs a margin (`Entitlement.far_below`)."""
STEP = 1.0
"""Factor, as an exponent of 2, that one tier spans."""
FURTHEST = 12.0
"""Factor, as an exponent of 2, beyond which it does not count by how much a tenant is below or above its share."""
NOTHING = 1e-100
"""GPU-seconds that count as none: what decays for long enough leaves less, and rounding may leave less than 0."""
MOST_WEIGHT, ENTITLED_WEIGHT = 4.0, 2.0
"""Exponents of 2: the largest weight that tiers give a job, and what it is multiplied by for an entitled one."""
REFRESHES = 256
"""Number of times per half-life that tiers are computed again where nothing but time passes, at strengths below 1."""


@dataclass(frozen=True, slots=True)
class Entitlement:
    """Which part of its share a group may have before others get any, under a policy. A policy may have an attribute
    `entitlement`; `WITHOUT_PREEMPTION` counts for one that has none."""

    far_below: bool
    """Whether a group must have used far less than its part: what starts first stays to its end, which may be much more
    than the part, and keeps shorter jobs waiting. A policy that takes GPUs back as soon as the group has used its part
    needs no such margin, nor does one in the order of submission, where a long job also keeps short ones waiting
    without shares."""
    held_exponent: float
    """The part of its share that a group may hold at a moment is the strength to this power."""

    def below(self, strength: float) -> float:
        """Return by how many doublings a group must be below its share."""
        return BELOW * (1.0 - strength) if self.far_below else -log2(strength)

    def held(self, strength: float) -> float:
        """Return the part of its share that a group may hold."""
        return pow(strength, self.held_exponent)


WITHOUT_PREEMPTION = Entitlement(far_below=True, held_exponent=2.0)
WITH_PREEMPTION = Entitlement(far_below=False, held_exponent=0.0)
"""The strength is the part of its share that a group may use over time. At a moment it may hold the whole share: GPUs
are taken back as soon as it has used its part."""
IN_ORDER = Entitlement(far_below=False, held_exponent=1.0)
"""For policies that start jobs in the order of submission, the strength is also the part that it may hold."""


class Tenant:
    """A group, or a user within a group: what it holds, what it used, and its tier."""

    __slots__ = (
        "below",
        "gpus",
        "jobs",
        "members",
        "name",
        "rate",
        "share_gpus",
        "since",
        "tier",
        "used",
        "version",
        "weight",
    )

    def __init__(self, name: str, weight: float = 1.0) -> None:
        self.name = name
        self.weight = weight
        self.jobs = 0
        """Number of jobs that have not ended."""
        self.gpus = 0
        """Number of GPUs that its jobs hold."""
        self.rate = 0.0
        """GPUs that it is charged for at this moment."""
        self.used = 0.0
        """Decayed GPU-seconds at the time `since`."""
        self.since = 0.0
        self.tier = 0
        self.below = False
        """Whether it used less than its share by more than is tolerated, when the tiers were last computed."""
        self.share_gpus = 0
        """The GPUs that it may hold before others get any if it is below its share: a part of its share, rounded up,
        when the tiers were last computed."""
        self.members: dict[str, Tenant] = {}
        """The users of a group."""
        self.version = 0
        """Number of times that the ranks of a group's jobs may have changed for another reason than what it holds."""

    def used_at(self, now: float, half_life_s: float) -> float:
        """Return its decayed GPU-seconds at a time that is not before the last change."""
        passed = now - self.since
        if passed <= 0.0:
            return self.used
        kept = exp2(-passed / half_life_s)
        return self.used * kept + self.rate * half_life_s / LOG_2 * (1.0 - kept)

    def charge(self, change: float, now: float, half_life_s: float) -> None:
        """Let it pay for more or fewer GPUs from now on."""
        if now != self.since:
            self.used = self.used_at(now, half_life_s)
            self.since = now
        self.rate += change


class Tenants:
    """All groups with their users. Nothing is counted before `on`."""

    def __init__(self) -> None:
        self.fair_share = FairShare()
        self.settings: dict[str, UserGroup] = {}
        """The groups that the operator described."""
        self.groups: dict[str, Tenant] = {}
        """The groups that have or had jobs, described or not."""
        self.caps: dict[str, int] = {}
        """The largest number of GPUs that a group may hold, of groups for which there is one."""
        self.on = False
        """Whether shares, guarantees or caps count. Where they do not, nothing here costs time."""
        self.entitlement = WITHOUT_PREEMPTION
        """What the policy lets a group have before others; the scheduler sets it before each decision."""
        self.changed: set[str] = set()
        """Groups whose jobs may have another rank than the queue knows."""
        self._stale = True
        self._next_refresh = 0.0

    # ---- settings --------------------------------------------------------------------------------------------------

    def describe(self, group: UserGroup) -> None:
        """Take over what the operator says about a group."""
        self.settings[group.name] = group
        if group.name in self.groups:
            self.groups[group.name].weight = group.weight
        self._switch()

    def choose(self, fair_share: FairShare, now: float) -> None:
        """Take over how strongly shares count."""
        for tenant in self._all():  # what was used so far decays with the old half-life
            tenant.charge(0.0, now, self.fair_share.half_life_s)
            if not fair_share.strength:  # guarantees and caps may count on, without shares
                tenant.tier, tenant.below, tenant.share_gpus = 0, False, 0
        self.fair_share = fair_share
        self._switch()

    def _switch(self) -> None:
        self.caps = {group.name: group.cap for group in self.settings.values() if group.cap is not None}
        guaranteed = any(group.guarantee for group in self.settings.values())
        self.on = self.fair_share.strength > 0.0 or guaranteed or bool(self.caps)
        self._stale = True
        for group in self.groups.values():
            group.version += 1

    # ---- what happens ----------------------------------------------------------------------------------------------

    def group(self, name: str) -> Tenant:
        """Return a group. It is known from its first job on."""
        found = self.groups.get(name)
        if found is None:
            setting = self.settings.get(name)
            found = self.groups[name] = Tenant(name, setting.weight if setting is not None else 1.0)
        return found

    def of(self, record: JobRecord) -> tuple[Tenant, Tenant]:
        """Return the group and the user of a job."""
        job = record.job
        group = self.groups.get(job.group) or self.group(job.group)
        user = group.members.get(job.user)
        if user is None:
            user = group.members[job.user] = Tenant(job.user)
        return group, user

    def count(self, record: JobRecord, sign: int) -> None:
        """Count a job that was submitted (sign 1) or has ended (sign −1)."""
        for tenant in self.of(record):
            tenant.jobs += sign
            if tenant.jobs == (sign > 0):
                self._stale = True  # the others' shares are larger or smaller now

    def hold(self, record: JobRecord, sign: int, rate: float, now: float) -> None:
        """Count the GPUs that a job got (sign 1) or gave back (sign −1), and let its tenants pay for `rate` of them."""
        number, change, half_life_s = sign * len(record.gpus), rate - record.charge, self.fair_share.half_life_s
        record.charge = rate
        group, user = self.of(record)
        for tenant in (group, user):
            tenant.gpus += number
            tenant.charge(change, now, half_life_s)
            if not tenant.gpus:
                tenant.rate = 0.0  # no residue of rounding
        if group.below or group.name in self.settings:  # what it is entitled to depends on what it holds
            self.changed.add(group.name)

    def charge(self, record: JobRecord, rate: float, now: float) -> None:
        """Let a job's tenants pay for this many GPUs from now on."""
        change = rate - record.charge
        if change:
            record.charge = rate
            half_life_s = self.fair_share.half_life_s
            for tenant in self.of(record):
                tenant.charge(change, now, half_life_s)

    # ---- which of them goes first ----------------------------------------------------------------------------------

    def refresh(self, now: float, total: int, *, at_once: bool = False) -> None:
        """Compute the tiers again, if that is due; `total` is the number of GPUs in the cluster."""
        if not self._stale and now < self._next_refresh and not at_once:
            return
        self._stale = False
        strength, half_life_s = self.fair_share.strength, self.fair_share.half_life_s
        self._next_refresh = now + (half_life_s / REFRESHES if strength < 1.0 else 0.0)
        if not strength:
            return
        present = [group for group in self.groups.values() if group.jobs]
        before = {group.name: (group.tier, group.below, group.share_gpus) for group in present}
        self._rate_all(present, now, total)
        for group in present:
            if (group.tier, group.below, group.share_gpus) != before[group.name]:
                self._note_change(group)
            if len(group.members) > 1:
                self._rate_members(group, now)

    def _rate_members(self, group: Tenant, now: float) -> None:
        users = [user for user in group.members.values() if user.jobs]
        before = [user.tier for user in users]
        self._rate_all(users, now, 0)
        if [user.tier for user in users] != before:
            self._note_change(group)

    def _note_change(self, group: Tenant) -> None:
        self.changed.add(group.name)
        group.version += 1

    def _rate_all(self, tenants: list[Tenant], now: float, total: int) -> None:
        """Give each of some tenants that compete its tier: how far its usage is below or above its share."""
        half_life_s, strength = self.fair_share.half_life_s, self.fair_share.strength
        band, below, held = tolerance(strength), self.entitlement.below(strength), self.entitlement.held(strength)
        used = [tenant.used_at(now, half_life_s) for tenant in tenants]
        used = [own if own > NOTHING else 0.0 for own in used]
        all_used, weights = sum(used), sum([tenant.weight for tenant in tenants])
        for tenant, own in zip(tenants, used, strict=True):
            share = tenant.weight / weights if weights else 0.0
            tenant.share_gpus = ceil(share * total * held - 1e-9)
            if not own or not all_used:
                distance = -FURTHEST if all_used else 0.0
            elif not share:
                distance = FURTHEST
            else:
                distance = min(max(log2(own / (share * all_used)), -FURTHEST), FURTHEST)
            tenant.below = distance < -below
            tenant.tier = _tier(distance, band)

    def rank(self, shape: Shape, held: int | None = None) -> Rank:
        """Return the rank of waiting jobs of a shape; `held` is what their group would hold with one of them."""
        group = self.groups.get(shape.group) if shape.group is not None else None
        if group is None:
            return PLAIN
        user = group.members.get(shape.user or "")
        entitled = self._entitled(group, group.gpus + shape.gpus if held is None else held)
        return (0 if entitled else 1, group.tier, user.tier if user is not None else 0)

    def may_be_entitled(self, group: Tenant) -> bool:
        """Return whether a group may hold any GPUs before others get more."""
        return group.below or group.name in self.settings

    def _entitled(self, group: Tenant, held: int) -> bool:
        """Return whether a group may hold this many GPUs before others get any more."""
        setting = self.settings.get(group.name)
        if setting is not None and held <= setting.guarantee:
            return True
        return group.below and (held <= group.share_gpus or self.fair_share.strength >= 1.0)

    def weight(self, shape: Shape) -> float:
        """Return what a second of the completion time of jobs of a shape counts for."""
        entitled, group, user = self.rank(shape)
        return exp2(min(max(-group - user, -MOST_WEIGHT), MOST_WEIGHT) + (0.0 if entitled else ENTITLED_WEIGHT))

    # ---- as plain data ---------------------------------------------------------------------------------------------

    def dump(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return {
            "fair_share": plain(self.fair_share),
            "settings": [plain(group) for group in self.settings.values()],
            "groups": [_dump(group) for group in self.groups.values()],
            "next_refresh": self._next_refresh,
            "stale": self._stale,
        }

    @classmethod
    def load(cls, data: dict[str, Any]) -> "Tenants":
        """Return the tenants that `dump` wrote. What jobs hold and pay is part of it."""
        tenants = cls()
        tenants.fair_share = builder(FairShare)({**data["fair_share"]})
        for setting in data["settings"]:
            group = builder(UserGroup)({**setting})
            tenants.settings[group.name] = group
        tenants._switch()
        tenants.groups = {raw["name"]: _load(raw) for raw in data["groups"]}
        tenants._next_refresh, tenants._stale = data["next_refresh"], data["stale"]
        return tenants

    def _all(self) -> Iterable[Tenant]:
        for group in self.groups.values():
            yield group
            yield from group.members.values()


def settings_problem(group: UserGroup) -> str | None:
    """Return why what an operator says about a group cannot hold, or None."""
    if group.cap is not None and group.cap < group.guarantee:
        return f"cap: group {group.name} has a cap of {group.cap}, below its guarantee of {group.guarantee}"
    default, most = group.default_limit_s, group.max_limit_s
    if default is not None and most is not None and default > most:
        return f"default_limit_s: group {group.name} has a default above its maximum"
    return None


_KEPT = ("name", "weight", "jobs", "gpus", "rate", "used", "since", "tier", "below", "share_gpus")
"""The attributes of a tenant that are plain data."""


def _dump(tenant: Tenant) -> dict[str, Any]:
    data = {name: getattr(tenant, name) for name in _KEPT}
    return {**data, "members": [_dump(member) for member in tenant.members.values()]}


def _load(data: dict[str, Any]) -> Tenant:
    tenant = Tenant(data["name"])
    for name in _KEPT:
        setattr(tenant, name, data[name])
    tenant.members = {raw["name"]: _load(raw) for raw in data["members"]}
    return tenant


def tolerance(strength: float) -> float:
    """Return the factor, as an exponent of 2, by which usage and share may differ before that counts."""
    return WIDEST * (1.0 - strength)


def _tier(distance: float, band: float) -> int:
    """Return the tier of a tenant whose usage is 2^distance times its share: 0 within the tolerance."""
    if -band <= distance <= band:
        return 0
    return floor((distance + band) / STEP) if distance < 0.0 else ceil((distance - band) / STEP)
