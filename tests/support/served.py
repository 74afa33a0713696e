"""A real service for the tests of the commands and the API."""

import contextlib
import json
import signal
import subprocess
import time
from pathlib import Path

from carpool.live.home import Home
from carpool.live.http.client import Client
from tests.support.command_line import COMMAND, Said, call, environment, process

START_S = 60.0


class Served:
    """A running `carpool serve` and its client."""

    def __init__(self, home: Path, *options: str) -> None:
        self.home = home
        self.options = options
        self.log = home.parent / f"{home.name}.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> "Served":
        Home(self.home).remove_address()
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*COMMAND, "serve", "--home", str(self.home), "--port", "0", *self.options],
                stdout=log,
                stderr=log,
                env=environment(),
            )
        until = time.monotonic() + START_S
        while time.monotonic() < until and self.process.poll() is None:
            if Home(self.home).read_address():
                with contextlib.suppress(ValueError):
                    self.client().get("/v1/me")
                    return self
            time.sleep(0.05)
        raise AssertionError(f"no service: {self.log.read_text()}")

    def stop(self) -> int:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)

    def end(self) -> None:
        """Leave nothing running: neither the service nor any of its jobs."""
        with contextlib.suppress(ValueError, TypeError):  # no service runs
            client = self.client()
            for row in client.jobs():
                with contextlib.suppress(ValueError):
                    client.post(f"/v1/jobs/{row['job']}/cancel")
            until = time.monotonic() + 20.0
            while client.jobs() and time.monotonic() < until:
                time.sleep(0.1)
        self.stop()

    @property
    def url(self) -> str:
        return str(Home(self.home).read_address()["url"])

    @property
    def token(self) -> str:
        return (self.home / "admin.token").read_text().strip()

    def client(self, token: str | None = None) -> Client:
        return Client(self.url, token or self.token)

    def call(self, *arguments: object, token: str | None = None, cwd: Path | None = None, **more: str | None) -> Said:
        """Call a command as `main` would, without the cost of a process."""
        env = {"CARPOOL_HOME": str(self.home), "CARPOOL_TOKEN": token, **more}
        with contextlib.chdir(cwd or "/"):
            return call(*arguments, env=env)

    def run(self, *arguments: object, token: str | None = None, **more: str) -> Said:
        """Run the command as a process."""
        if token:
            more["CARPOOL_TOKEN"] = token
        return process(*arguments, CARPOOL_HOME=str(self.home), **more)

    def json(self, *arguments: object, **more: str):
        said = self.call(*arguments, "--json", **more)
        assert said.code == 0, said.err
        return json.loads(said.out)

    def submit(self, *command: str, token: str | None = None, **fields) -> str:
        """Submit through the API, which is quicker than a process."""
        request = {"command": list(command or ("sleep", "60")), "directory": "/", "grace_s": 1.0, **fields}
        return self.client(token).post("/v1/jobs", request)["job"]

    def until_logged(self, job: str, text: bytes) -> None:
        """Wait until a job has written a text to its standard output, which it does a moment after it started."""
        until = time.monotonic() + 30.0
        while text not in self.client().raw(f"/v1/jobs/{job}/logs")[0]:
            assert time.monotonic() < until, f"job {job} did not print {text!r}"
            time.sleep(0.05)

    def until(self, job: str, *states: str) -> dict:
        until = time.monotonic() + 30.0
        while time.monotonic() < until:
            row = self.client().get(f"/v1/jobs/{job}")
            if row["status"] in states:
                return row
            time.sleep(0.05)
        raise AssertionError(f"job {job} is {row['status']}: {row['reason']}")
