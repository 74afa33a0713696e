"""A real service and its users, seen from outside only: command line, HTTP, files, signals.

`World` starts `carpool serve` as root, or as a plain user to whom root drops its rights. As root, the two users `ann`
and `bob` have uids of their own; plain uids without a login do, so that nothing of the machine is changed. Nothing of
Carpool is imported here.
"""

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
UIDS = {"ann": 7_000_301, "bob": 7_000_302}
PLAIN_UID = 7_000_300
ENDED = ("finished", "failed", "cancelled")
PATIENCE_S = 60.0
"""Seconds to wait for what must come; the machine may be busy."""


class Broken(AssertionError):
    """Something that has to hold did not."""


def hold(condition: object, what: str) -> None:
    """Say what must hold."""
    if not condition:
        raise Broken(what)


class Answer:
    """An answer of the HTTP API."""

    def __init__(self, status: int, body: bytes) -> None:
        self.status, self.body = status, body

    @property
    def data(self) -> Any:
        return json.loads(self.body)

    @property
    def refused(self) -> bool:
        """Whether it is a refusal in one line."""
        if not 400 <= self.status < 500:
            return False
        try:
            text = self.data["error"]
        except (ValueError, KeyError, TypeError):  # the HTTP server itself refuses what is no request
            text = self.body.decode("latin-1")
        return len(text.strip().splitlines()) <= 1 and "Traceback" not in text


