"""When an agent exchanges: one exchange is always at the service, which holds it, and another one goes with news."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

PAUSE_S = 0.02
"""Least number of seconds between two exchanges, so that several things that happen together share one."""
IN_FLIGHT = 2
"""Number of exchanges at a time: one that the service holds, and one with news."""


async def exchange_for_ever(exchange: Callable[[], Awaitable[None]], news: asyncio.Event) -> None:
    """Call `exchange` whenever none is under way, and at once when `news` is set.

    The service answers an exchange that a later one has overtaken. That answer is no reason for another exchange,
    because the later one is under way: otherwise each would overtake the one before it for ever.
    """
    flying: set[asyncio.Future[None]] = set()
    try:
        while True:
            news.clear()
            flying.add(asyncio.ensure_future(exchange()))
            await asyncio.sleep(PAUSE_S)
            flying = {one for one in flying if not one.done()}
            while flying and not (news.is_set() and len(flying) < IN_FLIGHT):
                await _first_of(flying, None if len(flying) >= IN_FLIGHT else news)
                flying = {one for one in flying if not one.done()}
    finally:
        for one in flying:
            one.cancel()
        await asyncio.gather(*flying, return_exceptions=True)


async def _first_of(flying: set[asyncio.Future[None]], news: asyncio.Event | None) -> None:
    """Wait until an exchange is over, or there is news."""
    waits: set[asyncio.Future[Any]] = set(flying)
    hearing = asyncio.ensure_future(news.wait()) if news is not None else None
    if hearing is not None:
        waits.add(hearing)
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if hearing is not None:
            hearing.cancel()
