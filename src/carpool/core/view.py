"""The read-only views through which policies see the scheduler's state.

`State` and the indexes that it owns satisfy these protocols structurally, so a view costs nothing at run time. No
protocol has a setter, a mutable container or a method that changes anything: `mypy --strict` refuses a policy that
writes to what it sees. A policy changes the cluster only by the decisions that it returns.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from carpool.core.availability import Availability, Until
from carpool.core.free import FreeGpus
from carpool.core.model import GpuId, Job, JobId, Limits, Node, NodeId, Status
from carpool.core.perf import PerformanceModel
from carpool.core.shapes import Shape


class JobView(Protocol):
    """A job as a policy sees it. `JobRecord` documents the fields."""

    @property
    def job(self) -> Job: ...
    @property
    def shape(self) -> Shape: ...
    @property
    def seq(self) -> int: ...
    @property
    def status(self) -> Status: ...
    @property
    def attempt(self) -> int: ...
    @property
    def gpus(self) -> tuple[GpuId, ...]: ...
    @property
    def gpus_since(self) -> float: ...
    @property
    def most_gpus(self) -> int: ...
    @property
    def accumulation(self) -> int: ...
    @property
    def batch(self) -> int | None: ...
    @property
    def memory(self) -> int: ...
    @property
    def done(self) -> float: ...
    @property
    def checkpoint(self) -> float: ...
    @property
    def since(self) -> float: ...
    @property
    def whole_iteration_s(self) -> float: ...
    @property
    def alone_iteration_s(self) -> float: ...
    @property
    def iteration_s(self) -> float: ...
    @property
    def slowdown(self) -> float: ...
    @property
    def alone_seen(self) -> bool: ...
    @property
    def pace_seen(self) -> bool: ...
    @property
    def pace_valid_until(self) -> float: ...
    @property
    def pending_since(self) -> float: ...
    @property
    def waited_s(self) -> float: ...
    @property
    def preemptions(self) -> int: ...
    def iterations_left(self, now: float) -> float: ...
    def alone_left(self, now: float) -> float: ...
    def whole_left(self, now: float) -> float: ...
    def service(self, now: float) -> float: ...
    def waited(self, now: float) -> float: ...
    def end(self) -> float: ...


SortKey = Callable[[JobView, float], tuple[float, ...]]
"""A policy's sort key for the queue. A pending job keeps its key until a `PriorityChanged` event."""

EntryView = tuple[int, tuple[float, ...], int, JobView]
"""A queue entry: −priority, the policy's sort key, the job's `seq`, the job."""


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
    def by_age(self) -> Sequence[tuple[int, JobView]]:
        """All pending jobs with their `seq`, first submitted first."""

    def scan(self, largest: int | None = None) -> ScanView:
        """Iterate over the pending jobs in order, except gangs of more than `largest` GPUs."""


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
    def largest_memory(self) -> int:
        """Bytes of the largest GPU."""

    @property
    def taken(self) -> Mapping[GpuId, int]:
        """Bytes that processes other than jobs hold on a GPU, where there are such processes."""

    def memory_of(self, gpu: GpuId) -> int: ...
    def gpus_below(self, needed: int) -> Sequence[GpuId]: ...
    def with_memory(self, needed: int) -> int: ...
    def wholly_with_memory(self, needed: int) -> int: ...
    def smallest_memory(self, mask: int) -> int: ...
    def total(self, mask: int = -1) -> int: ...
    def nodes_spanned(self, gpus: Sequence[GpuId]) -> int: ...
    def most_consolidated(self, gpus: Iterable[GpuId], count: int) -> list[GpuId]: ...


class FreeGpusView(Protocol):
    """The free GPUs. `copy` returns an index of the caller's own, for a what-if."""

    @property
    def count(self) -> int: ...
    def pick(self, count: int, eligible: int = -1) -> tuple[GpuId, ...] | None: ...
    def copy(self) -> FreeGpus: ...


class HostKind(NamedTuple):
    """What a guest needs to know of a host, besides the time that the host has left."""

    model: str
    batch: int
    accumulation: int
    max_slowdown: float | None
    memory_left: int
    """Bytes left on the smallest of its GPUs."""


class OtherHost(NamedTuple):
    """A job with room on some of its GPUs that is not a lone host."""

    record: JobView
    kind: HostKind
    alone_on: tuple[GpuId, ...]
    """Its GPUs that hold no other job."""
    shared_cells: tuple[tuple[tuple[JobView, ...], tuple[GpuId, ...]], ...]
    """Its cells of several residents that have room for another: the residents and the GPUs. A cell is listed under its
    first resident only."""


class LoneHostsView(Protocol):
    """The lone hosts of one kind, sorted by the time at which they end."""

    @property
    def kind(self) -> HostKind: ...
    @property
    def sample(self) -> Job:
        """A job of that kind."""

    @property
    def entries(self) -> Sequence[tuple[float, int, JobView]]:
        """The end, the `seq` and the job."""

    def ending_after(self, time: float) -> Iterator[JobView]: ...


class HostsView(Protocol):
    """The running jobs that may take a guest."""

    @property
    def lone(self) -> Mapping[HostKind, LoneHostsView]: ...
    @property
    def others(self) -> Mapping[int, OtherHost]:
        """Hosts that share some of their GPUs or still start, by `seq`."""


class AvailabilityView(Protocol):
    """The times from which GPUs are free. `copy` returns an object of the caller's own, for a what-if."""

    @property
    def moments(self) -> Sequence[float]: ...
    def copy(self) -> Availability: ...


class EndTimesView(Protocol):
    """The predicted ends of the jobs that hold GPUs."""

    @property
    def ends(self) -> Mapping[int, float]:
        """The predicted end of each job that holds GPUs, by `seq`."""

    @property
    def lent(self) -> AvailabilityView:
        """The times at which the GPUs that hold jobs become free."""

    def slowdowns(self, record: JobView) -> list[Until]: ...


class View(Protocol):
    """The scheduler's state as a policy sees it: everything readable, nothing writable."""

    @property
    def now(self) -> float: ...
    @property
    def jobs_per_gpu(self) -> int: ...
    @property
    def perf(self) -> PerformanceModel: ...
    @property
    def belief_version(self) -> int: ...
    @property
    def topology(self) -> TopologyView: ...
    @property
    def free(self) -> FreeGpusView: ...
    @property
    def queue(self) -> QueueView: ...
    @property
    def hosts(self) -> HostsView: ...
    @property
    def end_times(self) -> EndTimesView: ...
    @property
    def last_capacity_change(self) -> float: ...
    @property
    def jobs(self) -> Mapping[JobId, JobView]: ...
    @property
    def mean_jct_s(self) -> float: ...
    @property
    def running(self) -> Collection[JobView]: ...
    @property
    def limits(self) -> Mapping[str, Limits]: ...
    def newest_first(self) -> Iterator[JobView]: ...
    def jobs_on(self, gpu: GpuId) -> Sequence[JobView]: ...
    def memory_used(self, gpu: GpuId) -> int: ...
    def gpus_holding(self, jobs: int) -> int: ...
    def limits_of(self, user: str) -> Limits: ...
    def held_by(self, user: str) -> tuple[int, int]: ...
