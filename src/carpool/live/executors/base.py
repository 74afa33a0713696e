"""The contract between the service and an executor: the `Executor` protocol and the values that cross it.

An executor runs gangs on the nodes that it owns. It knows their GPUs, builds the workers' environment, keeps their logs
and exit codes, and notices faults of its nodes. The service decides what runs where, and writes every decision to the
journal before it calls `launch`, `stop`, `pause`, `resume`, `retune` or `checkpoint`. Every executor passes a test
suite: derive a test class from `carpool.live.executors.contract.ExecutorContract`. `registry.py` says how an executor
gets its name.

Four guarantees hold for every executor:

- **Gangs outlive the executor.** The service may be killed at any moment. `recover` then finds all gangs again.
- **A gang runs whole or not at all**, and never twice: one `GangKey` names at most one set of workers, ever.
- **Each end is reported exactly once** per life of the service, after the last worker of the gang is gone. A gang that
  ended while no service ran is reported by `recover`.
- **Calls do not block.** Methods that are not coroutines return at once and work in the background. The listener is
  called on the event loop's thread, in the order in which things happened to a gang: started, then ended.

A paused gang keeps its memory and takes no compute: no process of it runs, whatever it forked. It stays paused while no
service runs, but not for ever: after a while (`ExecutorOptions.pause_patience_s`) it goes on.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from carpool.channel import Report
from carpool.core.model import GpuId, Node
from carpool.gpu.counters import GpuUse
from carpool.live.home import Home

GangKey = tuple[str, int]
"""Name of a gang: the job's id and the number of the attempt."""


# ---- what an executor owns -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GpuSlot:
    """One GPU, real or logical."""

    id: GpuId
    """Number of the GPU, unique in the cluster and the same after every restart."""
    node: str
    index: int
    """Number of the GPU within its node."""
    uuid: str = ""
    """UUID of the device; empty for a logical slot."""
    device: str = ""
    """Product name of the device, such as "NVIDIA H200"."""

    @property
    def label(self) -> str:
        """Name of the slot as users see it, such as "node0:1"."""
        return f"{self.node}:{self.index}"


@dataclass(frozen=True, slots=True)
class NodeInventory:
    """One node and its GPUs."""

    id: str
    slots: tuple[GpuSlot, ...]
    memory: int
    """Bytes of memory on each GPU."""
    mechanism: str
    """How jobs share a GPU of this node: `mps`, `time-slicing`, or `logical` for slots without a GPU."""
    why: str = ""
    """Why the mechanism is not MPS; empty where it is."""
    can_swap: bool = False
    """Whether the memory of a paused gang of one GPU can be moved to main memory."""
    closed: str = ""
    """Why nothing new may start there; empty: it may."""

    @property
    def node(self) -> Node:
        """The node as the scheduler knows it."""
        return Node(self.id, tuple(slot.id for slot in self.slots), self.memory, self.can_swap)


# ---- what the service asks for ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GangPart:
    """Which workers of a gang over several nodes run on one of them."""

    first_rank: int
    """Rank of the first worker here."""
    world_size: int
    """Number of workers of the whole gang."""
    node_rank: int
    """Number of this node within the gang; the workers of node 0 offer the port at which all meet."""
    nodes: int


@dataclass(frozen=True, slots=True)
class Launch:
    """A gang to start."""

    job: str
    attempt: int
    gpus: tuple[GpuId, ...]
    """GPUs of the gang, one for each worker, in the order of the ranks."""
    command: tuple[str, ...]
    directory: str
    env: Mapping[str, str]
    """Variables from the job and the service. The executor adds the other ones listed in docs/reference/workers.md."""
    accumulation: int = 1
    can_shrink: bool | None = None
    cpus: int | None = None
    """Cores for each worker."""
    memory: int | None = None
    """Limit of main memory for each worker, in bytes."""
    grace_s: float = 30.0
    """Seconds that a worker may take to save or to leave: see `StopMode`."""
    uid: int | None = None
    """Uid to run as; None: that of the service."""
    exclusive: bool = False
    """The gang has its GPUs to itself and shares nothing."""
    watch: bool = True
    """Whether to count the iterations of a script that does not use the training library: see `carpool.watch`."""
    gpu_memory: int = 0
    """Bytes that the job should need on each GPU, where it must not take much more; 0: no limit."""
    checkpoints: str = ""
    """Folder for checkpoints; empty: the executor's own."""
    snapshot: bool = False
    """The directory is the job's code snapshot in the service's home."""
    part: GangPart | None = None
    """The part of a gang over several nodes that is started here; None: the whole gang."""
    ahead: bool = False
    """The gang starts ahead of its turn: it is paused once it has started up, without a further request."""
    idle_s: float | None = None
    """The gang is one process with a terminal, and ends when that is left alone for so long; None: it has none."""

    @property
    def key(self) -> GangKey:
        return self.job, self.attempt


