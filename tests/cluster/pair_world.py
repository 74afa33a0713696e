"""A cluster by hand with two services on one PostgreSQL journal.

Each node has a road of its own to each service, and each service one to the database, so that any of them can be cut.
"""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from carpool.live.home import Home
from carpool.live.http.client import Client
from tests.cluster import world as worlds
from tests.cluster.relay import Relay
from tests.cluster.world import START_S, ClusterWorld, environment, until
from tests.support.slurm import free_ports

SIDES = (0, 1)


def leading_side(home: Path, sides: Sequence[subprocess.Popen[bytes] | None]) -> int | None:
    """Return which of these services wrote the address that clients find, if it runs."""
    found = Home(home).read_address()
    for side, process in enumerate(sides):
        if process is not None and process.poll() is None and found and found["pid"] == process.pid:
            return side
    return None


class Roads:
    """The roads of a node to both services."""

    def __init__(self, ports: list[int]) -> None:
        self.to = [Relay(port) for port in ports]
        self.options = [word for road in self.to for word in road.options]

    def cut(self, *, to_service: bool = False, to_agent: bool = False) -> None:
        for road in self.to:
            road.cut(to_service=to_service, to_agent=to_agent)

    def mend(self) -> None:
        for road in self.to:
            road.mend()

    def close(self) -> None:
        for road in self.to:
            road.close()


class PairWorld(ClusterWorld):
    """Two services, their agents, and the roads between all of them. `sides` are the processes of the services."""

    relays: dict[str, Roads]

    def __init__(self, folder: Path, address: str, nodes=(), **options) -> None:
        super().__init__(folder, nodes, **options)
        self.address, self.ports = address, free_ports(2, base=15000)
        self.database = [Relay(urlsplit(address).port) for _ in SIDES]
        self.sides: list[subprocess.Popen | None] = [None, None]

    def __exit__(self, *_):
        for name in list(self.agents):
            self.kill_agent(name)
        for process in self.sides:
            if process is not None and process.poll() is None:
                process.kill()
                process.wait(10)
        super().__exit__()
        for road in self.database:
            road.close()

    def new_roads(self) -> Roads:
        return Roads(self.ports)

    # ---- services --------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Start the services that do not run, and wait until one leads."""
        for side in SIDES:
            self.serve_side(side)
        until(self._answers, START_S, self.said)

    def serve_side(self, side: int) -> None:
        process = self.sides[side]
        if process is not None and process.poll() is None:
            return
        port = urlsplit(self.address).port
        road = int(self.database[side].url.rpartition(":")[2])
        words = ["serve", "--home", str(self.home), "--port", str(self.ports[side])]
        words += ["--database", self.address.replace(f":{port}/", f":{road}/"), *self.executor_options()]
        words += ["--jobs-per-gpu", str(self.jobs_per_gpu)]
        with (self.folder / f"serve-{side}.log").open("ab") as log:
            self.sides[side] = subprocess.Popen([*worlds.COMMAND, *words], stdout=log, stderr=log, env=environment())

    def leader(self) -> int | None:
        """Return the side whose address clients find, if it runs."""
        return leading_side(self.home, self.sides)

    def until_it_stands_by(self, side: int) -> int:
        """Wait until a service stands by, and return its side."""
        until(lambda: "stands by" in (self.folder / f"serve-{side}.log").read_text(), 30, self.said)
        return side

    def kill_service(self) -> None:
        """Kill the service that leads."""
        process = self.sides[self.leader() or 0]
        process.kill()
        process.wait(10)

    def client(self) -> Client:
        return Client.find(self.home)

    def said(self, *names: str) -> str:
        return super().said(*(names or ("serve-0", "serve-1", *self.names)))
