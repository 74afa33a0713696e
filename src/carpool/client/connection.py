"""A connection to a running service, for scripts and notebooks: submit jobs, list them, follow them.

`connect` finds the service as the command line does. Fields of a job have the names and units of job files. Every
method may be called from any thread.
"""

import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from carpool.client.notebook import job_html, show_live
from carpool.errors import InputError
from carpool.job_schema import request_of
from carpool.live.http.client import Client, job_id, job_path
from carpool.live.shell import run_as_here

ENDED = ("finished", "failed", "cancelled")
FOLLOW_S = 0.5
"""Seconds between two looks at a log that is followed."""
Stream = Literal["stdout", "stderr"]
Row = dict[str, Any]


def connect(url: str | None = None, token: str | None = None, home: str | Path | None = None) -> "Connection":
    """Connect to a service.

    Without an address the service is found as by the command line: `CARPOOL_URL` and `CARPOOL_TOKEN`, else the home
    directory.
    """
    if url is not None and token is None:
        token = os.environ.get("CARPOOL_TOKEN")
        if token is None:
            raise InputError("token: is missing; give the one that the administrator of the service gave you")
    connection = Connection(url, token, home)
    connection.request("GET", "/v1/me")  # raises now, rather than later, if no service answers
    return connection


class JobTable(list[Row]):
    """Rows of jobs, as `carpool jobs --json` prints them."""

    def frame(self) -> Any:
        """Return the rows as a pandas DataFrame, with moments as dates and the id of a job as its index."""
        import pandas  # type: ignore[import-untyped]

        frame = pandas.DataFrame(self)
        for name in ("submitted", "started", "finished"):
            if name in frame:
                frame[name] = pandas.to_datetime(frame[name], unit="s", utc=True)
        return frame.set_index("job") if "job" in frame else frame


class Connection:
    """A service and the user whose token was given."""

    def __init__(self, url: str | None, token: str | None, home: str | Path | None) -> None:
        self._address = (url, token, home)
        self._local = threading.local()  # an HTTP connection serves one thread at a time

    @property
    def _client(self) -> Client:
        client: Client | None = getattr(self._local, "client", None)
        if client is None:
            client = self._local.client = self._new_client()
        return client

    def _new_client(self) -> Client:
        url, token, home = self._address
        return Client(url, token or "") if url is not None else Client.find(home)

    @property
    def url(self) -> str:
        """Address of the service."""
        return self._client.url

    def request(self, method: str, path: str, data: Any = None, **query: Any) -> Any:
        """Send a request to the HTTP API and return its answer; raise `carpool.errors.InputError` for a refusal."""
        if method == "GET":
            return self._client.get(path, **query)
        if method == "DELETE":
            return self._client.delete(path)
        return self._client.put(path, data) if method == "PUT" else self._client.post(path, data)

    # ---- jobs ------------------------------------------------------------------------------------------------------

    def submit(self, command: str | Sequence[str], *, clean_env: bool = False, **fields: Any) -> "SubmittedJob":
        """Submit one job and return it. `fields` are those of a job file, such as `gpus=2, duration="45m"`.

        The job runs as it would here: with the program that is found here, and with the variables that `carpool
        submit` sends; `clean_env` sends none.
        """
        if "array" in fields or "sweep" in fields:
            raise InputError("array: makes several jobs; call submit_many")
        return self.submit_many(command, clean_env=clean_env, **fields)[0]

    def submit_many(
        self, command: str | Sequence[str], *, clean_env: bool = False, **fields: Any
    ) -> list["SubmittedJob"]:
        """Submit the jobs of an `array` or a `sweep`, all or none, and return them."""
        request = _request(command, fields)
        if not clean_env:
            run_as_here(request)
        answer = self.request("POST", "/v1/jobs", request)
        return [SubmittedJob(self, job) for job in answer["jobs"]]

    def job(self, job: str | int) -> "SubmittedJob":
        """Return a job by its id."""
        found = SubmittedJob(self, job_id(str(job)))
        found.refresh()
        return found

    def jobs(
        self,
        all: bool = False,
        *,
        mine: bool = False,
        status: str | Iterable[str] | None = None,
        name: str | None = None,
    ) -> JobTable:
        """Return the rows of the jobs that have not ended, or of all. In `name`, `*` stands for any text."""
        rows: Iterable[Row] = self._client.jobs(all)
        if mine:
            me = self.request("GET", "/v1/me")["name"]
            rows = [row for row in rows if row["user"] == me]
        if status is not None:
            wanted = {status} if isinstance(status, str) else set(status)
            rows = [row for row in rows if row["status"] in wanted]
        return JobTable(row for row in rows if name is None or fnmatchcase(row["name"], name))

    def usage(self, by: str = "user", since: str | None = None, until: str | None = None) -> Row:
        """Return what jobs used of the GPUs: what `carpool usage --json` prints. Days are dates, such as 2026-03-01."""
        return dict(self.request("GET", "/v1/usage", by=by, since=since, until=until))

    def wait(self, jobs: Iterable["SubmittedJob"], timeout: float | None = None) -> None:
        """Wait until all jobs have ended; raise `TimeoutError` if they have not in time."""
        until = None if timeout is None else time.monotonic() + timeout
        for job in jobs:
            job.wait(None if until is None else max(0.0, until - time.monotonic()))

    def events(self, after: int | None = None, job: str | int | None = None) -> "EventIterator":
        """Return an iterator over what happens, from now on or after the event with the number `after`.

        Each event is a row with `seq`, `kind`, `at` and what belongs to its kind; `Gap` says that events were missed.
        It goes on when the service is started again. `job`: only events of this job.
        """
        return EventIterator(self._new_client(), after, None if job is None else job_id(str(job)))

    def wait_for(self, job: str, seconds: float) -> None:
        """Wait for the end of a job or for this many seconds, also if the service is started again meanwhile."""
        client = self._client
        client.patiently(lambda: client.get(f"{job_path(job)}/wait", timeout_s=seconds))

    def log(self, job: str, rank: int = 0, stream: Stream = "stdout") -> Iterator[tuple[bytes, bool]]:
        """Yield pieces of a worker's output, and whether it is complete."""
        for data, _, ended in self._client.log(job, rank=rank, stream=stream):
            yield data, ended
            if ended:
                return


