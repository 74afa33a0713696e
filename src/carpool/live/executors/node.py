"""This machine as a node: its GPUs from NVML or logical slots, MPS where it works, and the memory that others hold.

The local executor opens it once, asks it for each launch's MPS variables, and looks at it every few seconds.
"""

import contextlib
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from carpool.channel import ENV_ATTEMPT, ENV_DIRECTORY
from carpool.core.model import GpuId
from carpool.errors import InputError
from carpool.gpu.counters import GpuUse, Meter
from carpool.live.executors.base import ExecutorOptions, GangKey, GpuSlot, NodeInventory
from carpool.live.freezer import process_words
from carpool.live.home import Home

LOGICAL_MEMORY = 2**50
"""Bytes on a logical slot: more than any job needs."""
NOTICEABLE_BYTES = 256 * 2**20
"""Smallest change of the memory held by other processes that is reported."""
LIMIT_FACTOR, LIMIT_MARGIN = 1.25, 2 * 2**30
"""A job's memory limit under MPS: this factor times what it should need, plus this margin for work space."""
SWAP_CHECK_S = 30.0
"""Seconds that the driver may take to say whether it can swap."""
MAX_RESTARTS = 3
"""Number of times that a dead MPS daemon is restarted before MPS is given up."""
MAX_DIGITS = 10
"""Number of digits from which a number in an environment is not that of an attempt."""
ENV_JOB, ENV_MPS_PIPE = "CARPOOL_JOB", "CUDA_MPS_PIPE_DIRECTORY"
"""Variables of workers, besides those of the channel, that tell to which gang a process belongs."""


@dataclass(frozen=True, slots=True)
class MpsServerFault:
    """An MPS server that failed, and the gangs that were seen on it."""

    gangs: frozenset[GangKey]
    reason: str


