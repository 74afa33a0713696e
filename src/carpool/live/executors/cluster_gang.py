"""A gang over the nodes of a cluster, as the service sees it: its parts, what each shall do, and how the whole ended.

A part is the gang's workers on one node. No part runs its workers before all parts are ready, and a part that ends
without finishing ends all. Nothing here waits or sends: `cluster.py` hands in what agents say and sends what `order`
returns. Two files in the attempt's directory outlive the service: which parts there are, and how the gang ended.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from carpool.channel import read_json
from carpool.core.model import GpuId
from carpool.errors import InputError
from carpool.live.clock import since_boot
from carpool.live.executors import wire
from carpool.live.executors.base import (
    STOP_STRENGTH,
    GangEnded,
    GangKey,
    GangOutcome,
    GangPart,
    Launch,
    StopMode,
)
from carpool.live.executors.wire import PartOrder, PartState, Phase, Want
from carpool.live.home import folder_mode, write_private

PARTS_FILE, END_FILE = "parts.json", "end.json"
NOT_ITS_FAULT = (GangOutcome.REFUSED, GangOutcome.LOST, GangOutcome.OUT_OF_MEMORY)
"""Outcomes of one part that explain the failures of the others, the most telling first."""


@dataclass(frozen=True, slots=True)
class NodeShare:
    """The GPUs that a gang has on one node."""

    node: str
    gpus: tuple[GpuId, ...]
    """Numbers of the GPUs in the cluster."""
    indexes: tuple[int, ...]
    """The same, within the node."""
    first_rank: int = 0


@dataclass(slots=True)
class ClusterPart:
    """One part and what its agent said about it last."""

    share: NodeShare
    state: PartState | None = None
    """None: its agent has not reported it."""
    lost: str = ""
    """Why the part is given up without a report of its agent; empty: it is not."""

    @property
    def phase(self) -> Phase:
        return self.state.phase if self.state is not None else Phase.UNKNOWN

    @property
    def seen(self) -> bool:
        """Its agent has it, or had it."""
        return self.state is not None and self.state.phase is not Phase.UNKNOWN

    @property
    def over(self) -> bool:
        """No worker of it runs any more."""
        return bool(self.lost) or self.phase is Phase.GONE

    def end(self, key: GangKey) -> GangEnded:
        if self.lost:
            return GangEnded(*key, GangOutcome.LOST, self.lost)
        if self.state is None or self.state.ended is None:
            return GangEnded(*key, GangOutcome.NEVER_STARTED)
        ago = self.state.ended_ago_s
        return replace(self.state.ended, ended_at=None if ago is None else since_boot() - max(0.0, ago))


@dataclass
class ClusterGang:
    """All parts of one attempt."""

    key: GangKey
    parts: dict[str, ClusterPart]
    """By node, in the order of the ranks."""
    launch: Launch | None = None
    """What to start; None: an earlier service started it, and nothing is started again."""
    user: str = ""
    accumulation: int = 0
    """0: as it is."""
    checkpoint: int = 0
    """Number of the latest request for a checkpoint."""
    stop: StopMode | None = None
    broken: bool = False
    """A part ended without finishing, so the others must end too."""
    started: bool = False
    """Its start is reported."""
    paused: bool | None = None
    """Whether the latest request was to pause it, which one that starts ahead of its turn has from the start; None:
    there was none."""
    swap: bool = False
    switch: int = 0
    """Number of the latest request to pause or resume it."""
    switched: bool = False
    """That request is carried out, and that is reported."""
    recorded: bool = False
    """The file with its parts is written."""
    unrecorded: str = ""
    """Why that file could not be written so far."""
    ends: list[GangEnded] = field(default_factory=list)
    """Ends of its parts, in the order in which they became known."""
    _counted: set[str] = field(default_factory=set)

    @property
    def gpus(self) -> tuple[GpuId, ...]:
        return tuple(gpu for part in self.parts.values() for gpu in part.share.gpus)

    @property
    def first(self) -> ClusterPart:
        return next(iter(self.parts.values()))

    @property
    def over(self) -> bool:
        return all(part.over for part in self.parts.values())

    @property
    def up(self) -> bool:
        """Every worker runs or ran."""
        return all(part.state is not None and part.state.started_ago_s is not None for part in self.parts.values())

    @property
    def delay(self) -> str:
        """Why it could not be started so far; empty: nothing hindered it."""
        if not self.recorded:
            return self.unrecorded
        told = ((name, part.state.delay) for name, part in self.parts.items() if part.state is not None)
        return next((f"on node {name}, {delay}" for name, delay in told if delay), "")

    def _never_ran(self) -> bool:
        return any(end.outcome is GangOutcome.NEVER_STARTED for end in self.ends)

    # ---- what agents say -------------------------------------------------------------------------------------------

    def tell(self, node: str, state: PartState) -> bool:
        """Take what an agent says about its part; return whether something follows from it."""
        part = self.parts[node]
        if part.over:
            return False
        before = part.phase, part.state.switch if part.state is not None else 0, part.state is None
        if state.phase is Phase.UNKNOWN and part.seen:  # its files are gone, and so is what ran there
            part.lost = f"node {node} lost its files"
        elif state.phase is Phase.UNKNOWN and self.launch is None:  # an earlier service never told this agent
            part.state = replace(state, phase=Phase.GONE)
        elif state.phase is not Phase.UNKNOWN:
            part.state = state
        self._note_end(part)
        after = part.phase, part.state.switch if part.state is not None else 0, part.state is None
        return part.over or before != after

    def lose(self, node: str, why: str) -> None:
        """Give up the part on a node that is lost."""
        part = self.parts[node]
        if not part.over:
            part.lost = why
            self._note_end(part)

    def _note_end(self, part: ClusterPart) -> None:
        if not part.over or part.share.node in self._counted:
            return
        self._counted.add(part.share.node)
        end = part.end(self.key)
        self.ends.append(end)
        if end.outcome is not GangOutcome.FINISHED and not self.over:
            self.broken = True

    # ---- what agents shall do --------------------------------------------------------------------------------------

    def stop_by(self, mode: StopMode) -> None:
        if STOP_STRENGTH[mode] > STOP_STRENGTH[self.stop or ""]:
            self.stop = mode

    def order(self, node: str) -> PartOrder:
        """Return what a node's agent shall do with its part."""
        part = self.parts[node]
        order = PartOrder(
            Want.KEEP,
            accumulation=self.accumulation,
            switch=self.switch,
            paused=bool(self.paused),
            swap=self.swap,
            checkpoint=self.checkpoint,
        )
        mode = self._stop_mode()
        if mode is not None:
            return replace(order, want=Want.STOP, how=str(mode))
        if self.launch is None and part.state is None:
            return order
        if self.launch is not None and not part.seen:
            order = replace(order, launch=self._launch_of(part), user=self.user)
        if len(self.parts) == 1 or part.phase in (Phase.UP, Phase.GONE):
            return replace(order, want=Want.GO)
        if all(other.phase in (Phase.READY, Phase.UP, Phase.GONE) for other in self.parts.values()):
            return replace(order, want=Want.GO, port=self.first.state.port if self.first.state is not None else 0)
        return replace(order, want=Want.READY)

    def _stop_mode(self) -> StopMode | None:
        """Return how the parts that are left shall stop; a gang without one of its parts cannot save."""
        if not self.broken:
            return self.stop
        return StopMode.KILL if self.stop is StopMode.KILL else StopMode.TERMINATE

    def _launch_of(self, part: ClusterPart) -> Launch:
        assert self.launch is not None
        share, shares = part.share, [one.share for one in self.parts.values()]
        whole = None
        if len(shares) > 1:
            whole = GangPart(share.first_rank, len(self.gpus), shares.index(share), len(shares))
        return replace(self.launch, gpus=share.indexes, part=whole)

    def request_switch(self, paused: bool, swap: bool, above: int) -> bool:
        """Note a request to pause it or let it go on; return whether that is so already.

        `above`: a number above those of the requests of earlier services, which agents may remember.
        """
        never_paused = self.paused is None and not paused and self.launch is not None
        same = self.paused is paused and self.swap is swap
        if never_paused or (same and self.switched):
            return True
        if not same or not self.switch:
            self.switch = max(self.switch, above) + 1
            self.paused, self.swap, self.switched = paused, swap, False
        return False

    def has_switched(self) -> bool:
        """Return whether all parts have carried out the latest request, once for each request."""
        if not self.switch or self.switched or self.stop or self.broken:
            return False
        states = [part.state for part in self.parts.values()]
        self.switched = all(state is not None and state.switch == self.switch for state in states)
        return self.switched

    @property
    def swapped(self) -> bool:
        return all(part.state is not None and part.state.swapped for part in self.parts.values())

    # ---- how it ended ----------------------------------------------------------------------------------------------

    def ended(self) -> GangEnded:
        """Return how the gang ended, once all parts are over."""
        ends = self.ends
        telling = self._telling_end()
        saved = [end.checkpoint for end in ends if end.checkpoint is not None]
        times = [end.ended_at for end in ends]
        codes = [end.exit_code for end in ends if end.exit_code]
        return replace(
            telling,
            exit_code=telling.exit_code if telling.exit_code is not None else next(iter(codes), None),
            checkpoint=max(saved) if saved else None,
            needs_alone=any(end.needs_alone for end in ends),
            node_fault=any(end.node_fault for end in ends),
            ended_at=None if None in times else max(time for time in times if time is not None),
        )

    def _telling_end(self) -> GangEnded:
        """Return the end of the part that explains the others: peers of a part that is lost fail, too."""
        ends = self.ends
        for outcome in NOT_ITS_FAULT:
            for end in ends:
                if end.outcome is outcome:
                    return end
        if all(end.outcome is GangOutcome.NEVER_STARTED for end in ends):
            return ends[0]
        failed = [end for end in ends if end.outcome is GangOutcome.FAILED]
        if failed and not (self.stop and ends[0].outcome is not GangOutcome.FAILED):
            return failed[0]
        if self._never_ran():
            return GangEnded(*self.key, GangOutcome.LOST, "one of its parts never started")
        return next((end for end in ends if end.outcome is not GangOutcome.FINISHED), ends[0])

    def rank_rows(self) -> list[dict[str, Any]]:
        states = [part.state for part in self.parts.values() if part.state is not None]
        rows = [wire.plain(row) for state in states for row in state.ranks]
        return sorted(rows, key=lambda row: row["rank"])


