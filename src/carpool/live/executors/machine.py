"""This machine's GPUs as the scheduler sees them: logical slots, or what NVML finds, with MPS where it works.

The service asks it once at the start for its slots and now and then for the memory that strangers hold.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from carpool.channel import ENV_ATTEMPT, ENV_DIRECTORY
from carpool.core.model import GpuId, Node
from carpool.errors import InputError
from carpool.live.executors.base import Key, Slot
from carpool.live.home import Home

NODE = "node0"
LOGICAL_MEMORY = 2**50
"""A logical slot has no memory to run out of."""
NOTICEABLE = 256 * 2**20
"""Strangers who take or leave less than this are not worth an event."""
FENCE, FENCE_MORE = 1.25, 2 * 2**30
"""A fenced job may hold so many times what it is believed to need, and so much more: workspaces and fragments."""
MOST_RESTARTS = 3
"""A daemon that dies more often than this while we live is given up."""


@dataclass(frozen=True, slots=True)
class ServerFault:
    """An MPS server that failed, and the gangs that were seen on it."""

    gangs: frozenset[Key]
    reason: str


@dataclass
class Machine:
    slots: tuple[Slot, ...]
    memory: int
    mechanism: str
    """How jobs share a GPU: logical, mps or time-slicing."""
    why: str = ""
    """Why not MPS."""
    names: Mapping[GpuId, str] = field(default_factory=dict)
    mps: Any = None
    fenced: bool = False
    """Does MPS keep a job below a memory limit here? Tried at the start, not believed."""
    seen: set[Key] = field(default_factory=set)
    """Gangs that MPS has served."""
    _gangs: dict[int, Key] = field(default_factory=dict)
    """Whose process each client is; asked while it lives."""
    _restarts: int = 0
    _strangers: dict[GpuId, int] = field(default_factory=dict)
    _outside: dict[int, int] = field(default_factory=dict)
    """How often in a row each process was seen outside MPS."""

    @property
    def node(self) -> Node:
        return Node(NODE, tuple(slot.id for slot in self.slots), self.memory)

    def slot(self, gpu: GpuId) -> Slot:
        return self.slots[gpu]

    def environment(self, memory: int = 0, gpus: int = 1) -> dict[str, str]:
        """What a job gets so that it can share. `memory`: what it needs on a GPU with its batch whole; 0: not known.

        Under MPS a job that takes far more than it needs runs out of memory itself, instead of its mates.
        """
        mps = self.mps
        if mps is None or not mps.alive():
            return {}
        limit = round(FENCE * memory) + FENCE_MORE if self.fenced and memory else None
        return dict(mps.env(limit, gpus))

    @property
    def ready(self) -> bool:
        """Can a job be launched now so that it shares as it should?"""
        mps = self.mps
        return mps is None or (mps.alive() and not mps.recovering)

    def faults(self) -> list[ServerFault]:
        """What has failed of MPS since the last call. A daemon that is gone is started again. Blocks."""
        mps = self.mps
        if mps is None:
            return []
        found = mps.faults()
        here = mps.served().union(*(fault.clients for fault in found))
        gangs = {pid: gang for pid in here if (gang := self._gangs.get(pid) or gang_of(pid))}
        self.seen.update(gangs.values())
        self._gangs = gangs
        outcome = self._restart(mps) if found and not mps.alive() else ""
        return [
            ServerFault(frozenset(gangs[pid] for pid in fault.clients if pid in gangs), fault.reason + outcome)
            for fault in found
        ]

    def _restart(self, mps: Any) -> str:
        """What came of it."""
        self._restarts += 1
        try:
            if self._restarts > MOST_RESTARTS:
                raise InputError(f"the MPS daemon died {self._restarts} times")
            mps.start()
        except InputError as error:
            self.mps, self.mechanism, self.why = None, "time-slicing", str(error)
            return f" and is not back ({error}), so jobs share by time-slicing from now on"
        return " and was started again"

    def outside_mps(self, is_ours: "Ours") -> list[int]:
        """Processes of our jobs that compute on our GPUs without MPS though it is there; each is told once. Blocks.

        Told at the second look: one that is ending leaves MPS a moment before the driver lets go of it.
        """
        mps = self.mps
        if mps is None:
            return []
        from carpool.gpu import nvml

        pids = {use.pid for slot in self.slots for use in nvml.processes(slot.uuid) if is_ours.should_share(use.pid)}
        self._outside = {pid: self._outside.get(pid, 0) + 1 for pid in mps.fell_back(sorted(pids))}
        return [pid for pid, looks in self._outside.items() if looks == 2]

    def taken_by_strangers(self, is_ours: "Ours") -> list[tuple[GpuId, int]]:
        """GPUs on which processes that are not ours hold noticeably more or less memory than before. Blocks."""
        if self.mechanism == "logical":
            return []
        from carpool.gpu import nvml

        changes = []
        for slot in self.slots:
            uses = [use for use in nvml.processes(slot.uuid) if not is_ours(use.pid)]
            memory = sum(use.memory or 0 for use in uses)
            if abs(memory - self._strangers.get(slot.id, 0)) >= NOTICEABLE:
                self._strangers[slot.id] = memory
                changes.append((slot.id, memory))
        return changes

    def leave(self) -> None:
        """Called when the service could not start: jobs of an earlier one may go on under MPS."""
        if self.mps is not None and not self.mps.clients():
            self.stop()

    def stop(self) -> None:
        """Called when nothing runs any more: a daemon that serves jobs outlives us."""
        if self.mps is not None:
            self.mps.stop()
            self.mps = None


class Ours:
    """Tells our jobs' processes, and the MPS daemon that serves them, from strangers."""

    def __init__(self, home: Home, mps: Any = None) -> None:
        self._mark = f"{ENV_DIRECTORY}={home.jobs}/".encode()
        self._mps = mps

    def __call__(self, pid: int) -> bool:
        variables = _environment_of(pid)
        return self._marked(variables) or self._pointed(variables) or _is_ending(pid)

    def should_share(self, pid: int) -> bool:
        """Is it a process of one of our jobs, and one that was told where MPS is? A job alone on its GPUs is not."""
        variables = _environment_of(pid)
        return self._marked(variables) and self._pointed(variables)

    def _pointed(self, variables: Sequence[bytes]) -> bool:
        return self._mps is not None and f"CUDA_MPS_PIPE_DIRECTORY={self._mps.pipe}".encode() in variables

    def _marked(self, variables: Sequence[bytes]) -> bool:
        return any(variable.startswith(self._mark) for variable in variables)


