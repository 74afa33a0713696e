"""The parts of gangs on this node as the agent knows them, and what happens on the node: the agent's listener.

The local executor calls it; the agent reads it for every exchange. Nothing here sends anything.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from carpool.channel import Report, read_json
from carpool.core.model import GpuId
from carpool.errors import InputError
from carpool.live.clock import since_boot
from carpool.live.executors import wire
from carpool.live.executors.base import GangEnded, GangKey, NodeFault
from carpool.live.executors.local import LocalExecutor
from carpool.live.executors.wire import PartState, Phase, RankRow, Remark, key_text
from carpool.live.worker_directory import GO

MOST_REMARKS = 200
"""Number of remarks that are kept for a service that is away."""


@dataclass
class NodePart:
    """One part."""

    key: GangKey
    started_at: float | None = None
    ended: GangEnded | None = None
    logged: bool = False
    """The service has all of its logs, so that its end may be reported."""
    saved: bool = False
    """Its checkpoints are at the service, or stay here."""
    asked_switch: int = 0
    """Number of the latest request to pause or resume that was handed to the executor."""
    asked_pause: bool = False
    asked_checkpoint: int = 0
    """Number of the latest request for a checkpoint that was handed to the executor."""
    switch: int = 0
    """Number of the latest one that is carried out."""
    stands: bool = False
    """It is paused, and that is reported as soon as the service has its logs."""
    swapped: bool = False
    stop: str = ""
    """Strongest `StopMode` that was handed to the executor."""
    ranks: tuple[RankRow, ...] = ()
    port: int = 0

    @property
    def has_news(self) -> bool:
        """Whether something waits to be reported until its logs are copied."""
        return not self.logged and (self.ended is not None or (self.stands and self.switch != self.asked_switch))


@dataclass
class NodeParts:
    """All parts, and the remarks that the service has not received."""

    changed: Callable[[], None]
    """Called when something should be reported to the service soon."""
    parts: dict[GangKey, NodePart] = field(default_factory=dict)
    remarks: deque[Remark] = field(default_factory=lambda: deque(maxlen=MOST_REMARKS))
    taken: dict[GpuId, int] = field(default_factory=dict)
    _number: int = 0

    def heard(self, number: int) -> None:
        """Forget the remarks that the service has received."""
        while self.remarks and self.remarks[0].number <= number:
            self.remarks.popleft()

    def remark(self, text: str, gangs: Iterable[GangKey] = (), *, fault: bool = False) -> None:
        self._number += 1
        self.remarks.append(Remark(self._number, text, tuple(map(key_text, gangs)), fault))
        self.changed()

    # ---- what the executor reports ---------------------------------------------------------------------------------

    def gang_started(self, key: GangKey, started_at: float | None = None) -> None:
        part = self.parts.setdefault(key, NodePart(key))
        part.started_at = since_boot() if started_at is None else started_at
        self.changed()

    def gang_paused(self, key: GangKey, *, swapped: bool = False) -> None:
        self._switched(key, paused=True, swapped=swapped)

    def gang_resumed(self, key: GangKey) -> None:
        self._switched(key, paused=False)

    def _switched(self, key: GangKey, *, paused: bool, swapped: bool = False) -> None:
        part = self.parts.get(key)
        if part is not None and part.asked_pause is paused:
            part.stands, part.swapped = paused, swapped
            if not paused:
                part.switch = part.asked_switch
                self.changed()

    def gang_ended(self, ended: GangEnded) -> None:
        part = self.parts.setdefault(ended.key, NodePart(ended.key))
        part.ended = ended
        self.changed()

    def node_fault(self, fault: NodeFault) -> None:
        self.remark(fault.reason, fault.gangs, fault=True)

    def memory_taken(self, gpu: GpuId, memory: int) -> None:
        self.taken[gpu] = memory

    def nodes_changed(self) -> None:
        self.changed()

    def note(self, text: str, level: int = logging.WARNING) -> None:
        self.remark(text)


def part_state(part: NodePart, executor: LocalExecutor) -> PartState:
    """Return a part as the service shall see it. Blocks."""
    now = since_boot()
    started = None if part.started_at is None else max(0.0, now - part.started_at)
    if part.ended is not None and part.logged:
        ended, at = replace(part.ended, ended_at=None), part.ended.ended_at
        if not _can_be_told(ended):
            ended = GangEnded(*part.key, part.ended.outcome, part.ended.reason)
        ago = None if at is None else max(0.0, now - at)
        return PartState(Phase.GONE, part.port, started, ended, ago, ranks=_ranks(part, executor))
    waiting = executor.gate.ports.get(part.key)
    if waiting is not None:
        part.port = waiting
        return PartState(Phase.READY, waiting)
    if part.started_at is None:
        return PartState(Phase.PREPARING, delay=executor.delay(part.key))
    part.port = part.port or meeting_port(executor.home.attempt(*part.key))
    return PartState(
        Phase.UP,
        part.port,
        started,
        report=first_report(part, executor),
        ranks=_ranks(part, executor),
        switch=part.switch,
        swapped=part.swapped,
    )


def first_report(part: NodePart, executor: LocalExecutor) -> Report | None:
    """Return the report of the first worker here. Workers write it themselves: one with a number that the service would
    not read is left out, because the service would refuse the whole exchange."""
    found = executor.report(part.key) if part.ended is None else None
    return found if found is None or _can_be_told(found) else None


def _can_be_told(value: Report | GangEnded) -> bool:
    try:
        wire.read(type(value), wire.plain(value))
    except InputError:
        return False
    return True


def meeting_port(directory: Path) -> int:
    """Return the port at which the workers of a gang over several nodes meet, as its file `go` says; 0: none."""
    go = read_json(directory / GO)
    try:
        env = go["env"]
        return int(env.get("MASTER_PORT") or env["PET_MASTER_PORT"])
    except (KeyError, TypeError, ValueError):
        return 0


def _ranks(part: NodePart, executor: LocalExecutor) -> tuple[RankRow, ...]:
    """Return the rows of a part's workers; read again until they are complete."""
    over = part.ended is not None
    complete = part.ranks and all(row.pid is not None and (not over or row.ended is not None) for row in part.ranks)
    if not complete:
        part.ranks = tuple(_row(data) for data in executor.ranks(part.key))
    return part.ranks


def _row(data: dict[str, object]) -> RankRow:
    """Return a worker's row. Its files are beside the worker's own, so their content is checked."""

    def whole(name: str) -> int | None:
        found = data.get(name)
        return found if type(found) is int and abs(found) < 2**53 else None

    def moment(name: str) -> float | None:
        found = data.get(name)
        return float(found) if isinstance(found, int | float) and abs(found) < 2**40 else None

    return RankRow(whole("rank") or 0, whole("pid"), moment("started"), whole("exit_code"), moment("ended"))
