"""Everything that the scheduler knows: the jobs, the cluster and the indexes over them.

`State` holds the data and answers questions about it; policies read it through `View`. `apply(event)` is the only way
to change it: it calls the function that handles that kind of event. Those functions are in `transitions`; they use
`queueing` (a job's way through the queue), `claims` (GPUs and memory) and `pace` (progress and iteration times).
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Set
from typing import Any, TypeVar

from carpool.core import events as ev
from carpool.core.cluster import Cluster
from carpool.core.end_times import EndTimes
from carpool.core.hosts import Hosts
from carpool.core.learning import LearningModel
from carpool.core.model import GpuId, Job, JobId, Limits, Node, allowed_accumulations
from carpool.core.overdue import OverdueJobs
from carpool.core.perf import FollowsNodes, PerformanceModel
from carpool.core.queue import Queue
from carpool.core.record import JobRecord
from carpool.core.shapes import Shape, Shapes
from carpool.core.trial import Trials
from carpool.core.view import SortKey

UNLIMITED = Limits()
RESIDENT_PER_GPU = 8
"""Number of jobs, active and paused ones, that may hold memory on one GPU."""

E = TypeVar("E", bound=ev.Event)
HANDLERS: dict[type[ev.Event], Callable[["State", Any], None]] = {}
"""The function that applies each kind of event; filled by `handles`."""


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
        self.queue = Queue()
        self.limits: dict[str, Limits] = {}
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
        self.needs_decision = False
        """Something happened that may open or close a place for a job; the scheduler resets it."""
        self.last_capacity_change = 0.0
        """Time of the last event other than a submission that may open a place for a pending job."""
        self.previous_capacity_change = -1.0
        """Time of the one before it; −1: the last one was neither the end nor the pause of a job."""
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
        self._hosts: Hosts | None = None
        self._active_hosts: Hosts | None = None
        self._end_times: EndTimes | None = None
        self._overdue: OverdueJobs | None = None

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
        return self._hosts

    @property
    def active_hosts(self) -> Hosts:
        """The active jobs that may take a guest; paused residents do not count. Kept from the first use on."""
        if self._active_hosts is None:
            self._active_hosts = self._index_hosts(only_active=True)
        return self._active_hosts

    def _index_hosts(self, *, only_active: bool) -> Hosts:
        hosts = Hosts(self.cluster, self.jobs_per_gpu, only_active=only_active)
        for record in self.holders.values():
            hosts.update(record)
        return hosts

    @property
    def end_times(self) -> EndTimes:
        """The predicted ends of running jobs. The index is kept from the first use on, as that of `hosts`."""
        if self._end_times is None:
            self._end_times = EndTimes(self.cluster, self.perf, self.holders)
            for record in self.holders.values():
                self._end_times.touch(record)
        return self._end_times.refresh()

    def overdue(self, patience: float) -> OverdueJobs:
        """Return the paused jobs by the moment at which they lose a patience. Kept from the first use on."""
        if self._overdue is None or self._overdue.patience != patience:
            self._overdue = OverdueJobs(patience, self.paused.values())
        return self._overdue

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
        return self.shapes.of(job, priority, job.user if limited else None)

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
        if not known:  # nobody knows what will come
            return None
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
        return None

    # ---- writing -------------------------------------------------------------------------------------------------

    def apply(self, event: ev.Event) -> None:
        """Change the state as the event says."""
        handler = HANDLERS.get(type(event))
        if handler is None:
            name = type(event).__name__
            raise UnhandledEvent(
                f"event {name}: no function applies it; write one with @handles({name}), as in transitions"
            )
        if event.at != self.now:
            self.advance(event.at)
        handler(self, event)

    def advance(self, now: float) -> None:
        """Let time pass. A clock that was set back stands still until it catches up."""
        if now <= self.now:
            return
        unused = self.cluster.by_load[0].bit_count() if self.topology.closed else self.free.count
        self.busy_gpu_s += (len(self.cluster.residents) - unused) * (now - self.now)
        self.now = now

    def join(self, node: Node) -> None:
        """Add a node to the cluster. A performance model that was made before it knows how large nodes are."""
        self.cluster.join(node)
        if isinstance(self.perf, FollowsNodes):
            self.perf.node_joined(len(node.gpus))

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
        """Note that a job or its mates changed, in the indexes that policies use."""
        if self._hosts is not None:
            self._hosts.update(record)
        if self._active_hosts is not None:
            self._active_hosts.update(record)
        if self._end_times is not None:
            self._end_times.touch(record)
        if self._overdue is not None:
            self._overdue.update(record, paused=record.seq in self.paused)
