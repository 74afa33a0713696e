"""Accounts: what jobs used of the GPUs, added up by day, group, user and project, so that nothing depends on old jobs.

Every job that holds GPUs has a meter. `State.reindex`, which is called whenever a job or its mates change, lets the
meter count the time since its last reading at the rates of that time and read the new rates; `State.advance` counts the
GPUs that exist. So the hours of all jobs and those of unused GPUs add up to the hours of all GPUs. `State` owns the one
`Accounts`, snapshots contain it, and nothing is counted before `AccountsOpened`. `usage_report` reads it.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from carpool.core.cluster import Cluster
from carpool.core.division import held_and_shared
from carpool.core.free import Topology
from carpool.core.model import JobId, Status
from carpool.core.record import JobRecord

DAY_S = 86_400.0
"""Length of a day; days begin at multiples of it on the driver's clock, which in a service is UTC."""
KEPT_DAYS = 400
"""Number of days that are kept apart. What is older is added up in `EARLIER`."""
EARLIER = -1
"""Number of the day that stands for all days before those that are kept."""

AccountKey = tuple[str, str, str]
"""Group, user and project of a job."""


@dataclass(slots=True)
class JobUsage:
    """What some jobs used: GPU-seconds, and numbers of jobs."""

    held: float = 0.0
    """Their parts of the GPUs that they held."""
    computed: float = 0.0
    """The part of `held` in which they iterated."""
    shared: float = 0.0
    """The part of `held` on GPUs on which other jobs computed, too."""
    paused: float = 0.0
    """Whole GPUs on which they were paused; mostly not part of `held`, because mates compute there."""
    lost: float = 0.0
    """The part of `held` whose work a failure destroyed: since the last checkpoint, or since the start."""
    saved: float = 0.0
    """What the iterations made while sharing would have taken alone, less what was held for them."""
    judged: float = 0.0
    """The part of `held` in which they shared and for which `saved` is known."""
    unjudged: float = 0.0
    """The part of `held` in which they shared and for which `saved` is unknown, because no time alone was measured."""
    jobs: int = 0
    """Number of jobs that ended."""
    failed: int = 0
    """Number of these that failed."""

    def add(self, other: "JobUsage") -> None:
        """Add what other jobs used."""
        _add(self, other, USAGE)


USAGE = tuple(one.name for one in fields(JobUsage))


@dataclass(slots=True)
class GpuTime:
    """GPU-seconds of the cluster."""

    existed: float = 0.0
    """GPUs of nodes that were part of the cluster."""
    idle: float = 0.0
    """Those of them that no job held, and on which jobs could start."""
    closed: float = 0.0
    """Those of them that no job held, and on which nothing could start."""
    away: float = 0.0
    """GPUs of nodes that had been part of the cluster before and were not."""

    def add(self, other: "GpuTime") -> None:
        """Add another time."""
        _add(self, other, GPU_TIME)


GPU_TIME = tuple(one.name for one in fields(GpuTime))


def _add(sums: Any, more: Any, names: Iterable[str]) -> None:
    """Add the fields of one value to those of another."""
    for name in names:
        setattr(sums, name, getattr(sums, name) + getattr(more, name))


@dataclass(slots=True)
class DayAccount:
    """What happened in one day."""

    gpus: GpuTime = field(default_factory=GpuTime)
    usage: dict[AccountKey, JobUsage] = field(default_factory=dict)
    written: list[Any] | None = None
    """The day as plain data, from the last snapshot; None: it has changed since. Most days are over."""

    def of(self, key: AccountKey) -> JobUsage:
        """Return the usage of one key, to add to it."""
        found = self.usage.get(key)
        if found is None:
            found = self.usage[key] = JobUsage()
        return found


@dataclass(slots=True)
class UsageMeter:
    """What one job uses now, and what is still open about its present attempt."""

    key: AccountKey
    since: float
    """Time of the last reading."""
    attempt: int = 0
    gpus: int = 0
    held: float = 0.0
    """GPUs that count for it; `computed`, `shared` and `paused` as in `JobUsage`, now."""
    computed: float = 0.0
    shared: float = 0.0
    paused: float = 0.0
    at_risk: float = 0.0
    """GPU-seconds held since the last checkpoint, or since the start of the attempt."""
    done: float = 0.0
    """Iterations done at the last reading."""
    alone_s: float = 0.0
    """Iteration time alone at the last reading."""
    size: tuple[int, int] = (1, 0)
    """Accumulation and batch with which it iterates."""
    sharing_held: float = 0.0
    """GPU-seconds held while it shared, not judged so far."""
    sharing_done: float = 0.0
    """Iterations made meanwhile, times the number of its GPUs."""


