"""Two services on one home and one database, and a relay between them and the database."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

from carpool.live.home import Home
from carpool.live.http.client import Client
from tests.support.command_line import COMMAND, environment

START_S = 30.0


class Pair:
    """A home that services share."""

    def __init__(self, folder: Path, address: str, password_file: Path | None = None) -> None:
        self.folder, self.home, self.address = folder, folder / "home", address
        self.variables = {"PGPASSFILE": str(password_file)} if password_file else {}
        self.services: list[LedService] = []

    def serve(self, *options: str, address: str | None = None) -> "LedService":
        service = LedService(self, len(self.services), address or self.address, options)
        self.services.append(service)
        return service

    def leader(self) -> "LedService | None":
        """Return the service whose address clients find."""
        found = Home(self.home).read_address()
        return next((one for one in self.services if found and one.process.pid == found["pid"]), None)

    def client(self) -> Client:
        return Client.find(self.home)

    def ask(self, path: str, seconds: float = START_S):
        """Return an answer of whichever service leads."""
        until = time.monotonic() + seconds
        while True:
            try:
                return self.client().get(path)
            except ValueError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)

    def submit(self, script: str, **fields) -> str:
        request = {"command": ["sh", "-c", script], "directory": "/", "grace_s": 1.0, "watch": False, **fields}
        return self.client().post("/v1/jobs", request)["job"]

    def submit_again(self, script: str, **fields) -> str:
        """Submit as soon as the service accepts it."""
        until = time.monotonic() + START_S
        while True:
            try:
                return self.submit(script, **fields)
            except ValueError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.2)

    def until(self, job: str, *states: str, seconds: float = START_S) -> dict:
        until = time.monotonic() + seconds
        while True:
            row = self.ask(f"/v1/jobs/{job}")
            if row["status"] in states:
                return row
            assert time.monotonic() < until, f"job {job} is {row['status']}: {row['reason']}\n{self.logs()}"
            time.sleep(0.1)

    def logs(self) -> str:
        return "\n".join(f"--- {one.number}\n{one.said()}" for one in self.services)

    def close(self) -> None:
        with contextlib.suppress(ValueError, AssertionError):
            client = self.client()
            for row in client.jobs():
                client.post(f"/v1/jobs/{row['job']}/cancel")
            until = time.monotonic() + 10.0
            while client.jobs() and time.monotonic() < until:
                time.sleep(0.1)
        for one in self.services:
            one.end()


class LedService:
    """One `carpool serve --database`."""

    def __init__(self, pair: Pair, number: int, address: str, options: tuple[str, ...]) -> None:
        self.pair, self.number = pair, number
        self.log = pair.folder / f"serve-{number}.log"
        words = ["serve", "--home", str(pair.home), "--port", "0", "--gpus", "2", "--jobs-per-gpu", "1"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*COMMAND, *words, "--database", address, *options],
                stdout=log,
                stderr=log,
                env=environment(**pair.variables),
            )

    def said(self) -> str:
        return self.log.read_text()

    def until_it_says(self, text: str, seconds: float = START_S) -> None:
        until = time.monotonic() + seconds
        while text not in self.said():
            assert time.monotonic() < until, f"{text!r} was not said:\n{self.pair.logs()}"
            assert self.process.poll() is None or text in self.said(), self.pair.logs()
            time.sleep(0.05)

    def leads(self, seconds: float = START_S) -> float:
        """Wait until it leads and answers; return the seconds that took."""
        began = time.monotonic()
        self.until_it_says("leads in term ", seconds)
        while self.pair.leader() is not self:
            assert time.monotonic() < began + seconds, self.pair.logs()
            time.sleep(0.02)
        self.pair.client().get("/v1/me")
        return time.monotonic() - began

    @property
    def term(self) -> int:
        return int(self.said().split("leads in term ")[1].split()[0])

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        if self.process.poll() is None:
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGTERM)
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.kill()


def events(server, address: str) -> list[tuple[int, str, dict]]:
    """Return the journal's events."""
    rows = server.sql("SELECT seq, kind, data FROM events ORDER BY seq", address)
    return [(seq, kind, json.loads(data)) for seq, kind, data in rows]


class Relay:
    """A TCP relay to a port, which can hold back, swallow and cut what comes back."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self.swallow_after: bytes | None = None
        """After a client has sent this, nothing more comes back, and its connection is cut."""
        self.cut_before: bytes | None = None
        """When a client sends this, its connection is cut instead."""
        self.swallowed = threading.Event()
        self.refusing = False
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._made: list[tuple[socket.socket, socket.socket]] = []
        self._copying: list[threading.Thread] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            if self.refusing:
                client.close()
                continue
            try:
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                client.close()
                continue
            self._pairs.append((client, server))
            self._made.append((client, server))
            silent = threading.Event()
            for one, other, upward in ((client, server, True), (server, client, False)):
                copying = threading.Thread(target=self._copy, args=(one, other, upward, silent), daemon=True)
                self._copying.append(copying)
                copying.start()

    def _copy(self, one: socket.socket, other: socket.socket, upward: bool, silent: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(65536):
                if upward and self.cut_before is not None and self.cut_before in data:
                    self.cut_before = None
                    break
                if upward and self.swallow_after is not None and self.swallow_after in data:
                    self.swallow_after = None
                    silent.set()
                    other.sendall(data)
                    time.sleep(0.3)  # the server does what it was asked to
                    self.swallowed.set()
                    break
                if upward or not silent.is_set():
                    other.sendall(data)
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """Cut all connections."""
        for pair in self._pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
        self._pairs.clear()

    def close(self) -> None:
        self.refusing = True
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.cut()
        for one in self._copying:
            one.join()
        for pair in self._made:
            for end in pair:
                end.close()


def everything_readable(pair: Pair, pids: list[int]) -> str:
    """Return what anyone could find a secret in: logs, files of the home, environments and arguments of processes."""
    found = [pair.logs()]
    for path in pair.home.rglob("*"):
        with contextlib.suppress(OSError):
            if path.is_file():
                found.append(path.read_text(errors="replace"))
    for pid in pids:
        for name in ("environ", "cmdline"):
            with contextlib.suppress(OSError):
                found.append(Path(f"/proc/{pid}/{name}").read_text(errors="replace"))
    return "\n".join(found)


def descendants(pid: int) -> list[int]:
    """Return the processes below one, and those of jobs, which have sessions of their own."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                parent = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
                if parent == pid:
                    found += [int(entry), *descendants(int(entry))]
    return found
