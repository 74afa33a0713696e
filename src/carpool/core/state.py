"""Everything that the scheduler knows: the jobs, the cluster and the indexes over them.

`State` holds the data and answers questions about it; policies read it through `View`. `apply(event)` is the only way
to change it: it calls the function that handles that kind of event. Those functions are in `transitions`; they use
`queueing` (a job's way through the queue), `claims` (GPUs and memory) and `pace` (progress and iteration times).
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from typing import Any, TypeVar

from carpool.core import events as ev
from carpool.core.accounts import Accounts
from carpool.core.cluster import Cluster
from carpool.core.end_times import EndTimes
from carpool.core.guesses import DURATION, ITERATIONS, Guesses
from carpool.core.holder_ranks import HolderRanks
from carpool.core.hosts import Hosts
from carpool.core.learning import LearningModel, WeighsGuesses
from carpool.core.model import Closure, GpuId, Job, JobId, Limits, Node, allowed_accumulations
from carpool.core.overdue import OverdueJobs
from carpool.core.perf import FollowsNodes, PerformanceModel
from carpool.core.queue import Queue
from carpool.core.ranked_queue import RankedQueue
from carpool.core.record import JobRecord
from carpool.core.shapes import Shape, Shapes
from carpool.core.sorted_jobs import LongWaits
from carpool.core.tenants import Rank, Tenants
from carpool.core.time_limits import limit_problem
from carpool.core.trial import Trials
from carpool.core.view import JobView, SortKey

UNLIMITED = Limits()
RESIDENT_PER_GPU = 8
"""Number of jobs, active and paused ones, that may hold memory on one GPU."""

E = TypeVar("E", bound=ev.Event)
HANDLERS: dict[type[ev.Event], Callable[["State", Any], None]] = {}
"""The function that applies each kind of event; filled by `handles`."""
OPENS_NO_PLACE = frozenset({ev.Submitted, ev.Planned, ev.Started})
"""Events after which no place is open that was not open before."""


class UnhandledEvent(TypeError):
    """No function applies this kind of event."""


def handles(kind: type[E]) -> Callable[[Callable[["State", E], None]], Callable[["State", E], None]]:
    """Register the decorated function as the one that applies events of this kind."""

    def register(function: Callable[["State", E], None]) -> Callable[["State", E], None]:
        if kind in HANDLERS:
            raise TypeError(f"{HANDLERS[kind].__module__} handles {kind.__name__} already")
        HANDLERS[kind] = function
        return function

    return register


class State:
    """All data of the scheduler, with the questions that policies and drivers ask."""

    def __init__(
        self,
        perf: PerformanceModel,
        sort_key: SortKey,
        jobs_per_gpu: int = 2,
        resident_per_gpu: int = RESIDENT_PER_GPU,
    ) -> None:
        if jobs_per_gpu < 1:
            raise ValueError("jobs_per_gpu: must be at least 1")
        self.perf = perf
        self.learner = perf if isinstance(perf, LearningModel) else None
        """The performance model, where it learns from what is observed."""
        self._weighs_guesses = perf if isinstance(perf, WeighsGuesses) else None
        self.belief_version = 0
        """Number of times that `perf` learned something that may change its answers."""
        self.sort_key = sort_key
        self.jobs_per_gpu = jobs_per_gpu
        self.resident_per_gpu = max(resident_per_gpu, jobs_per_gpu)
        self.now = 0.0
        self.jobs: dict[JobId, JobRecord] = {}
        """The jobs that have not ended, in the order of submission."""
        self.ended: dict[JobId, JobRecord] = {}
        self.cluster = Cluster(self.resident_per_gpu)
        self.topology = self.cluster.topology
        self.free = self.cluster.free
        self.queue: Queue = Queue()
        self.tenants = Tenants()
        self.accounts = Accounts()
        self.guesses = Guesses()
        self.closures: dict[str, Closure] = {}
        """The GPUs that the operator closes, now or later, by the name of the closure."""
        self.closures_begun: set[str] = set()
        """The names of the closures whose time has come."""
        self.limits: dict[str, Limits] = {}
        self.may_come = 0
        """Number of GPUs of nodes that never joined and that the operator lets the cluster grow by."""
        self.holders: dict[int, JobRecord] = {}
        """The jobs that hold GPUs, by `seq`."""
        self.paused: dict[int, JobRecord] = {}
        """The jobs that are paused or being paused, by `seq`."""
        self.switching: dict[int, JobRecord] = {}
        """The jobs that are being paused or resumed: their workers have not confirmed it. By `seq`."""
        self.awakened: dict[int, JobRecord] = {}
        """The paused jobs that may go on because their mates changed at this moment, by `seq`."""
        self.held: dict[str, list[int]] = {}
        """The number of jobs and of GPUs that each user holds; counted only where there are limits."""
        self.dependents: dict[JobId, list[JobId]] = {}
        """The jobs that wait for a job."""
        self.shapes = Shapes(perf)
        self.new_speeds: set[str] = set()
        """The models whose speeds changed since the waiting jobs were computed: see `pace.refresh_waiting`."""
        self.new_factors: set[str] = set()
        """The users whose records of guesses changed since then: see `healing.correct_waiting`."""
        self.defers_waiting = False
        """Several events are applied together, and the waiting jobs are computed again after them."""
        self.needs_decision = False
        """Something happened that may open or close a place for a job; the scheduler resets it."""
        self.last_capacity_change = 0.0
        """Time of the last event other than a submission that may open a place for a pending job."""
        self.previous_capacity_change = -1.0
        """Time of the one before it; −1: the last one was neither the end nor the pause of a job."""
        self.openings = 0
        """Number of events that may have opened a place for a pending job, whatever they changed."""
        self.pace_changes: list[JobRecord] = []
        """Jobs whose pace changed; the driver empties the list."""
        self.trials = Trials()
        self.busy_gpu_s = 0.0
        self.shares = 0
        self.preemptions = 0
        self.pauses = 0
        self.most_residents = 0
        """Largest number of jobs, paused ones included, that a GPU ever held."""
        self.submissions = 0
        self.completed = 0
        self.completed_jct_s = 0.0
        self._indexes: tuple[Hosts | EndTimes | OverdueJobs | LongWaits | HolderRanks, ...] = ()
        """The indexes over jobs that a policy has asked for so far; those that none asks for cost nothing."""
        self._hosts: Hosts | None = None
        self._active_hosts: Hosts | None = None
        self._end_times: EndTimes | None = None
        self._overdue: OverdueJobs | None = None
        self._long_waits: LongWaits | None = None
        self._holder_ranks: HolderRanks | None = None

    # ---- reading -------------------------------------------------------------------------------------------------

    @property
    def running(self) -> Collection[JobRecord]:
        """The jobs that hold GPUs, started or starting."""
        return self.holders.values()

    @property
    def hosts(self) -> Hosts:
        """The running jobs that may take a guest. The index is kept from the first use on, so that policies that never
        share do not pay for it."""
        if self._hosts is None:
            self._hosts = self._index_hosts(only_active=False)
        return self._hosts.refresh()

    @property
    def active_hosts(self) -> Hosts:
        """The active jobs that may take a guest; paused residents do not count. Kept from the first use on."""
        if self._active_hosts is None:
            self._active_hosts = self._index_hosts(only_active=True)
        return self._active_hosts.refresh()

    def _index_hosts(self, *, only_active: bool) -> Hosts:
        hosts = Hosts(self.cluster, self.jobs_per_gpu, only_active=only_active)
        for record in self.holders.values():
            hosts.touch(record)
        self._indexes = (*self._indexes, hosts)
        return hosts

    @property
    def end_times(self) -> EndTimes:
        """The predicted ends of running jobs. The index is kept from the first use on, as that of `hosts`."""
        if self._end_times is None:
            self._end_times = EndTimes(self.cluster, self.perf, self.holders)
            for record in self.holders.values():
                self._end_times.touch(record)
            self._indexes = (*self._indexes, self._end_times)
        return self._end_times.refresh()

    def overdue(self, patience: float) -> OverdueJobs:
        """Return the paused jobs by the moment at which this patience ends. Kept from the first use on."""
        if self._overdue is None or self._overdue.patience != patience:
            others = [index for index in self._indexes if index is not self._overdue]
            self._overdue = OverdueJobs(patience, self.paused)
            self._indexes = (*others, self._overdue)
        return self._overdue

    @property
    def long_waits(self) -> LongWaits:
        """The jobs that hold GPUs, by how long they waited for them. Kept from the first use on."""
        if self._long_waits is None:
            self._long_waits = LongWaits()
            for record in self.holders.values():
                self._long_waits.touch(record)
            self._indexes = (*self._indexes, self._long_waits)
        return self._long_waits

    @property
    def mean_jct_s(self) -> float:
        """Mean completion time of the jobs that have finished; 0 before the first."""
        return self.completed_jct_s / self.completed if self.completed else 0.0

    def newest_first(self) -> Iterator[JobRecord]:
        """Return the jobs that have not ended, last submitted first."""
        return reversed(self.jobs.values())

    def jobs_on(self, gpu: GpuId) -> tuple[JobRecord, ...]:
        """Return the residents of a GPU, in the order in which they came."""
        return self.cluster.residents[gpu]

    def idle(self) -> Collection[GpuId]:
        """Return the GPUs that hold jobs, all of them paused."""
        return self.cluster.idle

    def with_paused(self) -> Set[GpuId]:
        """Return the GPUs that hold a paused job, whether others compute there or not."""
        return self.cluster.with_paused

    def memory_used(self, gpu: GpuId) -> int:
        """Return the bytes that jobs have reserved on a GPU."""
        return self.cluster.memory[gpu]

    def gpus_holding(self, jobs: int) -> int:
        """Return the GPUs that hold this number of jobs, one bit each."""
        return self.cluster.by_load[jobs]

    def limits_of(self, user: str) -> Limits:
        """Return the limits that apply to a user."""
        return self.limits.get(user) or self.limits.get("", UNLIMITED)

    def held_by(self, user: str) -> tuple[int, int]:
        """Return how many jobs and GPUs the user holds; counted only where there are limits."""
        jobs, gpus = self.held.get(user, (0, 0))
        return jobs, gpus

    def shape_of(self, job: Job, priority: int) -> Shape:
        """Return the shape of a job with this priority."""
        limited = bool(self.limits) and self.limits_of(job.user) != UNLIMITED
        if self.tenants.on:
            return self.shapes.of(job, priority, job.user, job.group)
        return self.shapes.of(job, priority, job.user if limited else None)

    def relies_on_guess(self, job: Job) -> bool:
        """Return whether what is believed of a job's speed follows from the duration that its user gave."""
        return self._weighs_guesses is None or self._weighs_guesses.relies_on_guess(job)

    def current(self, event: ev.JobEvent) -> JobRecord | None:
        """Return the job of an event; None where the event belongs to an earlier attempt or the job has ended."""
        record = self.jobs.get(event.job)
        return record if record is not None and record.attempt == event.attempt else None

    def leaving(self, gpus: Iterable[GpuId]) -> list[JobRecord]:
        """Return the jobs that gave up these GPUs and whose workers may still compute there. No job may be launched or
        resumed there before `Stopped`, `Failed` or `Paused` has arrived for each of them."""
        wanted = set(gpus)
        gone = [record for record in self.jobs.values() if not wanted.isdisjoint(record.leaving)]
        pausing = [record for record in self.switching.values() if not record.active]
        return gone + [record for record in pausing if not wanted.isdisjoint(record.gpus)]

    def refusal(self, job: Job) -> str | None:
        """Return why this job could never run on this cluster, or None."""
        if job.id in self.jobs or job.id in self.ended:
            return f"job {job.id} exists already"
        smallest = allowed_accumulations(job)[-1]
        needed = self.perf.memory(job, smallest)
        known = {node.id: node for node in self.topology.nodes}.values()  # one that is lost may come back
        total = sum(len(node.gpus) for node in known)
        fitting = sum(len(node.gpus) for node in known if node.memory >= needed)
        if not known:  # what will come is not known
            return None
        total, fitting = total + self.may_come, fitting + self.may_come
        if job.gpus > total:
            return f"gpus: job {job.id} asks for {job.gpus} GPUs and the cluster has {total}; ask for at most {total}"
        if job.gpus > fitting:
            at = "even at sub-batch 1" if job.can_shrink else f"at batch {job.batch}, which may not be split"
            gib = max(node.memory for node in known) / 2**30
            return (
                f"batch: job {job.id} needs {needed / 2**30:.1f} GiB per GPU {at}; the largest GPUs have {gib:.1f} GiB"
            )
        limit = self.limits_of(job.user).gpus
        if limit is not None and job.gpus > limit:
            return f"gpus: job {job.id} asks for {job.gpus} GPUs and user {job.user or '(none)'} may hold {limit}"
        cap = self.tenants.caps.get(job.group)
        if cap is not None and job.gpus > cap:
            return f"gpus: job {job.id} asks for {job.gpus} GPUs and group {job.group or '(none)'} may hold {cap}"
        return limit_problem(job, self.tenants.settings)

    # ---- writing -------------------------------------------------------------------------------------------------

    def apply(self, event: ev.Event) -> None:
        """Change the state as the event says."""
        try:
            handler = HANDLERS[type(event)]
        except KeyError:
            name = type(event).__name__
            raise UnhandledEvent(
                f"event {name}: no function applies it; write one with @handles({name}), as in transitions"
            ) from None
        if event.at != self.now:
            self.advance(event.at)
        if type(event) not in OPENS_NO_PLACE:
            self.openings += 1
        handler(self, event)

    def advance(self, now: float) -> None:
        """Let time pass. A clock that was set back stands still until it catches up."""
        if now <= self.now:
            return
        self.busy_gpu_s += self.cluster.in_use * (now - self.now)
        if self.accounts.on:
            self.accounts.pass_time(self.cluster, self.now, now)
        self.now = now

    def rank_queue(self, *, at_once: bool = False) -> None:
        """Sort the queue by what groups and users have used up to now, if that is due or wanted at once."""
        self.tenants.refresh(self.now, len(self.topology.node_of), at_once=at_once)
        if isinstance(self.queue, RankedQueue):
            self.queue.rerank()

    @property
    def shares_count(self) -> bool:
        """Whether shares, guarantees or caps of groups count."""
        return self.tenants.on

    @property
    def shares_above_all(self) -> bool:
        """Whether no job may start while one waits whose group is below its share."""
        return self.tenants.fair_share.strength >= 1.0

    def rank_of(self, job: JobView, held: int | None = None) -> Rank:
        """Return the rank of a waiting job's tenants. `held`: the GPUs that its group holds in a plan."""
        return self.tenants.rank(job.shape, None if held is None else held + job.shape.gpus)

    def ranks_of_holders(self) -> Mapping[int, Rank]:
        """Return the ranks that the jobs that hold GPUs would have if they waited, by `seq`. The index is kept from the
        first use on."""
        if self._holder_ranks is None:
            self._holder_ranks = HolderRanks(self.tenants)
            for record in self.holders.values():
                self._holder_ranks.touch(record)
            self._indexes = (*self._indexes, self._holder_ranks)
        return self._holder_ranks.refresh()

    def may_use(self, job: JobView, gpu: GpuId) -> bool:
        """Return whether a job may start on a closed GPU: it ends before the closure begins, or is in its group."""
        if not self.closures or self.topology.node_of[gpu] in self.topology.closed:
            return False
        ends = self.latest_end(self.jobs[job.job.id])
        covering = [closure for closure in self.closures.values() if gpu in closure.gpus]
        return all(closure.is_for(job.job) or ends <= closure.start for closure in covering)

    def latest_end(self, record: JobRecord) -> float:
        """Return when a job ends at the latest, by its estimate and its time limit, if it computes alone from now."""
        spread = 1.0
        if record.guess_s or record.guess_iterations:
            spread = self.guesses.of(record.job.user, DURATION if record.guess_s else ITERATIONS).spread
        left = min(record.alone_left(self.now) * spread, max(0.0, record.limit_left(self.now)))
        return self.now + record.startup_s + left

    def weight_of(self, job: JobView) -> float:
        """Return what a second of a job's completion time counts for."""
        return self.tenants.weight(job.shape) if self.tenants.on else 1.0

    def cap_of(self, group: str) -> int | None:
        """Return the largest number of GPUs that a group may hold; None: any."""
        return self.tenants.caps.get(group)

    @property
    def caps(self) -> Mapping[str, int]:
        """The largest number of GPUs that a group may hold, of groups for which there is one."""
        return self.tenants.caps

    def held_by_group(self, group: str) -> int:
        """Return how many GPUs a group holds; counted only where shares, guarantees or caps count."""
        found = self.tenants.groups.get(group)
        return 0 if found is None else found.gpus

    def kept_for(self) -> list[tuple[JobRecord, int]]:
        """Return the waiting jobs for which free GPUs are kept: one of a shape, and how many of them.

        These are the first job of each group that is entitled to have it started, or all of them where shares are above
        all.
        """
        if not isinstance(self.queue, RankedQueue) or not self.queue.entitled:
            return []
        found, groups = [], set()
        above_all = self.shares_above_all
        for _, _, entry, shape in sorted(self.queue.entitled.values()):
            if (above_all or shape.group not in groups) and self._could_run(shape):
                groups.add(shape.group)
                found.append((entry[3], len(self.queue.buckets[shape]) if above_all else 1))
        return found

    def _could_run(self, shape: Shape) -> bool:
        """Return whether enough GPUs have the memory that jobs of a shape need, whatever they hold now."""
        nodes = self.topology.with_memory(shape.sizes[-1].memory)
        return self.topology.total_open(nodes) >= shape.gpus

    def join(self, node: Node) -> None:
        """Add a node to the cluster. A performance model that depends on the size of nodes is told its size."""
        self.cluster.join(node)
        if isinstance(self.perf, FollowsNodes):
            self.perf.node_joined(len(node.gpus))
        if self.accounts.on:
            self.accounts.note_nodes(self.topology)

    def capacity_changed(self, *, routine: bool = False) -> None:
        """Note that a place may have opened for a pending job; `routine`: because a job ended or was paused."""
        self.needs_decision = True
        if self.now != self.last_capacity_change:
            self.previous_capacity_change, self.last_capacity_change = self.last_capacity_change, self.now
        if not routine:
            self.previous_capacity_change = -1.0

    def reserve(self, record: JobRecord, memory: int) -> None:
        """Let a job hold this many bytes on each of its GPUs; what its mates could offer to a guest changes with it."""
        self.cluster.reserve(record, memory)
        self.reindex(record)
        for mate in self.cluster.mates(record):
            self.reindex(mate)

    def reindex(self, record: JobRecord) -> None:
        """Note that a job or its mates changed, in the indexes that policies use and in the accounts."""
        if self.accounts.on:
            self.accounts.follow(self.cluster, record, self.now)
        for index in self._indexes:
            index.touch(record)