class EventIterator(Iterator[Row]):
    """Events of a service, as they happen. `close` ends the iteration, also from another thread."""

    def __init__(self, client: Client, after: int | None, job: str | None) -> None:
        self._client = client
        self._messages = client.events(after, job)
        self._closed = False
        self.last = next(self._messages).number  # opens the stream: nothing that happens from now on is missed
        """Number of the latest event, after which another iterator can go on."""

    def __next__(self) -> Row:
        while not self._closed:
            message = next(self._messages)
            self.last = message.number
            if message.kind not in ("", "Hello"):
                row: Row = message.data
                return row
        raise StopIteration

    def close(self) -> None:
        """Close the connection."""
        self._closed = True
        self._client.abort()

    def __enter__(self) -> "EventIterator":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class SubmittedJob:
    """A job of a service. Its attributes are as of the last look, which `refresh` repeats."""

    def __init__(self, connection: Connection, job: str) -> None:
        self.connection = connection
        self.id = job
        self._row: Row | None = None

    def refresh(self) -> Row:
        """Look at the job, and return its row: what `carpool show --json` prints."""
        self._row = self.connection.request("GET", job_path(self.id))
        return self._row

    @property
    def row(self) -> Row:
        """All that is known of the job; up to date unless it has ended."""
        row = self._row
        return row if row is not None and row["status"] in ENDED else self.refresh()

    @property
    def status(self) -> str:
        return str(self.row["status"])

    @property
    def exit_code(self) -> int | None:
        """Exit code of the job; None while it runs."""
        code: int | None = self.row["exit_code"]
        return code

    def wait(self, timeout: float | None = None) -> str:
        """Wait until the job has ended and return its status; raise `TimeoutError` if it has not in time."""
        until = None if timeout is None else time.monotonic() + timeout
        while self.status not in ENDED:
            left = 30.0 if until is None else min(30.0, until - time.monotonic())
            if left <= 0.0:
                raise TimeoutError(f"job {self.id} is {self.status} after {timeout} s")
            self.connection.wait_for(self.id, left)
        return self.status

    def logs(self, rank: int = 0, stream: Stream = "stdout") -> str:
        """Return what a worker has written so far."""
        return b"".join(data for data, _ in _until_quiet(self.connection.log(self.id, rank, stream))).decode(
            errors="replace"
        )

    def follow(self, rank: int = 0, stream: Stream = "stdout") -> Iterator[str]:
        """Yield the lines of a worker as it writes them, until the job has ended."""
        rest = b""
        for data, ended in self.connection.log(self.id, rank, stream):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                yield line.decode(errors="replace")
            if not data and not ended:
                time.sleep(FOLLOW_S)
        if rest:
            yield rest.decode(errors="replace")

    def explain(self) -> str:
        """Return why the job waits or runs where it does, in sentences."""
        return "\n".join(self.connection.request("GET", f"{job_path(self.id)}/explain")["sentences"])

    def cancel(self) -> None:
        """Stop all workers for good."""
        self._change("cancel")

    def hold(self) -> None:
        """Keep the job from starting until `release`."""
        self._change("hold")

    def release(self) -> None:
        self._change("release")

    def pause(self) -> None:
        """Let the job stand still on its GPUs until `resume`."""
        self._change("pause")

    def resume(self) -> None:
        self._change("resume")

    def set_priority(self, priority: int) -> None:
        self.connection.request("PUT", f"{job_path(self.id)}/priority", {"priority": priority})

    def _change(self, action: str) -> None:
        self._row = None
        self.connection.request("POST", f"{job_path(self.id)}/{action}")

    def __repr__(self) -> str:
        return f"<job {self.id}>"

    def _repr_html_(self) -> str:
        """Return the job as a notebook shows it."""
        return job_html(self.row)

    def _ipython_display_(self) -> None:
        """Show the job in a notebook, live: the text follows the job until it has ended."""
        show_live(self)


def _request(command: str | Sequence[str], fields: Mapping[str, Any]) -> Row:
    given = {"directory": str(Path.cwd()), **fields, "command": command if isinstance(command, str) else list(command)}
    if given.pop("snapshot", False):
        raise InputError("snapshot: is made by `carpool submit --snapshot` only; leave it out")
    return request_of(given)


def _until_quiet(log: Iterator[tuple[bytes, bool]]) -> Iterator[tuple[bytes, bool]]:
    for data, ended in log:
        if not data:
            return
        yield data, ended
