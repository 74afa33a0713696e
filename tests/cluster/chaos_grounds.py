"""Kill, stop and cut off everything of a cluster on Slurm or Ray while jobs run; judge by the jobs' own ledger.

`python -m tests.cluster.chaos_grounds slurm --faults 40 --seed 1 [--without lease|silence]`. Three pilots with two
logical GPUs each, on four nodes; jobs of one to three workers that outlast the lease. Faults, several at a time:
SIGKILL and SIGSTOP of the service, agents and supervisors; SIGKILL of wrappers and workers; roads cut both ways and one
way; nodes that stay away until they are lost; and those of the ground: slurmd, slurmctld and `scancel`, or raylets and
actors. Exit code 1: a job was lost, ran twice, a GPU held too many, or something is left behind.
"""

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.cluster import chaos_agents
from tests.cluster import world as worlds
from tests.cluster.chaos_agents import LEASE_S, MARGIN_S, Chaos, play_in
from tests.cluster.ground_world import GroundWorld, RayWorld, SlurmWorld
from tests.support.ray_cluster import RayCluster
from tests.support.slurm import SlurmCluster

PILOTS = "3"


class GroundChaos(Chaos):
    """Faults that every ground has."""

    world: GroundWorld

    def kinds(self) -> list[Callable[[str, float], None]]:
        kinds = [self.kill_worker, self.kill_wrapper, self.kill_agent, self.kill_supervisor, self.stop_agent]
        return [*kinds, self.cut_road, self.cut_road, self.kill_service, self.stop_service]

    def nodes(self) -> Sequence[str]:
        return sorted(self.world.supervisors())

    def _signal(self, pids: Sequence[int], number: int) -> None:
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, number)

    def kill_agent(self, node: str, seconds: float) -> None:
        self._signal([pid for pid, name in self.world._agents() if name == node], signal.SIGKILL)

    def kill_supervisor(self, node: str, seconds: float) -> None:
        self._signal([self.world.supervisors().get(node, 1 << 30)], signal.SIGKILL)

    def stop_agent(self, node: str, seconds: float) -> None:
        pids = self.world.agent_pids(node)
        self._signal(pids, signal.SIGSTOP)
        time.sleep(seconds)
        self._signal(pids, signal.SIGCONT)

    def cut_road(self, node: str, seconds: float) -> None:
        with contextlib.suppress(ValueError, OSError, KeyError):
            pilot = self.world.pilot_of(node)
            ways = self.drawn.choice([{}, {"to_service": False}, {"to_agent": False}])
            self.world.relay.cut(pilot, **ways)
            time.sleep(2 * seconds)
            self.world.relay.restore(pilot)


class SlurmChaos(GroundChaos):
    """Faults of Slurm's side."""

    world: SlurmWorld

    def kinds(self) -> list[Callable[[str, float], None]]:
        own = [self.kill_slurmd, self.stop_slurmd, self.kill_slurmctld, self.stop_slurmctld, self.scancel]
        return [*super().kinds(), *own, self.lose_node]

    def target_of(self, kind: str, node: str) -> str:
        return "slurmctld" if "slurmctld" in kind else super().target_of(kind, node)

    def kill_slurmd(self, node: str, seconds: float) -> None:
        self.world.slurm.kill(node)
        time.sleep(seconds)
        self.world.slurm.start_slurmd(node)

    def stop_slurmd(self, node: str, seconds: float) -> None:
        self.world.slurm.signal(node, signal.SIGSTOP)
        time.sleep(seconds)
        self.world.slurm.signal(node, signal.SIGCONT)

    def kill_slurmctld(self, node: str, seconds: float) -> None:
        self.world.slurm.kill("slurmctld")
        time.sleep(seconds)
        self.world.slurm.start_slurmctld()

    def stop_slurmctld(self, node: str, seconds: float) -> None:
        self.world.slurm.signal("slurmctld", signal.SIGSTOP)
        time.sleep(seconds)
        self.world.slurm.signal("slurmctld", signal.SIGCONT)

    def scancel(self, node: str, seconds: float) -> None:
        number = self.world.slurm.command("squeue", "--noheader", "--format=%i", f"--nodelist={node}", timeout=5)
        if number.strip().isdecimal():
            self.world.slurm.command("scancel", number.strip(), timeout=5)

    def lose_node(self, node: str, seconds: float) -> None:
        """Switch a machine off until Slurm has noticed it, and let it come back."""
        self.world.slurm.kill(node)
        self._signal(self.world.agent_pids(node), signal.SIGKILL)
        self._signal(self.world.processes_on(node), signal.SIGKILL)
        time.sleep(20.0)
        self.world.slurm.start_slurmd(node)


class RayChaos(GroundChaos):
    """Faults of Ray's side."""

    world: RayWorld

    def kinds(self) -> list[Callable[[str, float], None]]:
        return [*super().kinds(), self.kill_actor, self.stop_actor, self.stop_raylet, self.lose_node]

    def _actor(self, node: str) -> list[int]:
        found = self.world.actor_of(node)
        return [found] if found is not None and found > 1 else []

    def kill_actor(self, node: str, seconds: float) -> None:
        self._signal(self._actor(node), signal.SIGKILL)

    def stop_actor(self, node: str, seconds: float) -> None:
        pids = self._actor(node)
        self._signal(pids, signal.SIGSTOP)
        time.sleep(seconds)
        self._signal(pids, signal.SIGCONT)

    def stop_raylet(self, node: str, seconds: float) -> None:
        with contextlib.suppress(LookupError):
            pid = self.world.ray.pid_of(node, "raylet")
            self._signal([pid], signal.SIGSTOP)
            time.sleep(min(3.0, seconds))  # a longer one is a dead node for Ray, which `lose_node` covers
            self._signal([pid], signal.SIGCONT)

    def lose_node(self, node: str, seconds: float) -> None:
        """Kill a node's raylet, and start the node again later."""
        if node == "head":  # Ray's head is a single point of failure
            return
        self.world.ray.kill(node)
        time.sleep(seconds)
        self.world.ray.start_node(node)


def play(ground: str, folder: Path, faults: int, seed: int, show: bool = False) -> list[str]:
    """Play a round of chaos on a ground and return what was violated."""
    options = {"count": PILOTS, "gpus": 2, "lease_s": LEASE_S, "margin_s": MARGIN_S}
    chaos_agents.DRAIN_S = 300.0
    with contextlib.ExitStack() as stack:
        if ground == "slurm":
            slurm = stack.enter_context(SlurmCluster(4))
            world = stack.enter_context(SlurmWorld(folder, slurm, **options))
            chaos: GroundChaos = SlurmChaos(world, seed)
        else:
            ray = stack.enter_context(RayCluster(3))
            world = stack.enter_context(RayWorld(folder, ray, **options))
            chaos = RayChaos(world, seed)
        world.until_nodes(int(PILOTS), 120)
        return play_in(world, chaos, faults, show)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ground", choices=["slurm", "ray"])
    parser.add_argument("--faults", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--without", choices=["lease", "silence"])
    options = parser.parse_args()
    if options.without:
        worlds.COMMAND = [sys.executable, str(Path(__file__).with_name("mutated.py")), options.without]
    with tempfile.TemporaryDirectory() as folder:
        broken = play(options.ground, Path(folder), options.faults, options.seed, show=True)
    for line in broken:
        print(f"violated: {line}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