def gang_of(pid: int) -> Key | None:
    """The gang that a worker's process belongs to; None where that cannot be told."""
    told = dict(variable.partition(b"=")[::2] for variable in _environment_of(pid))
    job, attempt = (told.get(name, b"").decode(errors="replace") for name in (b"CARPOOL_JOB", ENV_ATTEMPT.encode()))
    return (job, int(attempt)) if job and attempt.isdecimal() else None


def _environment_of(pid: int) -> list[bytes]:
    """Empty for one that is gone or ending, and for another user's."""
    return _told(pid, "environ").split(b"\0")


def _is_ending(pid: int) -> bool:
    """Gone, or the driver alone still lists it: what it holds is soon nobody's. Others' command lines can be read."""
    return not _told(pid, "cmdline")


def _told(pid: int, what: str) -> bytes:
    try:
        with open(f"/proc/{pid}/{what}", "rb") as file:
            return file.read()
    except OSError:
        return b""


def discover(
    gpus: int | None, gpu_memory: int | None, home: Home, *, only: Collection[str] = (), without_mps: str = ""
) -> Machine:
    """`gpus` logical slots, or the GPUs that NVML finds, or of these those with the UUIDs `only`. `without_mps`: why
    MPS is not to be used."""
    if gpus is not None:
        slots = tuple(Slot(index, NODE, index) for index in range(gpus))
        return Machine(slots, gpu_memory or LOGICAL_MEMORY, "logical")
    from carpool.gpu import nvml

    devices = [device for device in nvml.devices() if not only or device.uuid in only]
    if not devices:
        raise InputError("no GPU was found; give --gpus N for logical slots")
    slots = tuple(Slot(number, NODE, device.index, device.uuid) for number, device in enumerate(devices))
    memory = gpu_memory or min(device.memory for device in devices)
    names = {number: device.name for number, device in enumerate(devices)}
    machine = Machine(slots, memory, "time-slicing", without_mps, names)
    if not without_mps:
        _start_mps(machine, home, [device.uuid for device in devices])
    return machine


def _start_mps(machine: Machine, home: Home, uuids: Sequence[str]) -> None:
    """Let jobs share by MPS if it starts and serves a trial client; else the machine says why not."""
    from carpool.gpu import mps

    why = mps.available()
    if why is not None:
        machine.why = why
        return
    daemon = mps.Daemon(home.mps, uuids)
    try:
        daemon.start()
    except InputError as error:
        machine.why = str(error)
        return
    check = daemon.check(uuids[0])
    if not check.served and not daemon.clients():  # one that serves jobs of an earlier service must not go
        daemon.stop()
        machine.why = f"MPS does not work here: {check.detail}"
        return
    machine.mechanism, machine.why, machine.mps, machine.fenced = "mps", "", daemon, check.limited