class StopMode(StrEnum):
    """How to stop a gang.

    The values are in files that outlive the service, so `TERMINATE` keeps the value that earlier releases wrote.
    """

    SAVE = "save"
    """Ask the training library, through the channel, to write a checkpoint and leave. A worker that never reported does
    not use the library and is terminated at once. A worker that is still there after `Launch.grace_s` is terminated,
    and killed a few seconds later.
    """
    TERMINATE = "end"
    """Send SIGTERM. A worker that is still there after `Launch.grace_s` is killed."""
    KILL = "kill"
    """Send SIGKILL at once."""


STOP_STRENGTH: Mapping[str, int] = {"": 0, StopMode.SAVE: 1, StopMode.TERMINATE: 2, StopMode.KILL: 3}
"""How strong each way to stop is: a weaker one never replaces a stronger one. The empty text stands for none."""


# ---- what an executor reports ----------------------------------------------------------------------------------------


class GangOutcome(StrEnum):
    """How a gang ended."""

    FINISHED = "finished"
    STOPPED = "stopped"  # on request
    FAILED = "failed"
    OUT_OF_MEMORY = "out of memory"
    LOST = "lost"  # through no fault of the job: the node restarted, or MPS failed
    NEVER_STARTED = "never started"  # stopped before its workers ran
    REFUSED = "refused"  # its node cannot run it: it does not know the user, for example, and would refuse it again


@dataclass(frozen=True, slots=True)
class GangEnded:
    """All workers of a gang are gone."""

    job: str
    attempt: int
    outcome: GangOutcome
    reason: str = ""
    """One sentence for users; empty where the outcome says it all."""
    exit_code: int | None = None
    """Exit code of the first worker that failed, 0 for a gang that finished; None: not known."""
    checkpoint: float | None = None
    """Iteration of the last checkpoint; None: none was reported."""
    needs_alone: bool = False
    """The job must have its GPUs to itself to succeed."""
    node_fault: bool = False
    """A fault of the node hit this gang. The service counts these and isolates a job that is hit too often."""
    ended_at: float | None = None
    """When its last worker was gone, on the clock `carpool.live.clock.since_boot`; None: just now."""

    @property
    def key(self) -> GangKey:
        return self.job, self.attempt


@dataclass(frozen=True, slots=True)
class NodeFault:
    """Something failed on a node and hit several gangs at once."""

    node: str
    reason: str
    gangs: frozenset[GangKey]
    """Gangs that were hit. Those that still run cannot be relied on."""


class ExecutorListener(Protocol):
    """Receives what happens on the nodes. The service implements it."""

    def gang_started(self, key: GangKey, started_at: float | None = None) -> None:
        """All workers of the gang run. `started_at`: since when, on the clock `carpool.live.clock.since_boot`; None:
        since just now."""

    def gang_paused(self, key: GangKey, *, swapped: bool = False) -> None:
        """No process of the gang runs any more, as `pause` asked. `swapped`: it holds no memory on its GPU."""

    def gang_resumed(self, key: GangKey) -> None:
        """All workers of the gang go on, as `resume` asked."""

    def gang_ended(self, ended: GangEnded) -> None: ...

    def node_fault(self, fault: NodeFault) -> None:
        """A fault hit several gangs. The service requeues those that still run; each of them still ends with
        `gang_ended`, in which `node_fault` is true."""

    def memory_taken(self, gpu: GpuId, memory: int) -> None:
        """Processes that do not belong to Carpool hold `memory` bytes on a GPU now."""

    def nodes_changed(self) -> None:
        """`Executor.nodes` returns other nodes or GPUs than before."""

    def note(self, text: str, level: int = logging.WARNING) -> None:
        """A line for the operator, kept in the journal. The executor keeps trying to solve the problem, if it is one:
        `level` is that of the log."""


