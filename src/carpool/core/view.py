"""The read-only views through which policies see the scheduler's state.

`State` and the indexes that it owns satisfy these protocols structurally, so a view costs nothing at run time. No
protocol has a setter, a mutable container or a method that changes anything: `mypy --strict` refuses a policy that
writes to what it sees. A policy changes the cluster only by the decisions that it returns.
"""

from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from carpool.core.availability import Availability, Until
from carpool.core.free import FreeGpus
from carpool.core.model import GpuId, Job, JobId, Limits, Node, NodeId, Status
from carpool.core.perf import PerformanceModel, UncertainModel
from carpool.core.shapes import Shape
from carpool.core.trial import Trial
from carpool.core.values import quick


class JobView(Protocol):
    """A job as a policy sees it."""

    @property
    def job(self) -> Job:
        """The job as submitted."""

    @property
    def shape(self) -> Shape:
        """The shape that it shares with jobs that can be placed in the same way."""

    @property
    def seq(self) -> int:
        """Number in the order of submission; breaks ties."""

    @property
    def status(self) -> Status:
        """Where the job is in its life."""

    @property
    def attempt(self) -> int:
        """Number of the present attempt; 0 before the first."""

    @property
    def gpus(self) -> tuple[GpuId, ...]:
        """The GPUs that it holds."""

    @property
    def gpus_since(self) -> float:
        """When it got its present GPUs."""

    @property
    def most_gpus(self) -> int:
        """Largest number of GPUs on which it ever ran."""

    @property
    def accumulation(self) -> int:
        """Number of micro-batches per iteration."""

    @property
    def batch(self) -> int | None:
        """Batch that the scheduler chose for an elastic job; None: the user's own."""

    @property
    def active(self) -> bool:
        """Whether it computes, or is about to; False while it is paused or being paused."""

    @property
    def swapped(self) -> bool:
        """Whether it is paused and holds no memory on its GPU: the memory is in main memory."""

    @property
    def paused_by_owner(self) -> bool:
        """Whether its owner paused it, so that no policy may resume it."""

    @property
    def paused_since(self) -> float:
        """When its present pause began; −1: it is not paused."""

    @property
    def memory(self) -> int:
        """Bytes reserved on each of its GPUs."""

    @property
    def done(self) -> float:
        """Iterations done at the time `since`; `iterations_left` counts those done now."""

    @property
    def checkpoint(self) -> float:
        """Iterations that a restart resumes after."""

    @property
    def since(self) -> float:
        """Time at which `done` was computed."""

    @property
    def whole_iteration_s(self) -> float:
        """Iteration time with the whole batch, alone at the most consolidated placement."""

    @property
    def stretch(self) -> float:
        """What iteration times of the model are multiplied by for this job, because its guess was corrected."""

    @property
    def alone_iteration_s(self) -> float:
        """Iteration time alone where it is placed, or, while it is not, at the best placement."""

    @property
    def iteration_s(self) -> float:
        """Iteration time beside its mates; 0 while it does not iterate."""

    @property
    def slowdown(self) -> float:
        """ξ beside its present mates, the worst over its GPUs."""

    @property
    def alone_seen(self) -> bool:
        """`alone_iteration_s` was measured in this attempt, not predicted."""

    @property
    def pace_seen(self) -> bool:
        """`iteration_s` was measured beside the present mates, not predicted."""

    @property
    def pace_valid_until(self) -> float:
        """Iteration up to which its pace holds."""

    @property
    def warming_up(self) -> bool:
        """Whether it is up and does not compute so far."""

    @property
    def computing(self) -> bool:
        """Whether it iterates now."""

    @property
    def startup_s(self) -> float:
        """Expected seconds from a claim to its first iteration."""

    @property
    def pending_since(self) -> float:
        """When it last began to wait."""

    @property
    def waited_s(self) -> float:
        """Seconds pending, up to `pending_since`."""

    @property
    def preemptions(self) -> int:
        """Number of times that it was preempted."""

    @property
    def pauses(self) -> int:
        """Number of times that it was paused."""

    def iterations_left(self, now: float) -> float:
        """Return the iterations that are not done."""

    def alone_left(self, now: float) -> float:
        """Return the time left if the job runs alone: L of the paper."""

    def whole_left(self, now: float) -> float:
        """Return the time left alone with the whole batch at the most consolidated placement."""

    def service(self, now: float) -> float:
        """Return the GPU-seconds held so far."""

    def alone_done(self, now: float) -> float:
        """Return the seconds that its iterations so far would have taken alone."""

    def startup_left(self, now: float) -> float:
        """Return the expected seconds until the job computes, if it gets its GPUs now or has just got them."""

    def waited(self, now: float) -> float:
        """Return the seconds that the job was pending so far."""

    def paused(self, now: float) -> float:
        """Return the seconds that the job was paused so far."""

    def end(self) -> float:
        """Return when the job is done at its present pace, or reaches the iteration where its pace changes."""


