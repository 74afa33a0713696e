"""An executor that runs nothing: gangs are entries in a dictionary. For tests of the service and for load tests.

It keeps the contract of `base.py`, so it shows which calls an executor answers and makes, and in which order. It takes
no `ExecutorOptions` and starts no process; `local.py` does. With `automatic`, gangs start and stop by themselves and
`program(...)` says what they do; without, a test calls `start` and `end` itself. Closing it and calling `recover` again
stands for a restart of the service, because the gangs stay in the object.
"""

import asyncio
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from carpool.channel import Report
from carpool.core.model import GpuId
from carpool.live.executors.base import (
    ExecutorListener,
    GangEnded,
    GangKey,
    GangOutcome,
    GpuSlot,
    Launch,
    LogChunk,
    NodeInventory,
    StopMode,
)

PROGRAM = "memory-program"


def program(*, exit_code: int | None = None, output: str = "", checkpoint: int | None = None) -> tuple[str, ...]:
    """Return the command of a gang that prints `output` and ends with `exit_code`; None: it runs until it is stopped.

    `checkpoint`: the iteration that it saves when it is stopped with `StopMode.SAVE`.
    """
    return PROGRAM, json.dumps({"exit_code": exit_code, "output": output, "checkpoint": checkpoint})


@dataclass(slots=True)
class MemoryGang:
    """What the executor knows about one gang."""

    launch: Launch
    started: bool = False
    stopping: bool = False
    paused: bool = False
    swapped: bool = False
    ended: GangEnded | None = None
    report: Report | None = None
    output: bytes = b""

    @property
    def gpus(self) -> tuple[GpuId, ...]:
        return self.launch.gpus

    @property
    def exclusive(self) -> bool:
        return self.launch.exclusive

    @property
    def program(self) -> dict[str, Any]:
        command = self.launch.command
        if command[0] == PROGRAM:
            found: dict[str, Any] = json.loads(command[1])
            return found
        return {"exit_code": None}