# ---- on disk ---------------------------------------------------------------------------------------------------------


def share_out(gpus: Sequence[GpuId], place_of: Mapping[GpuId, tuple[str, int]]) -> list[NodeShare]:
    """Divide the GPUs of a gang by nodes. `place_of`: the node of each GPU, and the GPU's number within it."""
    nodes: dict[str, list[GpuId]] = {}
    for gpu in gpus:
        nodes.setdefault(place_of[gpu][0], []).append(gpu)
    shares: list[NodeShare] = []
    for node, own in nodes.items():
        first = sum(len(share.gpus) for share in shares)
        shares.append(NodeShare(node, tuple(own), tuple(place_of[gpu][1] for gpu in own), first))
    return shares


def write_parts(directory: Path, gang: ClusterGang) -> None:
    """Record which parts a gang has, before any agent is told. Blocks."""
    mode = folder_mode()  # the job's user reaches its checkpoints through it
    directory.parent.mkdir(mode=mode, exist_ok=True)
    directory.parent.chmod(mode)
    directory.mkdir(mode=0o700, exist_ok=True)
    shares = [wire.plain(part.share) for part in gang.parts.values()]
    write_private(directory / PARTS_FILE, json.dumps({"parts": shares}))


def read_parts(directory: Path, key: GangKey) -> ClusterGang | None:
    """Return the gang of an earlier service; None: no agent was told to start it. Blocks."""
    data = read_json(directory / PARTS_FILE)
    try:
        shares = [wire.read(NodeShare, one) for one in data["parts"]]
    except (InputError, KeyError, TypeError):
        return None
    if not shares:
        return None
    return ClusterGang(key, {share.node: ClusterPart(share) for share in shares}, recorded=True)


def runs_on_nodes(directory: Path) -> bool:
    """Return whether agents were told to start a gang whose end is not known. Blocks."""
    return (directory / PARTS_FILE).exists() and not (directory / END_FILE).exists()


def write_end(directory: Path, gang: ClusterGang, ended: GangEnded) -> None:
    """Record how a gang ended, before that is reported. Blocks."""
    data = {"ended": wire.plain(ended), "ranks": gang.rank_rows()}
    write_private(directory / END_FILE, json.dumps(data))


def read_end(directory: Path) -> tuple[GangEnded, list[dict[str, Any]]] | None:
    """Return how a gang ended, and what is known of its workers; None: it has not, or that cannot be read. Blocks."""
    data = read_json(directory / END_FILE)
    try:
        rows = [wire.plain(wire.read(wire.RankRow, row)) for row in data["ranks"]]
        return wire.read(GangEnded, data["ended"]), rows
    except (InputError, KeyError, TypeError):
        return None
