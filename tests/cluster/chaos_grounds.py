"""Kill, stop and cut off everything of a cluster on Slurm or Ray while jobs run; judge by the jobs' own ledger.

`python -m tests.cluster.chaos_grounds slurm --faults 40 --seed 1 [--without silence]`. Three pilots with two logical
GPUs each, on four nodes. Jobs and faults are those of `chaos_agents.py`, and besides them those of the ground: slurmd,
slurmctld and `scancel`, or raylets and actors. The lease cannot be switched off here, because the ground starts the
agents. Exit code 1: a job was lost, ran twice, a GPU held too many, or something is left behind.
"""

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.cluster import chaos_agents
from tests.cluster.chaos_agents import LEASE_S, MARGIN_S, Chaos, main, play_in, switched_off
from tests.cluster.ground_world import GroundWorld, RayWorld, SlurmWorld
from tests.support.ray_cluster import RayCluster
from tests.support.slurm import SlurmCluster

PILOTS = "3"


class GroundChaos(Chaos):
    """Faults that every ground has."""

    world: GroundWorld

    def kinds(self) -> list[Callable[[str, float], None]]:
        own = [kind for kind in super().kinds() if kind != self.lose_node]
        return [*own, self.kill_supervisor]

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
        self.last(seconds)
        self._signal(pids, signal.SIGCONT)

    def _cut(self, node: str, seconds: float, **passes: bool) -> None:
        with contextlib.suppress(ValueError, OSError, KeyError):
            pilot = self.world.pilot_of(node)
            self.world.relay.cut(pilot, **dict.fromkeys(passes, False))
            self.last(2 * seconds)
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
        self.last(seconds)
        self.world.slurm.start_slurmd(node)

    def stop_slurmd(self, node: str, seconds: float) -> None:
        self.world.slurm.signal(node, signal.SIGSTOP)
        self.last(seconds)
        self.world.slurm.signal(node, signal.SIGCONT)

    def kill_slurmctld(self, node: str, seconds: float) -> None:
        self.world.slurm.kill("slurmctld")
        self.last(seconds)
        self.world.slurm.start_slurmctld()

    def stop_slurmctld(self, node: str, seconds: float) -> None:
        self.world.slurm.signal("slurmctld", signal.SIGSTOP)
        self.last(seconds)
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
        self.last(20.0)
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
        self.last(seconds)
        self._signal(pids, signal.SIGCONT)

    def stop_raylet(self, node: str, seconds: float) -> None:
        with contextlib.suppress(LookupError):
            pid = self.world.ray.pid_of(node, "raylet")
            self._signal([pid], signal.SIGSTOP)
            self.last(min(3.0, seconds))  # a longer one is a dead node for Ray, which `lose_node` covers
            self._signal([pid], signal.SIGCONT)

    def lose_node(self, node: str, seconds: float) -> None:
        """Kill a node's raylet, and start the node again later."""
        if node == "head":  # Ray's head is a single point of failure
            return
        self.world.ray.kill(node)
        self.last(seconds)
        self.world.ray.start_node(node)


def play(ground: str, folder: Path, faults: int, seed: int, without: str = "") -> list[str]:
    """Play a round of chaos on a ground and return what was violated."""
    options = {"count": PILOTS, "gpus": 2, "lease_s": LEASE_S, "margin_s": MARGIN_S}
    chaos_agents.DRAIN_S = 300.0
    with contextlib.ExitStack() as stack:
        stack.enter_context(switched_off(without))
        if ground == "slurm":
            slurm = stack.enter_context(SlurmCluster(4))
            world = stack.enter_context(SlurmWorld(folder, slurm, **options))
            chaos: GroundChaos = SlurmChaos(world, seed)
        else:
            ray = stack.enter_context(RayCluster(3))
            world = stack.enter_context(RayWorld(folder, ray, **options))
            chaos = RayChaos(world, seed)
        world.until_nodes(int(PILOTS), 120)
        return play_in(chaos, faults, without)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ground", choices=["slurm", "ray"])
    sys.exit(main(parser, play, ("silence",)))