SortKey = Callable[[JobView, float], tuple[float, ...]]
"""A policy's sort key for the queue. A pending job keeps its key until a `PriorityChanged` event."""

EntryView = tuple[int, tuple[float, ...], int, JobView]
"""A queue entry: −priority, the policy's sort key, the job's `seq`, the job."""

WaitingJob = tuple[int, float, int, int]
"""What a pending job waits for: its GPUs, its time left alone with its start-up, its `seq` and its priority. A plain
tuple, because policies go through many of them."""


class ScanView(Protocol):
    """An iteration over the queue that can skip the rest of a shape."""

    def __iter__(self) -> "ScanView": ...
    def __next__(self) -> JobView: ...
    def skip_alike(self) -> None:
        """Skip the other jobs of the shape that the scan returned last."""


class QueueView(Protocol):
    """The pending jobs."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[JobView]: ...
    @property
    def buckets(self) -> Mapping[Shape, Sequence[EntryView]]:
        """The queue entries of each shape, in order."""

    @property
    def in_order(self) -> Sequence[EntryView]:
        """All queue entries in order."""

    @property
    def waiting(self) -> Sequence[WaitingJob]:
        """What all pending jobs wait for, in order."""

    def by_patience(self, patience: float) -> Sequence[tuple[float, int, JobView]]:
        """Return all pending jobs in the order of the moments at which their submission will be `patience` times their
        time left ago, with that moment and their `seq`."""

    def first(self, number: int) -> Sequence[EntryView]:
        """Return the first entries in order."""

    def first_waiting(self, number: int) -> Sequence[WaitingJob]:
        """Return what the first jobs wait for."""

    def scan(
        self, largest: int | None = None, without: Container[Shape] = (), held: Mapping[str, int] | None = None
    ) -> ScanView:
        """Iterate over the pending jobs in order, except gangs of more than `largest` GPUs and some shapes.

        `held`: the GPUs that groups hold in the plan that the scan is for, of groups that hold another number now. A
        group that starts jobs in the plan is entitled to fewer further ones.
        """


class TopologyView(Protocol):
    """The nodes and their GPUs. A set of nodes is an integer whose bit i stands for node i."""

    @property
    def nodes(self) -> Sequence[Node]:
        """All nodes by number, lost ones included."""

    @property
    def present(self) -> Mapping[NodeId, int]:
        """The numbers of the nodes that are part of the cluster now."""

    @property
    def node_of(self) -> Mapping[GpuId, int]:
        """The number of each GPU's node."""

    @property
    def can_swap(self) -> Set[int]:
        """The numbers of the nodes that can move the memory of a paused job to main memory."""

    @property
    def largest_memory(self) -> int:
        """Bytes of the largest GPU."""

    @property
    def equal_memory(self) -> bool:
        """Whether jobs may use the same number of bytes on every GPU."""

    @property
    def taken(self) -> Mapping[GpuId, int]:
        """Bytes that processes other than jobs hold on a GPU, where there are such processes."""

    @property
    def closed_gpus(self) -> int:
        """The GPUs on which nothing new may start, one bit each."""

    def is_closed(self, gpu: GpuId) -> bool:
        """Return whether nothing new may start on a GPU."""

    def memory_of(self, gpu: GpuId) -> int:
        """Return the bytes that all jobs together may use on a GPU."""

    def gpus_below(self, needed: int) -> Sequence[GpuId]:
        """Return the GPUs on which other processes leave less than this many bytes."""

    def with_memory(self, needed: int) -> int:
        """Return the nodes whose GPUs have at least this many bytes."""

    def wholly_with_memory(self, needed: int) -> int:
        """Return the nodes on all of whose GPUs jobs may use at least this many bytes."""

    def smallest_memory(self, mask: int) -> int:
        """Return the bytes that jobs may use on the smallest GPU of these nodes; 0: there are no nodes."""

    def total(self, mask: int = -1) -> int:
        """Return the number of GPUs that these nodes have."""

    def nodes_spanned(self, gpus: Sequence[GpuId]) -> int:
        """Return the number of nodes on which these GPUs are."""

    def most_consolidated(self, gpus: Collection[GpuId], count: int) -> list[GpuId]:
        """Return `count` of the given GPUs on as few nodes as possible."""