class Leadership(Protocol):
    """Whether this service may act for its journal. Agents obey the service with the highest term."""

    @property
    def term(self) -> int:
        """Number of this start of a service on this journal; it grows with every start."""

    def leads(self) -> bool:
        """Return whether no other service can have taken over by now."""


@dataclass(frozen=True, slots=True)
class OnlyService:
    """The leadership of a service that alone can open its journal, because it holds the lock of its home."""

    term: int = 1

    def leads(self) -> bool:
        return True


# ---- the contract ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ExecutorOptions:
    """What `carpool serve` hands to the factory of an executor."""

    home: Home
    gpus: int | None = None
    """Number of logical slots; None: the GPUs that exist."""
    only: tuple[str, ...] = ()
    """UUIDs of the GPUs to use; empty: all."""
    gpu_memory: int | None = None
    """Bytes of memory to assume on each GPU; None: as much as there is."""
    mps: bool = True
    """Whether jobs may share by MPS."""
    emulated: str = ""
    """File that describes emulated GPUs, which the node has then (see `carpool.emulate`); empty: none."""
    pause_patience_s: float = 600.0
    """Seconds without a service after which a paused gang goes on."""
    gang_pause_s: float = 240.0
    """Seconds that a gang of several workers without the training library may be paused: its workers may wait for each
    other, and their libraries give up after a while."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """The `key=value` pairs of `--executor NAME:key=value,…`."""
    leadership: Leadership = field(default_factory=OnlyService)
    """Whether this service leads. An executor starts nothing while it does not."""
    node: str = "node0"
    """Name of this machine as a node."""
    lease: Path | None = None
    """File that says until when workers may run (see `carpool.live.may_run.Lease`); None: for ever."""
    has_service: Callable[[], bool] = lambda: True
    """Whether a service is there. Wrappers let paused workers go on where none is."""
    launch_patience_s: float = inf
    """Seconds after which a gang is lost that cannot be launched, so that it starts elsewhere; inf: there is no other
    place, and it is tried for ever."""
    launch_failed: Callable[[OSError], None] = lambda error: None
    """Called whenever a gang cannot be launched for a reason that is not its own."""


@dataclass(frozen=True, slots=True)
class LogChunk:
    """A part of a log."""

    data: bytes
    next: int
    """Offset of what follows."""
    last: bool
    """Nothing followed at the time of reading."""


@runtime_checkable
class MeasuresUse(Protocol):
    """An executor that can read the counters of its GPUs. Without it, demands are not measured."""

    def gpu_use(self, gpu: GpuId) -> GpuUse | None:
        """Return how much of a GPU was in use since the last call for it; None: not known. Blocks for some ms."""


@runtime_checkable
class KnowsEnds(Protocol):
    """An executor whose nodes may be taken back at a time that is known."""

    def seconds_left(self, gpus: Iterable[GpuId]) -> float | None:
        """Return for how long jobs may run on these GPUs before they must save and leave; None: for any time."""


@runtime_checkable
class TellsDelays(Protocol):
    """An executor that can say why a gang has not started yet."""

    def delay(self, key: GangKey) -> str:
        """Return why a gang could not be started so far; empty: nothing hindered it."""


class DoorConnection(Protocol):
    """A connection to the door of a worker, on which one request was made. See `live/door.py`."""

    async def readline(self) -> bytes:
        """Return the next line of the answer; empty: the door is closed. Raise `Unavailable` if the connection is lost,
        and `ValueError` for a line that is too long."""

    def close(self) -> None:
        """Close the connection, which ends a command that was asked for; `readline` returns what came before."""


@runtime_checkable
class FetchesCheckpoints(Protocol):
    """An executor with nodes that keep checkpoints on their own disks while a job runs there."""

    def checkpoint_left(self, job: str) -> str:
        """Say why the latest checkpoints of a job are on one node only; empty: they are not, or there are none."""


@runtime_checkable
class OpensDoors(Protocol):
    """An executor that lets the service reach workers: their terminals, and commands beside them. Without it, jobs have
    no terminals, and nothing can be run beside them."""

    async def open_door(self, key: GangKey, rank: int, request: Mapping[str, Any]) -> DoorConnection:
        """Make a request at a worker's door. Raise `InputError` where it cannot be reached, or no longer."""


