"""Looks at files that users name, such as the directory and the script of a job. Requests and queries call it.

A file system of a user may not answer: a mount of its own (FUSE), or a server that is away. Such looks have threads of
their own, and each user has few of them, so that everything else in the service and the jobs of other users go on.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

THREADS = 16
PER_USER = 2
"""Number of looks at a time for one user."""
_Result = TypeVar("_Result")


class UserFiles:
    """Threads that look at users' files."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, "user-files")
        self._turns: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(PER_USER))

    async def look(self, user: str, work: Callable[[], _Result]) -> _Result:
        """Return what `work` returns, which looks at files of a user and may block."""
        async with self._turns[user]:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
