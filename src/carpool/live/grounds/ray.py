"""Ray as a ground: one detached actor a node, on a Ray cluster that exists.

Ray decides which machines there are, and starts an actor again that died. The service talks to Ray through a process of
its own (`ray_helper.py`), because Ray ends a process whose cluster is gone. A request that is not answered in time ends
that process, and the next request starts another.
"""

import asyncio
import contextlib
import json
import sys
from importlib.util import find_spec
from typing import Any

from carpool.errors import InputError
from carpool.live.grounds.base import JoinTicket, Pilot, PilotStatus

CALL_S, START_S = 20.0, 60.0
"""Seconds after which a request counts as not answered, and the same for the first connection."""


def check_installed() -> None:
    if find_spec("ray") is None:
        raise InputError("--on ray: Ray is not installed: pip install 'carpool[ray]'")


class RayGround:
    """Starts actors and asks about them."""

    name = "ray"

    def __init__(self, address: str, service: str, *, any_node: bool) -> None:
        """`any_node`: use nodes without GPUs too, because GPUs are logical."""
        check_installed()
        self._address, self._service, self._any_node = address, service, any_node
        self._helper: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def submit(self, ticket: JoinTicket) -> None:
        node = await self._call(call="submit", ticket=ticket.plain(), any_node=self._any_node)
        if not node:
            kind = "alive node" if self._any_node else "alive node with GPUs"
            raise InputError(f"Ray has no other {kind}; start more of them (`ray start`), or ask for fewer --nodes")

    async def pilots(self) -> list[Pilot]:
        rows = await self._call(call="pilots")
        return [Pilot(row["id"], row["node"], PilotStatus(row["state"]), handle=row["node_id"]) for row in rows]

    async def give_up(self, pilot: Pilot) -> None:
        await self._call(call="give_up", pilot=pilot.id)

    async def close(self) -> None:
        helper, self._helper = self._helper, None
        if helper is not None and helper.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                helper.kill()
            await helper.wait()

    async def _call(self, **request: Any) -> Any:
        async with self._turn:
            try:
                if self._helper is None or self._helper.returncode is not None:
                    await self._start()
                assert self._helper is not None
                assert self._helper.stdin is not None
                self._helper.stdin.write(json.dumps(request).encode() + b"\n")
                return await self._read(CALL_S)
            except (TimeoutError, OSError) as error:
                await self.close()
                why = "no answer in time" if isinstance(error, TimeoutError) else str(error)
                raise InputError(f"Ray at {self._address}: {why}; check it with `ray status`") from None
            except asyncio.CancelledError:
                await self.close()  # its answer would be taken for another's
                raise

    async def _start(self) -> None:
        words = [sys.executable, "-m", "carpool.live.grounds.ray_helper", self._address, self._service]
        pipe, nothing = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL  # Ray reports every actor that died
        self._helper = await asyncio.create_subprocess_exec(
            *words, stdin=pipe, stdout=pipe, stderr=nothing, limit=1 << 24
        )
        await self._read(START_S)

    async def _read(self, seconds: float) -> Any:
        assert self._helper is not None
        assert self._helper.stdout is not None
        line = await asyncio.wait_for(self._helper.stdout.readline(), seconds)
        if not line:
            await self.close()
            raise InputError(f"Ray at {self._address}: the connection ended; check it with `ray status`")
        answer = json.loads(line)
        if "error" in answer:
            raise InputError(f"Ray at {self._address}: {' '.join(answer['error'].split())[:300]}")
        return answer["answer"]