@dataclass
class LocalNode:
    """The GPUs of this machine, and the MPS daemon that serves them."""

    slots: tuple[GpuSlot, ...]
    memory: int
    mechanism: str
    why: str = ""
    name: str = "node0"
    mps: Any = None
    """The `carpool.gpu.mps.Daemon`; None: jobs share without MPS."""
    can_swap: bool = False
    """The driver can move the memory of a process to main memory; it cannot under MPS."""
    limits_hold: bool = False
    """A trial at the start showed that MPS enforces memory limits here."""
    seen: set[GangKey] = field(default_factory=set)
    """Gangs that MPS has served."""
    _gangs: dict[int, GangKey] = field(default_factory=dict)
    """Gang of each client process, looked up while the process lives."""
    _restarts: int = 0
    _foreign: dict[GpuId, int] = field(default_factory=dict)
    _meters: dict[GpuId, Meter] = field(default_factory=dict)
    _outside: dict[int, int] = field(default_factory=dict)
    """Number of consecutive looks at which each process was outside MPS."""

    @property
    def inventory(self) -> NodeInventory:
        return NodeInventory(self.name, self.slots, self.memory, self.mechanism, self.why, self.can_swap)

    def environment(self, memory: int = 0, gpus: int = 1) -> dict[str, str]:
        """Return the variables that let a job share. `memory`: bytes that it should need on a GPU; 0: no limit.

        Under MPS, a job that takes far more than it should runs out of memory itself and spares its mates.
        """
        mps = self.mps
        if mps is None or not mps.alive():
            return {}
        limit = round(LIMIT_FACTOR * memory) + LIMIT_MARGIN if self.limits_hold and memory else None
        return dict(mps.env(limit, gpus))

    @property
    def ready(self) -> bool:
        """Whether a job that starts now can share. A server that recovers from a fault refuses new clients."""
        mps = self.mps
        return mps is None or (mps.alive() and not mps.recovering)

    def faults(self) -> list[MpsServerFault]:
        """Return what failed in MPS since the last call, and restart a dead daemon. Blocks."""
        mps = self.mps
        if mps is None:
            return []
        found = mps.faults()
        clients = mps.served().union(*(fault.clients for fault in found))
        gangs = {pid: gang for pid in clients if (gang := self._gangs.get(pid) or gang_of(pid))}
        self.seen.update(gangs.values())
        self._gangs = gangs
        restarted = self._restart(mps) if found and not mps.alive() else ""
        return [
            MpsServerFault(frozenset(gangs[pid] for pid in fault.clients if pid in gangs), fault.reason + restarted)
            for fault in found
        ]

    def _restart(self, mps: Any) -> str:
        """Restart the daemon and say how that went, as the end of a sentence."""
        self._restarts += 1
        try:
            if self._restarts > MAX_RESTARTS:
                raise InputError(f"the MPS daemon died {self._restarts} times")
            mps.start()
        except InputError as error:
            self.mps, self.mechanism, self.why = None, "time-slicing", str(error)
            return f" and could not be restarted ({error}), so jobs share by time-slicing from now on"
        return " and was restarted"

    def outside_mps(self, own: "OwnProcesses") -> list[int]:
        """Return workers that compute on our GPUs without MPS although it runs; each one once. Blocks.

        A process is named at the second look: one that is ending leaves MPS shortly before the driver releases it.
        """
        mps = self.mps
        if mps is None:
            return []
        from carpool.gpu import nvml

        pids = {use.pid for slot in self.slots for use in nvml.processes(slot.uuid) if own.should_share(use.pid)}
        self._outside = {pid: self._outside.get(pid, 0) + 1 for pid in mps.fell_back(sorted(pids))}
        return [pid for pid, looks in self._outside.items() if looks == 2]

    def use_of(self, gpu: GpuId) -> GpuUse | None:
        """Return how much of a GPU was in use since the last call; None: not known. Blocks."""
        uuid = next((slot.uuid for slot in self.slots if slot.id == gpu), "")
        if not uuid or self.mechanism == "logical":
            return None
        meter = self._meters.get(gpu)
        if meter is None:
            meter = self._meters[gpu] = Meter(uuid)
        return meter.read()

    def foreign_memory(self, own: "OwnProcesses") -> list[tuple[GpuId, int]]:
        """Return the GPUs on which other processes hold noticeably more or less memory than before. Blocks."""
        if self.mechanism == "logical":
            return []
        from carpool.gpu import nvml

        changes = []
        for slot in self.slots:
            uses = [use for use in nvml.processes(slot.uuid) if not own.includes(use.pid)]
            memory = sum(use.memory or 0 for use in uses)
            if abs(memory - self._foreign.get(slot.id, 0)) >= NOTICEABLE_BYTES:
                self._foreign[slot.id] = memory
                changes.append((slot.id, memory))
        return changes

    def stop_mps_if_unused(self) -> None:
        """Stop the daemon unless it has clients: gangs of an earlier service may still use it. Blocks."""
        if self.mps is not None and not self.mps.clients():
            self.stop_mps()

    def leave_mps(self, why: str) -> None:
        """Serve no further job by MPS. A daemon that serves gangs of an earlier service stays for them. Blocks."""
        if self.mps is not None:
            self.stop_mps_if_unused()
            self.mps, self.mechanism, self.why, self.limits_hold = None, "time-slicing", why, False
            self.can_swap = swap_works()

    def stop_mps(self) -> None:
        """Stop the daemon. Only for when no gang runs: a daemon that serves gangs outlives the service. Blocks."""
        if self.mps is not None:
            self.mps.stop()
            self.mps = None


class OwnProcesses:
    """Distinguishes the jobs' processes, and the MPS daemon that serves them, from all other processes."""

    def __init__(self, home: Home, mps: Any = None) -> None:
        self._jobs = f"{home.jobs}/".encode()
        self._mps = mps

    def includes(self, pid: int) -> bool:
        variables = _variables_of(pid)
        return self._is_worker(variables) or self._has_mps(variables) or _is_ending(pid)

    def should_share(self, pid: int) -> bool:
        """Return whether the process belongs to a job that got the MPS variables. An exclusive job did not."""
        variables = _variables_of(pid)
        return self._is_worker(variables) and self._has_mps(variables)

    def _has_mps(self, variables: Mapping[str, bytes]) -> bool:
        return self._mps is not None and variables.get(ENV_MPS_PIPE) == str(self._mps.pipe).encode()

    def _is_worker(self, variables: Mapping[str, bytes]) -> bool:
        return variables.get(ENV_DIRECTORY, b"").startswith(self._jobs)


