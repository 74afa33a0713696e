"""The same client for programs that use asyncio: every request runs in a thread and blocks no other task."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from carpool.client.connection import Connection, JobTable, Row, Stream, SubmittedJob, connect


async def connect_async(
    url: str | None = None, token: str | None = None, home: str | Path | None = None
) -> "AsyncConnection":
    """Connect to a service, as `connect` does."""
    return AsyncConnection(await asyncio.to_thread(connect, url, token, home))


class AsyncConnection:
    """A service, for asyncio. `connection` has the methods that are not here."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    async def submit(self, command: str | Sequence[str], **fields: Any) -> "AsyncJob":
        """Submit one job and return it."""
        return AsyncJob(await asyncio.to_thread(self.connection.submit, command, **fields))

    async def submit_many(self, command: str | Sequence[str], **fields: Any) -> list["AsyncJob"]:
        """Submit the jobs of an array or a sweep, and return them."""
        return [AsyncJob(job) for job in await asyncio.to_thread(self.connection.submit_many, command, **fields)]

    async def job(self, job: str | int) -> "AsyncJob":
        """Return a job by its id."""
        return AsyncJob(await asyncio.to_thread(self.connection.job, job))

    async def jobs(self, all: bool = False, **filters: Any) -> JobTable:
        """Return rows of jobs."""
        return await asyncio.to_thread(self.connection.jobs, all, **filters)

    async def events(self, after: int | None = None, job: str | int | None = None) -> AsyncIterator[Row]:
        """Yield what happens, as `Connection.events` does."""
        with await asyncio.to_thread(self.connection.events, after, job) as events:
            while (event := await asyncio.to_thread(next, events, None)) is not None:
                yield event


class AsyncJob:
    """A job, for asyncio. `job` is the same one with methods that block."""

    def __init__(self, job: SubmittedJob) -> None:
        self.job = job

    @property
    def id(self) -> str:
        return self.job.id

    async def status(self) -> str:
        """Return the status of the job now."""
        return str((await asyncio.to_thread(self.job.refresh))["status"])

    async def wait(self, timeout: float | None = None) -> str:
        """Wait until the job has ended and return its status."""
        return await asyncio.to_thread(self.job.wait, timeout)

    async def logs(self, rank: int = 0, stream: Stream = "stdout") -> str:
        """Return what a worker has written so far."""
        return await asyncio.to_thread(self.job.logs, rank, stream)

    async def follow(self, rank: int = 0, stream: Stream = "stdout") -> AsyncIterator[str]:
        """Yield the lines of a worker as it writes them, until the job has ended."""
        lines = self.job.follow(rank, stream)
        while (line := await asyncio.to_thread(next, lines, None)) is not None:
            yield line

    async def cancel(self) -> None:
        """Stop all workers for good."""
        await asyncio.to_thread(self.job.cancel)
