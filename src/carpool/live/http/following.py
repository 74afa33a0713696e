"""Answers that take long: they end when their token is revoked, also while they have nothing to say.

`event_routes.py` and `terminal_routes.py` pass their streams through `while_valid`.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

from carpool.live.http.api import ApiContext
from carpool.live.http.auth import Principal

Part = TypeVar("Part")


def is_valid(context: ApiContext, who: Principal) -> bool:
    """Return whether the token is still valid and the service leads."""
    return context.keyring.accepts(who) and context.leads()


async def while_valid(
    context: ApiContext, who: Principal, parts: AsyncGenerator[Part, None]
) -> AsyncGenerator[Part, None]:
    """Yield the parts of a stream as long as it may go on, and close it at the end."""
    async with aclosing(parts):
        while is_valid(context, who):
            try:
                async with context.keyring.until_revoked(who):
                    part = await anext(parts)
            except StopAsyncIteration:
                return
            except TimeoutError:
                if not is_valid(context, who):
                    return
                raise
            if is_valid(context, who):
                yield part