class Executor(Protocol):
    """Runs gangs on nodes. The module's docstring lists the guarantees."""

    async def open(self, *, separate_users: bool = False) -> None:
        """Find the nodes and prepare them; called once, before everything else.

        `separate_users`: jobs run under their users' own uids. Raises `InputError` where there is nothing to run on.
        """

    def nodes(self) -> Sequence[NodeInventory]:
        """Return the nodes that can run gangs now. Ids of nodes and GPUs stay the same over restarts."""

    async def recover(self, known: Iterable[GangKey], listener: ExecutorListener) -> Collection[GangKey]:
        """Find the gangs of earlier services, and report to `listener` from now on; called once, after `open`.

        Return the known gangs that were found. Those that run are reported as started. Those that ended are reported as
        ended, now or soon after, with the time of their end and in the order of these times. A known gang that never
        started is neither returned nor reported nor `present`. Workers of all other gangs are killed, so that nothing
        runs that the journal does not know.
        """

    def launch(self, launch: Launch) -> None:
        """Start a gang in the background. It is `present` from this moment on.

        Reports `gang_started` when all workers run. Where a node refuses for a while (a full disk), the executor notes
        it and tries again. A command that cannot be run is an end with the outcome `FAILED`.
        """

    def stop(self, key: GangKey, mode: StopMode) -> bool:
        """Stop a gang in the background; return False if it is not present.

        Repeating it is harmless, and a stronger mode replaces a weaker one. The end is reported by `gang_ended`, with
        the outcome `NEVER_STARTED` if the gang was still on its way.
        """

    def pause(self, key: GangKey, *, swap: bool = False) -> None:
        """Stop the workers of a started gang from computing, in the background; `gang_paused` reports it.

        With `swap`, which is asked for only on nodes that can do it, the memory of the gang is moved to main memory as
        well. Where that fails, the gang is paused and `gang_paused` says that it is not swapped.

        The gang keeps its memory. It can be stopped and may end meanwhile. Repeating the call is harmless, and one for
        a gang that is paused is reported again. Does nothing for a gang that is gone or is being stopped.
        """

    def resume(self, key: GangKey) -> None:
        """Let a paused gang go on, in the background; `gang_resumed` reports it. Repeating it is harmless, and so is
        calling it for a gang that runs: both are reported again. The latest of `pause` and `resume` counts."""

    def retune(self, key: GangKey, accumulation: int) -> None:
        """Ask for another accumulation. `report` shows when it is in force. Does nothing for a gang that is gone."""

    def checkpoint(self, key: GangKey) -> None:
        """Ask the training library for a checkpoint, which `report` shows; the gang goes on. Does nothing for a gang
        that is gone or does not use the library."""

    def present(self) -> Mapping[GangKey, tuple[GpuId, ...]]:
        """Return the gangs that may have workers, with their GPUs: from `launch` until just before `gang_ended`."""

    def report(self, key: GangKey) -> Report | None:
        """Return the latest report of rank 0 in this attempt; None if there is none or the gang is gone."""

    def ranks(self, key: GangKey) -> list[dict[str, Any]]:
        """Return what is recorded about the workers, also after their end: rank, pid, started, exit_code, ended."""

    def exit_code(self, key: GangKey) -> int | None:
        """Return the exit code of a gang that has ended, as `GangEnded` had it; None: not known."""

    async def read_log(
        self, key: GangKey, rank: int, stream: str, *, offset: int = 0, limit: int, tail: int | None = None
    ) -> LogChunk:
        """Read at most `limit` bytes of a worker's `stdout` or `stderr`, also after its end.

        With `tail`, reading starts no earlier than the last `tail` lines. A log that does not exist is empty.
        """

    async def close(self) -> None:
        """Release everything but the gangs, which keep running. Nothing is reported any more."""
