"""Moving the device memory of a paused gang to main memory and back. Used by the local executor's `switching`.

`carpool.gpu.swap` does it, in a process of its own. Which processes were moved is written down first, because the
driver no longer lists a process that holds no memory.
"""

import asyncio
import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from carpool.gpu import nvml
from carpool.live.executors.gang import LocalGang
from carpool.live.executors.node import gang_of
from carpool.live.executors.processes import start_ticks
from carpool.live.home import read_json, write_private

SWAP_FILE = "swapped.json"
PATIENCE_S = 300.0
"""Seconds after which a move counts as failed: 100 GiB take about one minute."""
RETRY_S = 1.0
"""Seconds before a gang that cannot come back (others hold its memory) is tried again."""
MARGIN = 2 * 2**30
"""Main memory that must be left after a move, in bytes."""


class GangSwap:
    """Swaps gangs of one GPU."""

    def __init__(self, note: Callable[[LocalGang, str], None]) -> None:
        self._note = note

    async def out(self, gang: LocalGang) -> bool:
        """Move the memory of a gang to main memory; return False, with everything as before, where that fails."""
        held = await asyncio.to_thread(_held, gang)
        pids = sorted({*held, *swapped_pids(gang)})
        if not pids:  # it has not used its GPU so far
            return True
        if sum(held.values()) + MARGIN > _main_memory():
            self._note(gang, "cannot be swapped out: there is too little main memory")
            return False
        marks = [[pid, start_ticks(pid)] for pid in pids]
        write_private(gang.directory / SWAP_FILE, json.dumps(marks))
        error = await _move("out", pids)
        if error:
            (gang.directory / SWAP_FILE).unlink(missing_ok=True)
            self._note(gang, f"cannot be swapped out: {error}")
        return not error

    async def back(self, gang: LocalGang, wanted: Callable[[], bool]) -> None:
        """Move the memory of a gang back, however often it must be tried, as long as that is wanted."""
        said = False
        while (pids := swapped_pids(gang)) and wanted():
            error = await _move("in", pids)
            if not error:
                break
            if not said:
                self._note(gang, f"cannot come back from main memory now ({error}); it is tried again")
                said = True
            await asyncio.sleep(RETRY_S)
        with contextlib.suppress(OSError):
            (gang.directory / SWAP_FILE).unlink(missing_ok=True)


def swapped_pids(gang: LocalGang) -> list[int]:
    """Return the processes of a gang whose memory was moved and that still run."""
    found = read_json(gang.directory / SWAP_FILE)
    marks = [mark for mark in found if isinstance(mark, list) and len(mark) == 2] if isinstance(found, list) else []
    return [pid for pid, start in marks if type(pid) is int and start_ticks(pid) == start]


def command(direction: str, pids: Sequence[int]) -> list[str]:
    """Return the command that moves processes `out` or `in`."""
    return [sys.executable, "-m", "carpool.gpu.swap", direction, *map(str, pids)]


async def _move(direction: str, pids: Sequence[int]) -> str:
    """Move processes; return why that failed, or an empty text."""
    process = await asyncio.create_subprocess_exec(
        *command(direction, pids), stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    try:
        _, said = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    except TimeoutError:
        process.kill()
        return f"the driver did not answer within {PATIENCE_S:.0f} s"
    lines = said.decode(errors="replace").strip().splitlines()
    return "" if process.returncode == 0 else lines[-1] if lines else f"status {process.returncode}"


def _held(gang: LocalGang) -> dict[int, int]:
    """Return the processes of a gang that hold memory on its GPU, with the number of bytes. Blocks."""
    uses = [use for slot in gang.slots if slot.uuid for use in nvml.processes(slot.uuid)]
    return {use.pid: use.memory or 0 for use in uses if gang_of(use.pid) == gang.key}


def _main_memory() -> int:
    """Return the bytes of main memory that are available."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0
