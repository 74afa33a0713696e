"""Emulated nodes as a ground: a supervisor and an agent on this machine for each, which the service starts itself.

They join, are leased and are given up as those of Slurm are, so that jobs pass through the same code as on a real
cluster. A file for each pilot says which process it is. Agents and jobs outlive the service, and the next one finds
them; where no service comes for `GONE_S`, they end. A service that ends while no job runs ends its agents, too.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from carpool.errors import InputError
from carpool.live.grounds.base import JoinTicket, Pilot, PilotStatus
from carpool.live.grounds.tickets import remove_ticket, write_ticket
from carpool.live.home import read_json, write_private
from carpool.live.rank import boot_id, start_ticks

GROUND = "emulated"
ENDING = ".process"
"""Ending of the files that say which process a pilot is."""
GONE_S = 600.0
"""Seconds without a service after which an agent and its jobs end."""


@dataclass(frozen=True, slots=True)
class PilotProcess:
    """The supervisor of one pilot."""

    node: str
    pid: int
    start: int
    boot: str

    @property
    def alive(self) -> bool:
        return self.boot == boot_id() and start_ticks(self.pid) == self.start

    def signal(self, number: int) -> None:
        with contextlib.suppress(OSError):
            descriptor = os.pidfd_open(self.pid)
            try:
                if self.alive:  # checked after opening: the descriptor stands for the process that was checked
                    signal.pidfd_send_signal(descriptor, number)
            finally:
                os.close(descriptor)


class EmulatedGround:
    """Starts and ends the agents of emulated nodes."""

    name = GROUND

    def __init__(self, nodes: int, folder: Path, address: Path, is_idle: Callable[[], bool]) -> None:
        """`folder`: for tickets, records and output of pilots. `address`: file that says which process the service is.
        `is_idle`: whether no job runs."""
        self._nodes, self._folder, self._address, self._is_idle = nodes, folder, address, is_idle
        self._children: list[subprocess.Popen[bytes]] = []
        self._told: set[str] = set()
        """Pilots that were asked to leave."""

    async def submit(self, ticket: JoinTicket) -> None:
        await asyncio.to_thread(self._start, ticket)

    def _start(self, ticket: JoinTicket) -> None:
        taken = {process.node for process in self._processes().values() if process.alive}
        node = next((name for name in (f"node{n}" for n in range(self._nodes)) if name not in taken), None)
        if node is None:
            raise InputError(f"all {self._nodes} emulated nodes have an agent")
        path, record = write_ticket(self._folder, ticket), self._folder / f"{ticket.pilot}{ENDING}"
        command = [sys.executable, "-m", "carpool.live.agent.pilot", GROUND, str(path), node, str(record)]
        with open(self._folder / f"{ticket.pilot}.log", "ab") as output:
            child = subprocess.Popen(
                [*command, str(self._address)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                cwd=os.sep,
            )
        self._children.append(child)
        data = {"node": node, "pid": child.pid, "start": start_ticks(child.pid) or 0, "boot": boot_id()}
        write_private(record, json.dumps(data))

    async def pilots(self) -> list[Pilot]:
        self._children = [child for child in self._children if child.poll() is None]
        found = []
        for name, process in (await asyncio.to_thread(self._processes)).items():
            status = PilotStatus.RUNNING if process.alive else PilotStatus.ENDED
            found.append(Pilot(name, process.node, status, handle=str(process.pid), why=status.value))
            if not process.alive:
                (self._folder / f"{name}{ENDING}").unlink(missing_ok=True)
        return found

    def _processes(self) -> dict[str, PilotProcess]:
        found = {}
        for path in self._folder.glob(f"*{ENDING}"):
            data = read_json(path)
            with contextlib.suppress(KeyError, TypeError, ValueError):
                process = PilotProcess(str(data["node"]), int(data["pid"]), int(data["start"]), str(data["boot"]))
                found[path.name.removesuffix(ENDING)] = process
        return found

    async def give_up(self, pilot: Pilot) -> None:
        process = self._processes().get(pilot.id)
        if process is not None:
            process.signal(signal.SIGKILL if pilot.id in self._told else signal.SIGTERM)
            self._told.add(pilot.id)

    async def close(self) -> None:
        """End the agents if no job would be lost with them."""
        if not self._is_idle():
            return
        for name, process in self._processes().items():
            process.signal(signal.SIGKILL)  # the agent dies with its supervisor
            (self._folder / f"{name}{ENDING}").unlink(missing_ok=True)
            remove_ticket(self._folder, name)


class EmulatedWitness:
    """Says whether the service still wants a pilot: its record is there, and a service was there not long ago."""

    def __init__(self, record: str, address: str) -> None:
        self._record, self._address = Path(record), Path(address)
        self._gone_since: float | None = None

    def wanted(self, timeout_s: float) -> bool | None:
        if not self._record.exists():
            return False
        data: Any = read_json(self._address)
        pid = data.get("pid") if isinstance(data, dict) else None
        if isinstance(pid, int) and start_ticks(pid) is not None:
            self._gone_since = None
            return True
        now = time.monotonic()
        self._gone_since = now if self._gone_since is None else self._gone_since
        return now - self._gone_since < GONE_S
