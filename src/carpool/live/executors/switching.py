"""Pausing gangs of this machine and letting them go on. Used by the local executor.

The wrapper of each worker does it, on a request in a file, and answers in another. A gang of several workers that uses
the training library is first brought to a step boundary, through the channel, so that nothing is in flight between its
workers. While the service runs, it touches a file: a wrapper that sees no change for `pause_patience_s` lets its worker
go on, and the request is repeated when a service looks again.
"""

import asyncio
import contextlib
import json
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from carpool.live import worker_directory as files
from carpool.live.executors.base import ExecutorOptions
from carpool.live.executors.gang import LocalGang, LocalRank, read_object
from carpool.live.executors.swapping import GangSwap, command, swapped_pids
from carpool.live.home import write_private

FIRST_LOOK_S, LONGEST_LOOK_S = 0.002, 0.05
"""Seconds between two looks at the wrappers' answers: few at first, more while nothing happens."""
RETRY_S = 1.0
"""Seconds before another attempt to write a request that could not be written."""
BEATS = 5
"""Number of signs of life within the wrappers' patience."""
LONGEST_BEAT_S = 15.0


class GangSwitch:
    """Carries out pauses and resumes of gangs."""

    def __init__(self, options: ExecutorOptions, note: Callable[[LocalGang, str], None]) -> None:
        self.options = options
        self._note = note
        self._swap = GangSwap(note)
        self._alive = options.home.alive

    async def prove_life(self) -> None:
        """Touch, for ever, the file by which wrappers see that the service runs."""
        while True:
            if self.options.has_service():
                with contextlib.suppress(OSError):
                    self._alive.touch(mode=0o600)
            patience = min(self.options.pause_patience_s, self.options.gang_pause_s)
            await asyncio.sleep(min(LONGEST_BEAT_S, patience / BEATS))

    async def run(self, gang: LocalGang, mine: int) -> bool:
        """Carry out the request with this number; return False if the gang is stopped or a later request came."""
        if not all(rank.can_pause for rank in gang.ranks):
            self._note(gang, "its wrapper is of an earlier release and cannot pause it; it goes on")
            gang.switched = True
            return True
        if gang.paused and gang.swap and gang.world_size == 1:
            await self._swap_out(gang, mine)
        elif gang.paused and gang.agrees_on_steps:
            await self._reach_boundary(gang, mine)
        elif not gang.paused:
            control = gang.control
            resumed = control.resumed + 1
            gang.write_control(replace(control, sequence=control.sequence + 1, pause_s=0.0, resumed=resumed))
        if gang.switch != mine:
            return False
        gang.switched = await self._ask_wrappers(gang, mine, paused=bool(gang.paused))
        if gang.switched and not gang.paused:
            await self._swap.back(gang, lambda: gang.switch == mine and not gang.stop)
            gang.swapped = False
        return gang.switched and gang.switch == mine

    async def _swap_out(self, gang: LocalGang, mine: int) -> None:
        """Move the memory of a gang away. The driver can do that only with processes that run, so a gang that is paused
        already goes on until the driver holds it, some milliseconds later."""
        if any(_answer(rank).get("paused") for rank in gang.ranks):
            await self._ask_wrappers(gang, mine, paused=False)
        gang.swapped = await self._swap.out(gang)

    async def _ask_wrappers(self, gang: LocalGang, mine: int, *, paused: bool) -> bool:
        """Let the wrappers pause their workers or let them go on; return whether they have all done it."""
        sequence = await self._request(gang, mine, paused=paused)
        pause = FIRST_LOOK_S
        while gang.switch == mine and not gang.stop:
            if all(_has_answered(rank, sequence) for rank in gang.ranks):
                return True
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_LOOK_S)
        return False

    async def _reach_boundary(self, gang: LocalGang, mine: int) -> None:
        """Wait until all workers stand at the same step boundary. A worker that waited too long there has gone on, so
        the request is renewed."""
        while gang.switch == mine and not gang.stop:
            left = self.options.pause_patience_s
            control = replace(gang.control, sequence=gang.control.sequence + 1, pause_s=left)
            gang.write_control(control)
            while left > 0.0 and gang.switch == mine and not gang.stop:
                if all(rank.stands_at(control.sequence) for rank in gang.ranks):
                    return
                await asyncio.sleep(LONGEST_LOOK_S)
                left -= LONGEST_LOOK_S

    async def _request(self, gang: LocalGang, mine: int, *, paused: bool) -> int:
        """Write the request and wake the wrappers; return its number."""
        gang.pause_sequence += 1
        patience = self.options.pause_patience_s
        if gang.world_size > 1 and not gang.agrees_on_steps:  # its workers may wait for each other right now
            patience = min(patience, self.options.gang_pause_s)
        request: dict[str, Any] = {
            "sequence": gang.pause_sequence,
            "paused": paused,
            "patience_s": patience,
            "alive": str(self._alive),
        }
        if pids := swapped_pids(gang):
            request["swap_in"] = command("in", pids)
        while gang.switch == mine:
            try:
                for rank in gang.ranks:
                    write_private(rank.directory / files.PAUSE, json.dumps(request), sync=False)
                break
            except OSError as error:
                self._note(gang, f"cannot be {'paused' if paused else 'resumed'} now ({error}); it is tried again")
                await asyncio.sleep(RETRY_S)
        for rank in gang.ranks:
            if rank.identity is not None and not rank.gone:
                rank.identity.signal(signal.SIGUSR1)
        return gang.pause_sequence


def went_on(gang: LocalGang) -> bool:
    """Return whether a worker of a paused gang goes on, because its wrapper saw no service for too long."""
    return any(_answer(rank).get("let_go") for rank in gang.ranks)


def _has_answered(rank: LocalRank, sequence: int) -> bool:
    answered = _answer(rank).get("sequence")
    return rank.gone or (isinstance(answered, int) and answered >= sequence)


def _answer(rank: LocalRank) -> dict[str, Any]:
    return read_object(rank.directory / files.PAUSED)
