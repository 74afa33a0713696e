"""How many files the service may have open, and what is said when there are no more.

Connections are files. `carpool serve` raises its own limit as far as the system allows, gives connections only what the
rest of the service leaves (`connections.Rooms`), and lets asyncio say in one line that a connection could not be
accepted: by itself it writes a traceback for each of a thousand tries a second.
"""

import asyncio
import contextlib
import logging
import resource
import time
from typing import Any

WANTED = 16_384
"""Number of open files that is enough for all rooms of connections."""
RESERVED = 128
"""Number of files that are left to the journal, to logs, and to what starts and stops jobs."""
AGAIN_S = 60.0
"""Seconds after which the same is said again."""
NOT_ACCEPTED = "socket.accept() out of system resource"
"""How asyncio begins what it says about a connection that it cannot accept."""
log = logging.getLogger("carpool.api")


def raise_limit() -> int:
    """Raise this process's limit of open files as far as it is useful and allowed; return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return WANTED if soft == resource.RLIM_INFINITY else soft
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


class AcceptFaults:
    """Says once in a while that connections cannot be accepted. Everything else goes the usual way."""

    def __init__(self) -> None:
        self._said = -AGAIN_S

    def handle(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle what asyncio reports; see `loop.set_exception_handler`."""
        if not str(context.get("message", "")).startswith(NOT_ACCEPTED):
            loop.default_exception_handler(context)
        elif time.monotonic() - self._said >= AGAIN_S:
            self._said = time.monotonic()
            why = getattr(context.get("exception"), "strerror", None) or "no more resources"
            log.error("new connections wait (%s); raise the limit of open files (`ulimit -n`)", why)
