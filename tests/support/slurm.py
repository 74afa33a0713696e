"""A Slurm cluster of its own on loopback: munged, slurmctld and several slurmd as ordinary processes of the test."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

CONFIG = """
ClusterName=carpool
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ctld_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
SlurmdTimeout={slurmd_timeout}
SlurmctldTimeout=30
MessageTimeout=5
KillWait=2
InactiveLimit=0
MinJobAge=60
ReturnToService=2
OverTimeLimit=0
SchedulerParameters=sched_min_interval=100000,batch_sched_delay=0,sched_interval=2
NodeName=n[1-{nodes}] NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports} CPUs=1 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
START_S = 30.0


def free_ports(count: int, base: int = 20000) -> list[int]:
    """Return ports that are free now, following one another, from the 5,000 after `base`.

    Each process begins at a place of its own, because another one may be about to use what is free now.
    """
    own = base + os.getpid() * count % 5000
    for first in (*range(own, base + 5000, count), *range(base, own, count)):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return list(range(first, first + count))
    raise AssertionError("no ports are free")


class SlurmCluster:
    """munged, slurmctld and slurmd processes; `environment` lets Slurm's commands find them."""

    def __init__(self, nodes: int = 4, slurmd_timeout: int = 10) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        self.names = [f"n{number}" for number in range(1, nodes + 1)]
        ctld, *ports = free_ports(nodes + 1)
        text = CONFIG.format(
            folder=self.folder,
            ctld_port=ctld,
            nodes=nodes,
            ports=f"[{ports[0]}-{ports[-1]}]",
            slurmd_timeout=slurmd_timeout,
        )
        (self.folder / "state").mkdir()
        (self.folder / "slurm.conf").write_text(text)
        self.environment = {"SLURM_CONF": str(self.folder / "slurm.conf")}
        self.processes: dict[str, subprocess.Popen] = {}

    def __enter__(self) -> "SlurmCluster":
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> "SlurmCluster":
        key = self.folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        socket_path = self.folder / "munge.socket"
        self.folder.chmod(0o755)
        files = {"key-file": key, "socket": socket_path, "pid-file": self.folder / "munge.pid"}
        files |= {"log-file": self.folder / "munge.log", "seed-file": self.folder / "munge.seed"}
        words = [f"--{name}={path}" for name, path in files.items()]
        self._run("munged", "munged", "--foreground", "--force", *words)
        self._until(socket_path.exists, "munged")
        self.start_slurmctld()
        for name in self.names:
            self.start_slurmd(name)
        self._until(self.ready, "nodes are not idle")
        return self

    def ready(self) -> bool:
        return self.command("sinfo", "--noheader", "--format=%T").split() == ["idle"]

    def start_slurmctld(self) -> None:
        self._run("slurmctld", "slurmctld", "-D")

    def start_slurmd(self, name: str) -> None:
        (self.folder / f"spool-{name}").mkdir(exist_ok=True)
        self._run(name, "slurmd", "-D", "-N", name)

    def _run(self, name: str, *command: str) -> None:
        program = shutil.which(command[0], path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
        assert program, f"{command[0]} is not installed; `.ci/servers/slurm` installs it"
        with (self.folder / f"{name}.out").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [program, *command[1:]], stdout=log, stderr=log, env={**os.environ, **self.environment}
            )

    def command(self, *words: str, timeout: float = 20.0) -> str:
        env = {**os.environ, **self.environment}
        with contextlib.suppress(subprocess.TimeoutExpired):
            return subprocess.run(words, capture_output=True, text=True, env=env, timeout=timeout).stdout
        return ""

    def signal(self, name: str, number: int) -> None:
        self.processes[name].send_signal(number)

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait(10)

    def said(self) -> str:
        logs = [*self.folder.glob("*.log"), *self.folder.glob("*.out")]
        return "\n".join(f"{path.name}:\n{path.read_text(errors='replace')[-1500:]}" for path in sorted(logs))

    def _until(self, condition, what: str) -> None:
        end = time.monotonic() + START_S
        while not condition():
            assert time.monotonic() < end, f"{what}\n{self.said()}"
            time.sleep(0.05)

    def close(self) -> None:
        with contextlib.suppress(OSError, KeyError):
            if self.processes["slurmctld"].poll() is None:
                self.command("scancel", "--user=root", timeout=10)
        for process in reversed(self.processes.values()):
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
        for process in self.processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
        self._end_leftovers()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _end_leftovers(self) -> None:
        """Kill the processes of this cluster that outlived a killed slurmd."""
        mark = f"SLURM_CONF={self.folder}/".encode()
        for name in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if name.isdigit() and int(name) != os.getpid() and mark in Path(f"/proc/{name}/environ").read_bytes():
                    os.kill(int(name), signal.SIGKILL)