class World:
    """A home, its service and its users."""

    def __init__(self, root: bool, *options: str) -> None:
        """`root`: serve as root with two users; otherwise as a plain user."""
        self.root, self.options = root, options
        self.folder = Path(tempfile.mkdtemp(prefix="carpool-attack-"))
        self.folder.chmod(0o755)
        self.home, self.log, self.out = self.folder / "home", self.folder / "serve.log", self.folder / "out"
        self.out.mkdir()
        self.out.chmod(0o1777)
        self.service: subprocess.Popen[bytes] | None = None
        self.tokens: dict[str, str] = {}
        self.prefix: list[str] = []
        if not root and os.getuid() == 0:
            self.prefix = ["setpriv", f"--reuid={PLAIN_UID}", f"--regid={PLAIN_UID}", "--clear-groups"]
            if subprocess.run([*self.prefix, "sh", "-c", f"{sys.executable} -c ''"], capture_output=True).returncode:
                # this Python is in a folder of root's: let the plain user read everything, but write nothing more
                self.prefix += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
            os.chown(self.folder, PLAIN_UID, PLAIN_UID)

    # ---- the service -----------------------------------------------------------------------------------------------

    def serve(self, *more: str, **popen: Any) -> None:
        """Start the service and wait until it answers."""
        gpus = [] if "--executor" in self.options else ["--gpus", "4"]
        command = [*self.command("serve"), "--port", "0", *gpus, *self.options, *more]
        with contextlib.suppress(OSError):
            (self.home / "address.json").unlink()
        with self.log.open("ab") as log:
            self.service = subprocess.Popen(command, stdout=log, stderr=log, env=self.env(), cwd="/", **popen)
        self.until(self.answers, f"the service starts: {self.log.read_text()[-500:]}")
        for name, uid in UIDS.items() if self.root and not self.tokens else ():
            self.tokens[name] = self.ask("POST", "/v1/users", {"name": name, "uid": uid}).data["token"]
        if not self.root and not self.tokens:
            self.tokens = {name: self.ask("POST", "/v1/users", {"name": name}).data["token"] for name in UIDS}

    def serve_if_needed(self) -> None:
        """Start the service unless it runs."""
        if self.service is None or self.service.poll() is not None:
            self.serve()

    def answers(self) -> bool:
        if self.service is not None and self.service.poll() is not None:
            raise Broken(f"the service ended by itself: {self.log.read_text()[-800:]}")
        with contextlib.suppress(OSError, ValueError, KeyError, http.client.HTTPException):
            return self.ask("GET", "/v1/me").status == 200
        return False

    def kill(self, number: int = signal.SIGKILL) -> None:
        assert self.service is not None
        self.service.send_signal(number)
        self.service.wait(PATIENCE_S)

    def memory(self) -> int:
        """Return the most bytes of memory that the service has used."""
        assert self.service is not None
        found = Path(f"/proc/{self.service.pid}/status").read_text()
        return next(int(line.split()[1]) * 1024 for line in found.splitlines() if line.startswith("VmHWM"))

    def close(self) -> None:
        """End the service and all its jobs, and remove the folder."""
        with contextlib.suppress(Exception):
            self.serve_if_needed()
            self.ask("POST", "/v1/jobs/cancel", {"jobs": [row["job"] for row in self.jobs()]})
            self.until(lambda: not self.jobs(), "all jobs end", 20.0)
        if self.service is not None and self.service.poll() is None:
            self.kill()
        for pid in self.processes():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)

    def processes(self) -> list[int]:
        """Return the processes that carry this world's folder in their command line or environment."""
        mark, found = str(self.folder).encode(), []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (path / "cmdline").read_bytes() + (path / "environ").read_bytes():
                    found.append(int(path.name))
        return [pid for pid in found if pid != os.getpid()]

    # ---- clients ---------------------------------------------------------------------------------------------------

    def command(self, *words: str) -> list[str]:
        return [*self.prefix, sys.executable, "-m", "carpool.cli", *words, "--home", str(self.home)]

    def env(self, **more: str) -> dict[str, str]:
        left_out = ("CARPOOL", "PYTHONDONTWRITEBYTECODE")  # every start would compile everything again
        kept = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
        return {**kept, "PYTHONPATH": str(ROOT / "src"), "HOME": str(self.folder), **more}

    def carpool(self, *words: str, user: str = "", **more: str) -> subprocess.CompletedProcess[str]:
        """Run a command as the administrator, or with a user's token."""
        tail = [] if "--" not in words else list(words[words.index("--") :])
        head = list(words[: len(words) - len(tail)])
        env = self.env(**({"CARPOOL_TOKEN": self.tokens[user]} if user else {}), **more)
        run = subprocess.run
        return run([*self.command(*head), *tail], capture_output=True, text=True, env=env, cwd="/", timeout=PATIENCE_S)

    @property
    def port(self) -> int:
        return int(json.loads((self.home / "address.json").read_text())["url"].rpartition(":")[2])

    @property
    def admin(self) -> str:
        return (self.home / "admin.token").read_text().strip()

    def ask(self, method: str, path: str, data: Any = None, user: str = "", **headers: str) -> Answer:
        """Send a request as the administrator or as a user; `data` is bytes, or sent as JSON."""
        body = data if isinstance(data, bytes | None) else json.dumps(data).encode()
        token = self.tokens[user] if user else self.admin
        given = {"Authorization": f"Bearer {token}", "Content-Type": "application/json", **headers}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            connection.request(method, path, body, given)
            answer = connection.getresponse()
            return Answer(answer.status, answer.read())
        finally:
            connection.close()

    def raw(self, text: bytes) -> bytes:
        """Send bytes, and return what comes back until the service closes the connection."""
        with socket.create_connection(("127.0.0.1", self.port), PATIENCE_S) as connection:
            with contextlib.suppress(OSError):
                connection.sendall(text)
            received = b""
            with contextlib.suppress(OSError):
                while part := connection.recv(65536):
                    received += part
            return received

    def submit(self, script: str, user: str = "ann", **fields: Any) -> str:
        """Submit a shell script and return the job's id."""
        spec = {"command": ["/bin/sh", "-c", script], "directory": "/tmp", "grace_s": 1.0, "watch": False, **fields}
        answer = self.ask("POST", "/v1/jobs", spec, user)
        hold(answer.status == 201, f"a job is accepted, not {answer.status} {answer.body[:300]!r}")
        return str(answer.data["job"])

    def jobs(self) -> list[dict[str, Any]]:
        return list(self.ask("GET", "/v1/jobs").data["jobs"])

    def show(self, job: str) -> dict[str, Any]:
        return dict(self.ask("GET", f"/v1/jobs/{job}").data)

    def stdout(self, job: str) -> str:
        return self.ask("GET", f"/v1/jobs/{job}/logs").body.decode("utf-8", "replace")

    def reach(self, job: str, *statuses: str) -> dict[str, Any]:
        """Wait until a job has one of these statuses."""
        found: dict[str, Any] = {}

        def reached() -> bool:
            found.update(self.show(job))
            return found["status"] in statuses

        self.until(reached, f"job {job} becomes {' or '.join(statuses)}", also=lambda: f"; it is {found['status']}")
        return found

    def until(self, condition: Any, what: str, seconds: float = PATIENCE_S, also: Any = lambda: "") -> Any:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if found := condition():
                return found
            time.sleep(0.05)
        raise Broken(f"within {seconds:g} s: {what}{also()}")
