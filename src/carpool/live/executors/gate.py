"""Where the part of a gang over several nodes waits until all parts are ready. Used by local executor and agent.

The local executor prepares the part and waits here. The agent tells the service that it is ready, and opens the gate
with the variables by which the workers of all nodes find each other.
"""

import asyncio
from collections.abc import Callable, Mapping

from carpool.live.executors.base import GangKey


class PartGate:
    """The parts that are ready and wait."""

    def __init__(self) -> None:
        self.ports: dict[GangKey, int] = {}
        """Parts that wait, with the port that each offers for all workers to meet."""
        self.changed: Callable[[], None] = lambda: None
        """Called when a part begins to wait."""
        self._waiting: dict[GangKey, asyncio.Future[Mapping[str, str] | None]] = {}

    async def wait(self, key: GangKey, port: int) -> Mapping[str, str] | None:
        """Return the variables for the workers once the gate opens; None: the part must not go."""
        self._waiting[key] = asyncio.get_running_loop().create_future()
        self.ports[key] = port
        self.changed()
        try:
            return await self._waiting[key]
        finally:
            del self._waiting[key], self.ports[key]

    def open(self, key: GangKey, variables: Mapping[str, str] | None) -> None:
        """Let a part go, or with None give it up. Does nothing for one that does not wait."""
        waiting = self._waiting.get(key)
        if waiting is not None and not waiting.done():
            waiting.set_result(variables)
