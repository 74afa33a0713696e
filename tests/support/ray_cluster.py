"""A Ray cluster of its own on loopback: a head and further nodes, each with an address and ports of its own."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support.slurm import free_ports

ATTEMPTS = 5
QUICK = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "5",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "10",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
}


class RayCluster:
    """Processes of `ray start --block`; the head is called `head`."""

    def __init__(self, nodes: int = 3) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ray-"))  # short: Ray's sockets have long names
        self.port, *ports = free_ports(1 + 20 * (nodes + 1), base=26000)  # those of Slurm are below
        self.address = f"127.0.0.10:{self.port}"
        self.names = [f"r{number}" for number in range(1, nodes + 1)]
        self._ports = {name: ports[20 * place : 20 * place + 20] for place, name in enumerate(["head", *self.names])}
        self.environment = {**QUICK}
        self.processes: dict[str, subprocess.Popen] = {}

    def __enter__(self) -> "RayCluster":
        try:
            self.start_head()
            for name in self.names:
                self.start_node(name)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start_head(self) -> None:
        self._start("head", "127.0.0.10", "--head", f"--port={self.port}", f"--temp-dir={self.folder}")

    def start_node(self, name: str) -> None:
        self._start(name, f"127.0.0.1{self.names.index(name) + 1}", f"--address={self.address}")

    def _start(self, name: str, ip: str, *words: str) -> None:
        first, *rest = self._ports[name]
        ports = [f"--node-manager-port={first}", f"--object-manager-port={rest[0]}"]
        ports += [f"--runtime-env-agent-port={rest[1]}", f"--dashboard-agent-grpc-port={rest[2]}"]
        ports += [f"--dashboard-agent-listen-port={rest[3]}", f"--metrics-export-port={rest[4]}"]
        ports += [f"--min-worker-port={rest[5]}", f"--max-worker-port={rest[-1]}"]
        size = ["--num-cpus=1", "--object-store-memory=80000000", f"--node-name={name}", "--include-dashboard=false"]
        if name != "head":
            size.pop()
        command = [*words, *ports, *size]
        for _ in range(ATTEMPTS):  # Ray gives a node half a minute, which a busy machine may need
            if self._has_started(name, ip, command):
                return
        raise AssertionError(self.said())

    def _has_started(self, name: str, ip: str, options: list[str]) -> bool:
        output = self.folder / f"{name}.out"
        with output.open("wb") as log:
            command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--node-ip-address={ip}"]
            self.processes[name] = subprocess.Popen(
                [*command, *options],
                stdout=log,
                stderr=log,
                env={**os.environ, **self.environment},
                start_new_session=True,
            )
        while "Ray runtime started" not in output.read_text(errors="replace"):
            if self.processes[name].poll() is not None:
                self._end_session(self.processes[name].pid)
                return False
            time.sleep(0.1)
        return True

    def pid_of(self, name: str, program: str) -> int:
        """Return the process of a node that runs a program, such as `raylet`."""
        for entry in os.listdir("/proc"):
            with contextlib.suppress(OSError, IndexError):
                if not entry.isdigit() or os.getsid(int(entry)) != self.processes[name].pid:
                    continue
                words = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
                if os.path.basename(words[0]) == program.encode():
                    return int(entry)
        raise LookupError(f"{name} has no {program}")

    def kill(self, name: str) -> None:
        """Kill everything of a node but the processes that its pilots started."""
        session = self.processes[name].pid
        with contextlib.suppress(LookupError, ProcessLookupError):
            os.kill(self.pid_of(name, "raylet"), signal.SIGKILL)
        self.processes[name].kill()
        self.processes[name].wait(10)
        for entry in os.listdir("/proc"):  # they would keep the node's ports
            with contextlib.suppress(OSError):
                if entry.isdigit() and os.getsid(int(entry)) == session:
                    words = Path(f"/proc/{entry}/cmdline").read_bytes()
                    if b"/ray/_private/" in words or b"ray::DashboardAgent" in words or b"ray::RuntimeEnv" in words:
                        os.kill(int(entry), signal.SIGKILL)

    def said(self) -> str:
        return "\n".join(
            f"{path.name}:\n{path.read_text(errors='replace')[-1500:]}" for path in self.folder.glob("*.out")
        )

    def close(self) -> None:
        for name in reversed(self.processes):
            self._end_session(self.processes[name].pid, all_of_it=True)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.processes[name].wait(10)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _end_session(self, session: int, *, all_of_it: bool = False) -> None:
        """Kill the processes of a node, or all that use the folder of the cluster."""
        mark = str(self.folder).encode()
        for entry in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if not entry.isdigit() or int(entry) == os.getpid():
                    continue
                words = Path(f"/proc/{entry}/cmdline").read_bytes()
                if os.getsid(int(entry)) == session or (all_of_it and mark in words):
                    os.kill(int(entry), signal.SIGKILL)
