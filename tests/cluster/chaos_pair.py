"""The chaos of a cluster by hand with two services on one PostgreSQL journal; judge by the jobs' own ledger.

`python -m tests.cluster.chaos_pair --faults 40 --seed 1 [--without lease|silence|term]`. Agents know both services.
The faults are those of `chaos_agents.py`, where those of the service hit the one that leads, and two more: the leader
and a node lose the other service and all other nodes, for so long that the other service leads and gives the node up.
The leader loses the database, too, or is stopped until the other one leads. Exit code 1: a job was lost, ran twice,
or a GPU held too many.
"""

import argparse
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from carpool.live.journal.leadership import TAKE_OVER_S
from tests.cluster.chaos_agents import MARGIN_S, NODES, Chaos, main, play_in, switched_off
from tests.cluster.pair_world import PairWorld
from tests.cluster.world import until
from tests.support.postgres import PostgresServer

LEASE_S = 8.0
"""Longer than it takes the other service to lead, so that most workers outlive their leader."""
LEADS_S = TAKE_OVER_S + 1.0
"""Seconds after which the other service leads, roughly."""


class PairChaos(Chaos):
    """Faults of two services."""

    world: PairWorld

    def kinds(self) -> list[Callable[[str, float], None]]:
        return [*super().kinds(), *2 * [self.split_off_service, self.split_off_stopped_service]]

    def stop_service(self, node: str, seconds: float) -> None:
        side = self.world.leader() or 0
        self.world.sides[side].send_signal(signal.SIGSTOP)
        self.last(seconds)
        self.world.sides[side].send_signal(signal.SIGCONT)
        self._restart(side)

    def split_off_service(self, node: str, seconds: float) -> None:
        side = self.world.leader() or 0
        self.world.database[side].severed = True
        with self._split(side, node):
            self.last(LEADS_S + max(seconds, self.over_s + 1.0))
        self.world.database[side].severed = False
        self._restart(side)

    def split_off_stopped_service(self, node: str, seconds: float) -> None:
        side = self.world.leader() or 0
        with self._split(side, node):
            self.world.sides[side].send_signal(signal.SIGSTOP)
            try:
                self.last(LEADS_S)
            finally:
                self.world.sides[side].send_signal(signal.SIGCONT)
            self.last(max(seconds, self.over_s + 1.0))
        self._restart(side)

    @contextmanager
    def _split(self, side: int, node: str) -> Iterator[None]:
        """Let a service hear only one node, and that node only this service."""
        roads = self.world.relays
        lost = [roads[node].to[1 - side], *(roads[other].to[side] for other in NODES if other != node)]
        for road in lost:
            road.severed = True
        try:
            yield
        finally:
            for road in lost:
                road.severed = False

    def _restart(self, side: int) -> None:
        """Start a service again if it was deposed. It ends by itself then, except where that is switched off."""
        process = self.world.sides[side]
        try:
            until(lambda: process.poll() is not None or self.world.leader() == side, 10.0)
        except AssertionError:
            process.kill()
            process.wait(10)
        self.world.serve()


def play(folder: Path, faults: int, seed: int, without: str = "") -> list[str]:
    """Play a round of chaos on a database of its own, and return what was violated."""
    server = PostgresServer().start()
    options = {"gpus": 2, "lease_s": LEASE_S, "margin_s": MARGIN_S}
    try:
        with switched_off(without), PairWorld(folder, server.new_database(), NODES, **options) as world:
            return play_in(PairChaos(world, seed), faults, without)
    finally:
        server.close()


if __name__ == "__main__":
    sys.exit(main(argparse.ArgumentParser(description=__doc__), play, ("lease", "silence", "term")))