class Accounts:
    """The accounts of all days, and the meters of the jobs that hold GPUs."""

    def __init__(self) -> None:
        self.on = False
        self.exact = False
        """Whether the iteration times of the state are true, as in a simulation, so that none must be measured."""
        self.opened = 0.0
        """When counting began."""
        self.away = 0
        """Number of GPUs that were part of the cluster before and are not now."""
        self.days: dict[int, DayAccount] = {}
        self.meters: dict[JobId, UsageMeter] = {}

    def open(self, now: float, topology: Topology, *, exact: bool) -> None:
        """Begin to count."""
        self.on, self.exact, self.opened = True, exact, now
        self.note_nodes(topology)

    # ---- what happens ----------------------------------------------------------------------------------------------

    def note_nodes(self, topology: Topology) -> None:
        """Count the GPUs that are away: a node joined or was lost."""
        known = {gpu for node in topology.nodes for gpu in node.gpus}
        self.away = len(known) - len(topology.node_of)

    def pass_time(self, cluster: Cluster, since: float, now: float) -> None:
        """Count the GPUs from one moment to another."""
        unused, topology = cluster.by_load[0], cluster.topology
        closed = (unused & topology.closed_gpus).bit_count() if topology.closed_gpus else 0
        idle, total = unused.bit_count() - closed, len(cluster.residents)
        for day, seconds in _days(since, now):
            gpus = self._day(day).gpus
            gpus.existed += total * seconds
            gpus.idle += idle * seconds
            gpus.closed += closed * seconds
            gpus.away += self.away * seconds

    def follow(self, cluster: Cluster, record: JobRecord, now: float) -> None:
        """Count what a job used since the last reading of its meter, and read what it uses from now on."""
        meter = self.meters.get(record.job.id)
        if meter is None:
            if not record.gpus:
                return
            job = record.job
            meter = self.meters[job.id] = UsageMeter((job.group, job.user, job.project), now)
        if meter.attempt != record.attempt:
            meter.attempt, meter.at_risk = record.attempt, 0.0
        self._settle(meter, record, now)
        size = (record.accumulation, record.batch or 0)
        if meter.sharing_held and (size != meter.size or not record.gpus):
            self._judge(meter, record.alone_iteration_s if record.alone_seen else 0.0, now)
        meter.size, meter.alone_s, meter.gpus = size, record.alone_iteration_s, len(record.gpus)
        meter.held, meter.shared = held_and_shared(cluster, record)
        meter.computed = meter.held if record.iteration_s else 0.0
        meter.paused = float(len(record.gpus)) if record.paused_since >= 0.0 else 0.0

    def save(self, cluster: Cluster, record: JobRecord, now: float) -> None:
        """Note that a job's work up to now is saved: a failure no longer destroys it."""
        self.follow(cluster, record, now)
        meter = self.meters.get(record.job.id)
        if meter is not None:
            meter.at_risk = 0.0

    def lose(self, cluster: Cluster, record: JobRecord, now: float) -> None:
        """Count what a job held in vain, because its workers failed."""
        self.follow(cluster, record, now)
        meter = self.meters.get(record.job.id)
        if meter is not None and meter.at_risk:
            self._day(_day_of(now)).of(meter.key).lost += meter.at_risk
            meter.at_risk = 0.0

    def end(self, record: JobRecord, now: float) -> None:
        """Count a job that ended."""
        self.meters.pop(record.job.id, None)
        job = record.job
        usage = self._day(_day_of(now)).of((job.group, job.user, job.project))
        usage.jobs += 1
        usage.failed += record.status is Status.FAILED

    def _settle(self, meter: UsageMeter, record: JobRecord, now: float) -> None:
        done, passed = record.job.iterations - record.iterations_left(now), now - meter.since
        if passed > 0.0 and (meter.held or meter.paused):
            for day, seconds in _days(meter.since, now):
                usage = self._day(day).of(meter.key)
                usage.held += meter.held * seconds
                usage.computed += meter.computed * seconds
                usage.shared += meter.shared * seconds
                usage.paused += meter.paused * seconds
            meter.at_risk += meter.held * passed
            if meter.shared:
                meter.sharing_held += meter.held * passed
        if meter.shared and meter.computed:
            meter.sharing_done += (done - meter.done) * meter.gpus
        meter.done, meter.since = done, now
        if self.exact and meter.sharing_held:
            self._judge(meter, meter.alone_s, now)

    def _judge(self, meter: UsageMeter, alone_s: float, now: float) -> None:
        """Count what sharing saved up to now. `alone_s`: iteration time alone; 0: it was not measured."""
        usage = self._day(_day_of(now)).of(meter.key)
        if alone_s:
            usage.saved += meter.sharing_done * alone_s - meter.sharing_held
            usage.judged += meter.sharing_held
        else:
            usage.unjudged += meter.sharing_held
        meter.sharing_held = meter.sharing_done = 0.0

    def _day(self, number: int) -> DayAccount:
        """Return a day, to add to it."""
        found = self.days.get(number)
        if found is None:
            found = self.days[number] = DayAccount()
            for old in [day for day in self.days if EARLIER < day <= number - KEPT_DAYS]:
                _merge(self._day(EARLIER), self.days.pop(old))
        found.written = None
        return found

    # ---- reading ---------------------------------------------------------------------------------------------------

    def open_items(self, cluster: Cluster, jobs: Mapping[JobId, JobRecord], since: float, now: float) -> "Accounts":
        """Return what is not counted so far, up to now: since the state's time, and since the meters' last readings.

        A job that shares is judged as if it left its GPUs now.
        """
        rest = Accounts()
        rest.exact, rest.away = self.exact, self.away
        if now > since:
            rest.pass_time(cluster, since, now)
        for name, meter in self.meters.items():
            record = jobs.get(name)
            if record is None:
                continue
            copy = UsageMeter(**{one: getattr(meter, one) for one in _METER})
            rest._settle(copy, record, max(now, meter.since))
            if copy.sharing_held:
                rest._judge(copy, record.alone_iteration_s if record.alone_seen else 0.0, now)
        return rest

    # ---- as plain data ---------------------------------------------------------------------------------------------

    def dump(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return {
            "exact": self.exact,
            "opened": self.opened,
            "away": self.away,
            "days": [_written(number, day) for number, day in self.days.items()],
            "meters": {name: asdict(meter) for name, meter in self.meters.items()},
        }

    @classmethod
    def load(cls, data: dict[str, Any]) -> "Accounts":
        """Return the accounts that `dump` wrote."""
        accounts = cls()
        accounts.on = True
        accounts.exact, accounts.opened, accounts.away = data["exact"], data["opened"], data["away"]
        for number, gpus, usage in data["days"]:
            rows = {(row[0], row[1], row[2]): JobUsage(*row[3:]) for row in usage}
            accounts.days[number] = DayAccount(GpuTime(**gpus), rows)
        for name, meter in data["meters"].items():
            accounts.meters[name] = UsageMeter(**{**meter, "key": tuple(meter["key"]), "size": tuple(meter["size"])})
        return accounts


_METER = tuple(one.name for one in fields(UsageMeter))


def _written(number: int, day: DayAccount) -> list[Any]:
    if day.written is None:
        rows = [[*key, *(getattr(usage, name) for name in USAGE)] for key, usage in day.usage.items()]
        day.written = [number, asdict(day.gpus), rows]
    return day.written


def _merge(into: DayAccount, day: DayAccount) -> None:
    into.gpus.add(day.gpus)
    for key, usage in day.usage.items():
        into.of(key).add(usage)


def _day_of(moment: float) -> int:
    return int(moment // DAY_S)


def _days(since: float, until: float) -> Iterator[tuple[int, float]]:
    """Yield the days between two moments, with the seconds that lie between them."""
    first, last = _day_of(since), _day_of(until)
    if first == last:
        yield first, until - since
        return
    yield first, (first + 1) * DAY_S - since
    for day in range(first + 1, last):
        yield day, DAY_S
    if until > last * DAY_S:
        yield last, until - last * DAY_S