class FreeGpusView(Protocol):
    """The free GPUs. `copy` returns an index of the caller's own, for a what-if."""

    @property
    def count(self) -> int:
        """Number of free GPUs."""

    def pick(self, count: int, eligible: int = -1) -> tuple[GpuId, ...] | None:
        """Return the most consolidated free GPUs on eligible nodes; None: there are not enough."""

    def copy(self) -> FreeGpus:
        """Return a copy to be changed independently."""


class HostKind(NamedTuple):
    """What counts about a host for a guest, besides the time that the host has left."""

    model: str
    batch: int
    accumulation: int
    max_slowdown: float | None
    memory_left: int
    """Bytes left on the smallest of its GPUs."""


class OtherHost(NamedTuple):
    """A job with GPUs of its own that is not a lone host."""

    record: JobView
    kind: HostKind
    alone_on: tuple[GpuId, ...]
    """Its GPUs that hold no other job and have room for one."""


@quick
@dataclass(frozen=True, slots=True)
class Offer:
    """The GPUs that a host has to itself, and how long."""

    kind: HostKind
    job: Job = field(compare=False)
    """A job of this kind: the host, which may have been given other constraints since."""
    slowdown: float
    """Its slow-down; 0: it does not run yet."""
    end: float
    """When it ends at its present pace, so that it has (`end` − now) / `slowdown` left alone; where it does not run
    yet, what it has left at most."""
    gpus: int

    def lasts(self, now: float, least: float) -> bool:
        """Return whether the host may have so much left alone. Where it has not, it will not have it later."""
        return least <= 0.0 or self.end >= (now + least * self.slowdown if self.slowdown else least)

    def lasts_like(self, other: "Offer") -> bool:
        """Return whether two offers of one host differ at most in their number of GPUs."""
        return self.end == other.end and self.slowdown == other.slowdown and self.kind == other.kind


OfferChange = tuple[int, Offer]
"""The number of GPUs that are offered from now on, or, below 0, no more; and the offer that they are part of."""


class OffersView(Protocol):
    """What each host offers to guests, and how that changed."""

    @property
    def by_seq(self) -> Mapping[int, Offer]:
        """The offer of each host, by the host's `seq`."""

    @property
    def changes(self) -> Sequence[OfferChange]:
        """The latest changes, in order."""

    @property
    def forgotten(self) -> int:
        """Number of changes before the first of `changes`."""

    @property
    def added(self) -> int:
        """Number of GPUs that changes so far added, those that took GPUs away aside."""


class ResidentKind(NamedTuple):
    """What counts about one of several residents for a guest, besides the time that it has left."""

    model: str
    batch: int
    accumulation: int
    max_slowdown: float
    """inf: it accepts any."""


CellKind = tuple[ResidentKind, ...]
"""The kinds of a cell's residents, sorted."""


class SharedCell(NamedTuple):
    """GPUs that hold the same several jobs and have room for another; sorts by the first end."""

    end: float
    """Time at which the first resident ends, at its present pace."""
    seqs: tuple[int, ...]
    in_order: tuple[JobView, ...]
    """The residents in the order of the cell's kind."""
    residents: tuple[JobView, ...]
    """The residents in the order in which they came."""
    gpus: tuple[GpuId, ...]
    memory_left: int
    """Bytes left on the fullest of the GPUs."""


class LoneHostsView(Protocol):
    """The lone hosts of one kind, sorted by the time at which they end."""

    @property
    def kind(self) -> HostKind:
        """What these hosts have in common."""

    @property
    def sample(self) -> Job:
        """A job of that kind."""

    @property
    def entries(self) -> Sequence[tuple[float, int, JobView]]:
        """The end, the `seq` and the job."""

    def ending_after(self, time: float) -> Iterator[JobView]:
        """Iterate over the hosts that end at this time or later, soonest first."""