def gang_of(pid: int) -> GangKey | None:
    """Return the gang that a worker's process belongs to; None if it cannot be found out."""
    variables = _variables_of(pid)
    job, attempt = (variables.get(name, b"").decode(errors="replace") for name in (ENV_JOB, ENV_ATTEMPT))
    return (job, int(attempt)) if job and attempt.isdecimal() and len(attempt) < MAX_DIGITS else None


def _variables_of(pid: int) -> dict[str, bytes]:
    """Return those variables of a process's environment that Carpool sets; empty if it is gone, ending, or belongs to
    another user. Nothing else is kept: the process may have made its environment large."""
    found: dict[str, bytes] = {}
    for word in process_words(pid, "environ"):
        name, _, value = word.partition(b"=")
        for known in (ENV_DIRECTORY, ENV_JOB, ENV_ATTEMPT, ENV_MPS_PIPE):
            if name == known.encode():
                found.setdefault(known, value)
    return found


def _is_ending(pid: int) -> bool:
    """Return whether only the GPU driver still lists the process. Command lines of all users can be read."""
    return next(process_words(pid, "cmdline"), None) is None


def open_node(options: ExecutorOptions, without_mps: str = "") -> LocalNode:
    """Find the GPUs of this machine and start MPS; `without_mps` says why MPS is not to be used. Blocks."""
    if options.emulated:
        from carpool.emulate.gpus import read_gpus

        gpus = read_gpus(options.emulated)
        slots = tuple(GpuSlot(index, options.node, index, device=gpus.label) for index in range(gpus.gpus))
        return LocalNode(slots, gpus.memory, "logical", name=options.node)
    if options.gpus is not None:
        slots = tuple(GpuSlot(index, options.node, index) for index in range(options.gpus))
        return LocalNode(slots, options.gpu_memory or LOGICAL_MEMORY, "logical", name=options.node)
    from carpool.gpu import nvml

    devices = [device for device in nvml.devices() if not options.only or device.uuid in options.only]
    if not devices:
        raise InputError("no GPU was found; give --gpus N for logical slots")
    slots = tuple(
        GpuSlot(number, options.node, device.index, device.uuid, device.name) for number, device in enumerate(devices)
    )
    memory = options.gpu_memory or min(device.memory for device in devices)
    node = LocalNode(slots, memory, "time-slicing", without_mps, options.node)
    if not without_mps:
        _start_mps(node, options.home)
    node.can_swap = node.mps is None and swap_works()
    return node


def swap_works() -> bool:
    """Return whether the CUDA driver has the calls that move a process's memory. Blocks."""
    command = [sys.executable, "-m", "carpool.gpu.swap", "check"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, timeout=SWAP_CHECK_S).returncode == 0
    return False


def _start_mps(node: LocalNode, home: Home) -> None:
    """Let jobs share by MPS if it starts and serves a trial client; else record why not."""
    from carpool.gpu import mps

    why = mps.available()
    if why is not None:
        node.why = why
        return
    uuids = [slot.uuid for slot in node.slots]
    daemon = mps.Daemon(home.mps, uuids)
    try:
        daemon.start()
    except InputError as error:
        node.why = str(error)
        return
    check = daemon.check(uuids[0])
    if not check.served and not daemon.clients():  # a daemon that serves gangs of an earlier service must stay
        daemon.stop()
        node.why = f"MPS does not work here: {check.detail}"
        return
    node.mechanism, node.why, node.mps, node.limits_hold = "mps", "", daemon, check.limited