@dataclass
class MemoryExecutor:
    """Remembers gangs and calls the listener."""

    gpus: int = 2
    memory: int = 2**50
    """Bytes of memory on each GPU."""
    node_names: Sequence[str] = ("node0",)
    """Names of the nodes, each with `gpus` GPUs."""
    can_swap: bool = False
    automatic: bool = False
    """Gangs start, end and stop by themselves."""
    gangs: dict[GangKey, MemoryGang] = field(default_factory=dict)
    """Gangs that are present."""
    launched: list[Launch] = field(default_factory=list)
    """Every launch so far."""
    stopped: list[tuple[GangKey, StopMode]] = field(default_factory=list)
    """Every call of `stop` so far."""
    switched: list[tuple[GangKey, bool]] = field(default_factory=list)
    """Every call of `pause` (True) and `resume` (False) so far, without those that repeat the one before."""
    checkpoints: list[GangKey] = field(default_factory=list)
    """Every request for a checkpoint so far."""
    _past: dict[GangKey, MemoryGang] = field(default_factory=dict)
    _listener: ExecutorListener | None = None

    # ---- what a test or a load test does ----------------------------------------------------------------------------

    def start(self, key: GangKey) -> None:
        """Act as if all workers of a gang run."""
        gang = self.gangs.get(key)
        if gang is not None and not gang.started:
            gang.started = True
            self.listener.gang_started(key)

    def switch(self, key: GangKey) -> None:
        """Act as if a gang did what the latest `pause` or `resume` asked for."""
        gang = self.gangs.get(key)
        if gang is not None and gang.started and not gang.stopping and self._listener is not None:
            if gang.paused:
                self._listener.gang_paused(key, swapped=gang.swapped)
            else:
                self._listener.gang_resumed(key)

    def end(
        self,
        key: GangKey,
        outcome: GangOutcome = GangOutcome.FINISHED,
        reason: str = "",
        *,
        exit_code: int | None = None,
        checkpoint: float | None = None,
        node_fault: bool = False,
    ) -> None:
        """Act as if all workers of a gang are gone; reported now, or by `recover` if no service is attached."""
        gang = self._past[key] = self.gangs.pop(key)
        gang.ended = GangEnded(*key, outcome, reason, exit_code=exit_code, checkpoint=checkpoint, node_fault=node_fault)
        if self._listener is not None:
            self._listener.gang_ended(gang.ended)

    @property
    def listener(self) -> ExecutorListener:
        assert self._listener is not None, "recover() comes first"
        return self._listener

    # ---- the contract -----------------------------------------------------------------------------------------------

    async def open(self, *, separate_users: bool = False) -> None:
        return

    def nodes(self) -> Sequence[NodeInventory]:
        found = []
        for number, name in enumerate(self.node_names):
            first = number * self.gpus
            slots = tuple(GpuSlot(first + index, name, index) for index in range(self.gpus))
            found.append(NodeInventory(name, slots, self.memory, "logical", can_swap=self.can_swap))
        return found

    async def recover(self, known: Iterable[GangKey], listener: ExecutorListener) -> Collection[GangKey]:
        self._listener = listener
        wanted, found = set(known), set()
        for key in sorted({*wanted, *self.gangs}):
            if key not in wanted:
                self._past[key] = self.gangs.pop(key)
            elif key in self.gangs:
                found.add(key)
                if self.gangs[key].started:
                    listener.gang_started(key)
            elif key in self._past and (ended := self._past[key].ended) is not None:
                found.add(key)
                listener.gang_ended(ended)
        return found

    def launch(self, launch: Launch) -> None:
        self.launched.append(launch)
        self.gangs[launch.key] = MemoryGang(launch, paused=launch.ahead)
        if self.automatic:
            asyncio.get_running_loop().call_soon(self._run, launch.key)

    def stop(self, key: GangKey, mode: StopMode) -> bool:
        self.stopped.append((key, mode))
        gang = self.gangs.get(key)
        if gang is not None and self.automatic:
            gang.stopping = True
            asyncio.get_running_loop().call_soon(self._obey_stop, key, mode)
        return gang is not None

    def pause(self, key: GangKey, *, swap: bool = False) -> None:
        if key in self.gangs:
            self.gangs[key].swapped = swap and self.can_swap
        self._ask_to_switch(key, paused=True)

    def resume(self, key: GangKey) -> None:
        self._ask_to_switch(key, paused=False)

    def _ask_to_switch(self, key: GangKey, *, paused: bool) -> None:
        gang = self.gangs.get(key)
        if gang is None:
            return
        if gang.paused is not paused:
            gang.paused = paused
            self.switched.append((key, paused))
        if self.automatic:
            asyncio.get_running_loop().call_soon(self.switch, key)

    def retune(self, key: GangKey, accumulation: int) -> None:
        gang = self.gangs.get(key)
        if gang is not None and self.automatic:
            gang.report = Report(attempt=key[1], accumulation=accumulation)

    def checkpoint(self, key: GangKey) -> None:
        gang = self.gangs.get(key)
        if gang is None:
            return
        self.checkpoints.append(key)
        if self.automatic:
            saved = gang.program.get("checkpoint")
            before = gang.report or Report(attempt=key[1])
            gang.report = replace(before, checkpoint=-1 if saved is None else int(saved))

    def present(self) -> Mapping[GangKey, tuple[GpuId, ...]]:
        return {key: gang.gpus for key, gang in self.gangs.items()}

    def report(self, key: GangKey) -> Report | None:
        gang = self.gangs.get(key)
        return gang.report if gang is not None else None

    def ranks(self, key: GangKey) -> list[dict[str, Any]]:
        gang = self._find(key)
        if gang is None:
            return []
        code = gang.ended.exit_code if gang.ended else None
        row = {"pid": None, "started": None, "exit_code": code, "ended": None}
        return [{"rank": rank, **row} for rank in range(len(gang.launch.gpus))]

    def exit_code(self, key: GangKey) -> int | None:
        gang = self._past.get(key)
        return gang.ended.exit_code if gang is not None and gang.ended is not None else None

    async def read_log(
        self, key: GangKey, rank: int, stream: str, *, offset: int = 0, limit: int, tail: int | None = None
    ) -> LogChunk:
        gang = self._find(key)
        text = gang.output if gang is not None and stream == "stdout" else b""
        start = min(offset, len(text))
        if tail is not None:
            kept = b"".join(text.splitlines(keepends=True)[-tail:]) if tail else b""
            start = max(start, len(text) - len(kept))
        data = text[start : start + limit]
        return LogChunk(data, start + len(data), start + len(data) >= len(text))

    async def close(self) -> None:
        self._listener = None

    # ---- gangs that act by themselves -------------------------------------------------------------------------------

    def _run(self, key: GangKey) -> None:
        gang = self.gangs.get(key)
        if gang is None or gang.stopping or self._listener is None:
            return
        plan = gang.program
        gang.output = plan.get("output", "").encode()
        gang.report = Report(attempt=key[1], accumulation=gang.launch.accumulation)
        self.start(key)
        code = plan["exit_code"]
        if code is not None:
            outcome = GangOutcome.FAILED if code else GangOutcome.FINISHED
            self.end(key, outcome, f"worker 0 ended with exit code {code}" if code else "", exit_code=code)

    def _obey_stop(self, key: GangKey, mode: StopMode) -> None:
        gang = self.gangs.get(key)
        if gang is None:
            return
        saved = gang.program.get("checkpoint") if mode is StopMode.SAVE and gang.started else None
        outcome = GangOutcome.STOPPED if gang.started else GangOutcome.NEVER_STARTED
        self.end(key, outcome, checkpoint=None if saved is None else float(saved))

    def _find(self, key: GangKey) -> MemoryGang | None:
        return self.gangs.get(key) or self._past.get(key)
