"""A PostgreSQL server for tests: its own folder, loopback only, started and ended as a process of the tests."""

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

BINARIES = ("/usr/lib/postgresql/*/bin", "/usr/pgsql-*/bin", "/usr/local/pgsql/bin")
"""Folders in which distributions put the server's programs."""
PASSWORD = "wrong-horse-battery"
"""Password of the user `carpool`, which must be seen nowhere."""
START_S = 30.0


def binary(name: str) -> str | None:
    """Return the path of a program of the server; None if it is not installed."""
    found = [path for pattern in BINARIES for path in sorted(Path("/").glob(f"{pattern.lstrip('/')}/{name}"))]
    return str(found[-1]) if found else shutil.which(name)


class PostgresServer:
    """A server. `url()` is the address of a database in it."""

    def __init__(self, *, durable: bool = False) -> None:
        """`durable`: a commit waits for the disk, which tests do not need."""
        self._durable = durable
        self.folder = Path(tempfile.mkdtemp(prefix="carpool-pg-"))
        self.data = self.folder / "data"
        self.port = _free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self._user: str | None = None
        if os.getuid() == 0:  # the server refuses to run as root
            self._user = "postgres" if _exists("postgres") else "nobody"
            account = pwd.getpwnam(self._user)
            os.chown(self.folder, account.pw_uid, account.pw_gid)
        secret = self.folder / "secret"
        secret.write_text(PASSWORD)
        if self._user:
            os.chown(secret, pwd.getpwnam(self._user).pw_uid, -1)
        login = ["--username", "carpool", "--pwfile", str(secret), "--auth", "scram-sha-256"]
        command = [_needed("initdb"), "--pgdata", str(self.data), "--encoding", "UTF8", "--locale", "C", "--no-sync"]
        self._run([*command, *login])
        secret.unlink()

    def start(self) -> "PostgresServer":
        """Start the server, and return when it answers."""
        settings = {"listen_addresses": "127.0.0.1", "port": self.port, "unix_socket_directories": self.folder}
        settings |= {
            "fsync": "on" if self._durable else "off",
            "max_connections": 40,
            "shared_buffers": "16MB",
            "logging_collector": "off",
        }
        command = [_needed("postgres"), "-D", str(self.data)]
        for name, value in settings.items():
            command += ["-c", f"{name}={value}"]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, **self._as_user())
        until = time.monotonic() + START_S
        while time.monotonic() < until and self.process.poll() is None:
            with contextlib.suppress(Exception):
                self.sql("SELECT 1", "postgres")
                return self
            time.sleep(0.05)
        raise AssertionError(f"no PostgreSQL: {(self.folder / 'log').read_text()[-2000:]}")

    def kill(self) -> None:
        """Kill the whole server, as a power cut would."""
        self.signal(signal.SIGKILL)
        assert self.process is not None
        self.process.wait()
        time.sleep(0.2)  # its children notice that it is gone

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.signal(signal.SIGCONT)
            self.process.send_signal(signal.SIGINT)  # ends its connections
            self.process.wait(30)

    def signal(self, number: int) -> None:
        """Send a signal to the server and all of its processes."""
        assert self.process is not None
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        for pid in (self.process.pid, *map(int, children)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def url(self, database: str = "postgres", *, password: bool = True, port: int | None = None) -> str:
        secret = f":{PASSWORD}" if password else ""
        return f"postgresql://carpool{secret}@127.0.0.1:{port or self.port}/{database}"

    def new_database(self) -> str:
        """Make an empty database and return its address."""
        name = f"test_{os.getpid()}_{time.monotonic_ns()}"
        self.sql(f"CREATE DATABASE {name}", "postgres")
        return self.url(name)

    def sql(self, statement: str, database: str) -> list[tuple]:
        import psycopg

        address = database if "://" in database else self.url(database)
        with psycopg.connect(address, autocommit=True, connect_timeout=5) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def _as_user(self) -> dict:
        return {"user": self._user, "group": pwd.getpwnam(self._user).pw_gid, "extra_groups": []} if self._user else {}

    def _run(self, command: list[str]) -> None:
        done = subprocess.run(command, capture_output=True, text=True, cwd=self.folder, **self._as_user())
        assert done.returncode == 0, done.stderr


def _needed(name: str) -> str:
    found = binary(name)
    assert found, f"{name} is not installed; `make test-cluster` installs it"
    return found


def _exists(user: str) -> bool:
    with contextlib.suppress(KeyError):
        return bool(pwd.getpwnam(user))
    return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
