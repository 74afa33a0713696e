"""Renewing the lead in a thread of its own, while a service has nothing to write or is busy.

A service that reads a long journal, or weighs many jobs, keeps its event loop busy for longer than a lease. It must not
lose the lead because of that. A service whose event loop is stuck gives the lead up.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable

from sqlalchemy.exc import SQLAlchemyError

from carpool.live.clock import since_boot
from carpool.live.errors import Deposed
from carpool.live.journal import leadership

STUCK_S = 300.0
"""Seconds for which the event loop may stand still: longer than any start was seen to take."""


class LeadKeeper:
    """Renews the lead until it is stopped or another service leads."""

    def __init__(self, lease: leadership.LeaderLease, renew: Callable[[], None]) -> None:
        """`renew`: renews the lead and blocks meanwhile."""
        self._lease, self._renew = lease, renew
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="keeping the lead", daemon=True)
        self._turned = 0.0
        """When the event loop turned last."""
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._turned = loop, since_boot()
        self._thread.start()

    def stop(self) -> None:
        """Renew nothing more; blocks until a renewal that has begun is over."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(leadership.RENEW_S):
            self._on_loop(self._turn)
            if self._lease.age_s < leadership.RENEW_S or since_boot() - self._turned > STUCK_S:
                continue
            try:
                self._renew()
            except Deposed:
                self._on_loop(self._lease.lost.set)
                return
            except (SQLAlchemyError, OSError):  # whatever is written next says so
                continue

    def _turn(self) -> None:
        self._turned = since_boot()

    def _on_loop(self, function: Callable[[], None]) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function)