class PartlyFreeHostsView(Protocol):
    """The hosts of one kind that are not lone and have some GPUs to themselves."""

    @property
    def sample(self) -> Job:
        """A job of that kind."""

    @property
    def running(self) -> Mapping[float, Sequence[tuple[float, int, OtherHost]]]:
        """The running hosts by slow-down, with the time at which they end at their present pace and their `seq`; the
        soonest come first. At one slow-down that is the order of their time left alone, too."""

    @property
    def starting(self) -> Mapping[int, OtherHost]:
        """The hosts that do not run yet, by `seq`."""


class HostsView(Protocol):
    """The running jobs that may take a guest."""

    @property
    def lone(self) -> Mapping[HostKind, LoneHostsView]:
        """The lone hosts of each kind."""

    @property
    def others(self) -> Mapping[int, OtherHost]:
        """Hosts that share some of their GPUs or still start, by `seq`."""

    @property
    def partly_free(self) -> Mapping[HostKind, PartlyFreeHostsView]:
        """The same hosts by kind."""

    @property
    def offers(self) -> OffersView:
        """What each of these hosts offers. Kept from the first use on."""

    @property
    def cells(self) -> Mapping[CellKind, Sequence[SharedCell]]:
        """The cells of several jobs with room for another, by kind; the first to lose a job comes first."""

    @property
    def cell_kinds_version(self) -> int:
        """Number of times that a kind of cell appeared or disappeared, by which a cache recognises that it is stale."""


class AvailabilityView(Protocol):
    """The times from which GPUs are free. `copy` returns an object of the caller's own, for a what-if."""

    @property
    def moments(self) -> Sequence[float]:
        """The times from which GPUs are free, one for each GPU, soonest first."""

    def copy(self) -> Availability:
        """Return a copy to be changed independently."""


class EndTimesView(Protocol):
    """The predicted ends of the jobs that hold GPUs."""

    @property
    def ends(self) -> Mapping[int, float]:
        """The predicted end of each job that holds GPUs, by `seq`."""

    @property
    def lent(self) -> AvailabilityView:
        """The times at which the GPUs that hold jobs become free."""

    @property
    def running(self) -> Mapping[tuple[int, int], Sequence[tuple[float, int, JobView]]]:
        """The jobs that compute, by their number of GPUs and of mates: end, `seq` and job, the first to end first."""

    @property
    def soonest_first(self) -> Sequence[tuple[float, int, JobView]]:
        """The jobs that hold GPUs: predicted end, `seq` and job, the first to end first."""

    def slowdowns(self, record: JobView) -> list[Until]:
        """Return how much its present mates slow a running job down, and until when."""


class OverdueView(Protocol):
    """The paused jobs by the moment at which a certain patience ends.

    A job is overdue once its pause has lasted for `least` seconds and it has lost `patience` times its time left.
    """

    def first(self, least: float) -> float:
        """Return when the first of the jobs will be overdue; inf: none is paused."""

    def by(self, now: float, least: float) -> Sequence[JobView]:
        """Return the jobs that are overdue at this time, and those that will be within the rounding error."""


class LongWaitsView(Protocol):
    """The jobs that hold GPUs, by how long they waited for them."""

    def longer_than(self, seconds: float) -> Sequence[JobView]:
        """Return the jobs that waited for longer than this."""


class TrialsView(Protocol):
    """The trials of pairs: jobs that share to find out whether they should."""

    @property
    def running(self) -> Mapping[int, Trial]:
        """The trials that have not ended, by the guest's `seq`."""


