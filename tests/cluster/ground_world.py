"""Worlds whose nodes come from a ground: `carpool serve --on slurm` and `--on ray`, with everything on loopback."""

import contextlib
import os
import signal
import time
from pathlib import Path

from tests.cluster.pilot_relay import PilotRelay
from tests.cluster.world import ClusterWorld, until
from tests.support.ray_cluster import RayCluster
from tests.support.slurm import SlurmCluster


class GroundWorld(ClusterWorld):
    """A service that gets its nodes from a ground. Names of nodes are known when they have joined."""

    ground = ""
    notices_s = 8.0
    """Seconds that the service and the ground may take together to notice a silent node and to end its pilot."""

    def __init__(self, folder: Path, count: str = "2", gpus: int = 2, lease_s: float = 8.0, margin_s: float = 2.0):
        super().__init__(folder, (), gpus, lease_s, margin_s)
        self.count = count
        self.relay = PilotRelay()
        self.options: list[str] = []

    @property
    def all_gpus(self) -> int:
        return self.gpus * int(self.count.rpartition("-")[2])

    def __enter__(self):
        try:
            self.serve()
        except BaseException:
            self.__exit__()
            raise
        return self

    def serve(self) -> None:
        super().serve()
        self.relay.target = self.port

    def __exit__(self, *_):
        self.end_pilots()
        super().__exit__(*_)
        self.relay.close()

    def more_options(self) -> list[str]:
        words = ["--on", self.ground, "--nodes", self.count, "--gpus", str(self.gpus), "--join-url", self.relay.url]
        return [*words, "--agent-home", str(self.folder), *self.options]

    def end_pilots(self) -> None:
        for pid in self.supervisors().values():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    # ---- nodes -----------------------------------------------------------------------------------------------------

    def open_nodes(self) -> list[str]:
        with contextlib.suppress(ValueError, OSError):
            return sorted(name for name, row in self.nodes().items() if row["state"] == "open")
        return []

    def until_nodes(self, count: int, seconds: float = 60.0) -> list[str]:
        until(lambda: len(self.open_nodes()) == count, seconds, lambda: f"{self.open_nodes()}\n{self.said()}")
        return self.open_nodes()

    def pilot_of(self, node: str) -> str:
        return self.nodes()[node]["pilot"]

    def supervisors(self) -> dict[str, int]:
        """The supervisors of the pilots of this world, by node."""
        found = {}
        for pid, node in self._agents():
            with contextlib.suppress(OSError, IndexError):
                found[node] = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        return found

    def agent_pids(self, name: str) -> list[int]:
        """The supervisor of a node, and the agent below it."""
        supervisor = self.supervisors().get(name)
        above = [supervisor] if supervisor is not None and supervisor > 1 else []
        return [*above, *(pid for pid, node in self._agents() if node == name)]

    def _agents(self) -> list[tuple[int, str]]:
        """Return the agents that hold the lock of a home of this world."""
        found = []
        for lock in self.folder.glob("carpool-*/*/lock"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                pid = int(lock.read_text().split()[0])
                if b"carpool.live.agent.main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append((pid, lock.parent.name))
        return found

    def processes_on(self, node: str) -> list[int]:
        """Wrappers and workers of jobs on one node."""
        mark = f"/{node}/jobs/".encode()
        found = []
        for pid in self.job_processes():
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
                if mark in text:
                    found.append(pid)
        return found

    def said(self, *names: str) -> str:
        pilots = sorted(self.home.glob("pilots/*.log"))
        text = "\n".join(f"{path.name}:\n{path.read_text(errors='replace')[-1500:]}" for path in pilots)
        return f"{super().said(*names)}\n{text}"


class SlurmWorld(GroundWorld):
    """A service on a Slurm cluster of its own."""

    ground = "slurm"

    def __init__(self, folder: Path, slurm: SlurmCluster, **options):
        super().__init__(folder, **options)
        self.slurm = slurm

    def environment(self) -> dict[str, str]:
        return {**super().environment(), **self.slurm.environment}

    def end_pilots(self) -> None:
        if self.service is not None and self.service.poll() is None:  # it would submit others
            self.service.send_signal(signal.SIGCONT)
            self.service.kill()
            self.service.wait(10)
        self.slurm.command("scancel", "--user=root")
        super().end_pilots()
        end = time.monotonic() + 20.0
        while self.slurm.command("squeue", "--noheader").strip() and time.monotonic() < end:
            time.sleep(0.1)

    def ground_knows(self) -> str:
        """Return everything that Slurm shows and writes about its jobs."""
        seen = self.slurm.said() + self.slurm.command("scontrol", "show", "job")
        for number in self.slurm_jobs():
            seen += self.slurm.command("scontrol", "write", "batch_script", number, "-")
        return seen

    def slurm_jobs(self) -> dict[str, str]:
        """Return the state of each Slurm job in the queue, by its number."""
        rows = self.slurm.command("squeue", "--noheader", "--format=%i %T").splitlines()
        return dict(row.split() for row in rows)


class RayWorld(GroundWorld):
    """A service on a Ray cluster of its own."""

    ground = "ray"

    def __init__(self, folder: Path, ray: RayCluster, **options):
        super().__init__(folder, **options)
        self.ray = ray

    def more_options(self) -> list[str]:
        return [*super().more_options(), "--ray-address", self.ray.address]

    def environment(self) -> dict[str, str]:
        return {**super().environment(), **self.ray.environment}

    def end_pilots(self) -> None:
        if self.service is not None and self.service.poll() is None:
            self.service.send_signal(signal.SIGCONT)
            self.service.kill()
            self.service.wait(10)
        super().end_pilots()

    def ground_knows(self) -> str:
        """Return everything that Ray writes down."""
        logs = self.ray.folder.glob("session_latest/logs/*")
        return "\n".join(path.read_text(errors="replace") for path in logs if path.is_file())

    def actor_of(self, node: str) -> int | None:
        """Return the process of the actor that keeps a node's agent."""
        supervisor = self.supervisors().get(node)
        if supervisor is None:
            return None
        with contextlib.suppress(OSError):
            return int(Path(f"/proc/{supervisor}/stat").read_text().rpartition(")")[2].split()[1])
        return None