class View(Protocol):
    """The scheduler's state as a policy sees it: everything readable, nothing writable."""

    @property
    def now(self) -> float:
        """Time of the present decision."""

    def may_use(self, job: JobView, gpu: GpuId) -> bool:
        """Return whether a job may start on a closed GPU: it ends before the closure begins, or is in its group."""

    @property
    def jobs_per_gpu(self) -> int:
        """C: number of jobs that may compute on a GPU at the same time."""

    @property
    def resident_per_gpu(self) -> int:
        """Number of jobs, active and paused ones, that may hold memory on a GPU."""

    @property
    def perf(self) -> PerformanceModel:
        """The performance model that the scheduler believes."""

    @property
    def belief_version(self) -> int:
        """Number of times that `perf` learned something that may change its answers."""

    @property
    def topology(self) -> TopologyView:
        """The nodes and their GPUs."""

    @property
    def free(self) -> FreeGpusView:
        """The free GPUs."""

    @property
    def queue(self) -> QueueView:
        """The pending jobs."""

    @property
    def hosts(self) -> HostsView:
        """The running jobs that may take a guest."""

    @property
    def active_hosts(self) -> HostsView:
        """The active jobs that may take a guest; paused residents do not count."""

    @property
    def end_times(self) -> EndTimesView:
        """The predicted ends of running jobs."""

    def overdue(self, patience: float) -> OverdueView:
        """Return the paused jobs by the moment at which this patience ends."""

    @property
    def long_waits(self) -> LongWaitsView:
        """The jobs that hold GPUs, by how long they waited for them."""

    @property
    def last_capacity_change(self) -> float:
        """Time of the last event other than a submission that may open a place for a pending job."""

    @property
    def previous_capacity_change(self) -> float:
        """Time of the one before it; −1: the last one was neither the end nor the pause of a job."""

    @property
    def openings(self) -> int:
        """Number of events that may have opened a place for a pending job, whatever they changed: all but submissions,
        plans, and starts that follow from them."""

    @property
    def jobs(self) -> Mapping[JobId, JobView]:
        """The jobs that have not ended, in the order of submission."""

    @property
    def mean_jct_s(self) -> float:
        """Mean completion time of the jobs that have finished; 0 before the first."""

    @property
    def running(self) -> Collection[JobView]:
        """The jobs that hold GPUs: started, starting or paused."""

    @property
    def paused(self) -> Mapping[int, JobView]:
        """The jobs that are paused or being paused, by `seq`."""

    @property
    def awakened(self) -> Mapping[int, JobView]:
        """The jobs, most of them paused, that may go on because their mates changed at this moment, by `seq`."""

    @property
    def learner(self) -> UncertainModel | None:
        """`perf`, where it learns and can be uncertain; None: it is certain."""

    @property
    def trials(self) -> TrialsView:
        """The trials of pairs."""

    @property
    def limits(self) -> Mapping[str, Limits]:
        """The limits of each user; "" stands for users without limits of their own."""

    @property
    def caps(self) -> Mapping[str, int]:
        """The largest number of GPUs that a group may hold, of groups for which there is one."""

    @property
    def shares_count(self) -> bool:
        """Whether shares, guarantees or caps of groups count."""

    @property
    def shares_above_all(self) -> bool:
        """Whether no job may start while one waits whose group is below its share."""

    def rank_of(self, job: JobView, held: int | None = None) -> tuple[int, ...]:
        """Return the rank of a waiting job's tenants, the smallest first; the queue sorts by it within a priority.

        `held`: the GPUs that its group holds in a plan; None: as many as it holds now.
        """

    def ranks_of_holders(self) -> Mapping[int, tuple[int, ...]]:
        """Return the ranks that the jobs that hold GPUs would have if they waited, by `seq`."""

    def weight_of(self, job: JobView) -> float:
        """Return what a second of a job's completion time counts for: more than 1 where its tenants are below their
        shares."""

    def cap_of(self, group: str) -> int | None:
        """Return the largest number of GPUs that a group may hold; None: any."""

    def held_by_group(self, group: str) -> int:
        """Return how many GPUs a group holds; counted only where shares, guarantees or caps count."""

    def kept_for(self) -> Sequence[tuple[JobView, int]]:
        """Return the waiting jobs for which free GPUs are kept: one of a shape, and how many of them."""

    def newest_first(self) -> Iterator[JobView]:
        """Return the jobs that have not ended, last submitted first."""

    def idle(self) -> Collection[GpuId]:
        """Return the GPUs that hold jobs, all of them paused."""

    def with_paused(self) -> Set[GpuId]:
        """Return the GPUs that hold a paused job, whether others compute there or not."""

    def jobs_on(self, gpu: GpuId) -> Sequence[JobView]:
        """Return the residents of a GPU, in the order in which they came."""

    def memory_used(self, gpu: GpuId) -> int:
        """Return the bytes that jobs have reserved on a GPU."""

    def gpus_holding(self, jobs: int) -> int:
        """Return the GPUs that hold this number of jobs, one bit each."""

    def limits_of(self, user: str) -> Limits:
        """Return the limits that apply to a user."""

    def held_by(self, user: str) -> tuple[int, int]:
        """Return how many jobs and GPUs the user holds; counted only where there are limits."""
