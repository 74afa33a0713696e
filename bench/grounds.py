"""Measure the time from submit to the first line of a job's process, or to the first step of a training: local, by
agents, on Slurm and on Ray.

    python bench/grounds.py [--jobs 20] [--only local agents slurm ray] [--train]

Each ground has nodes already, as in use; a node that must be asked for first costs what its ground takes. Jobs are
submitted one after another by the Python client, and each writes the time at which it began: a shell, so that the time
is that of the scheduler and not of an interpreter. With `--train`, a job is a PyTorch training (gloo DDP) of two
workers, one on each of two nodes where there are nodes, and writes the time of its first step. Slurm and Ray run on
this machine (`make test-cluster` installs them), in clusters that the bench starts and ends.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent.parent))

import carpool
from tests.cluster.ground_world import RayWorld, SlurmWorld
from tests.cluster.world import ClusterWorld
from tests.support.ray_cluster import RayCluster
from tests.support.slurm import SlurmCluster

GROUNDS = ("local", "agents", "slurm", "ray")
SHELL = ["sh", "-c", "date +%s.%N"]
TRAINING = """
import time, torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(8, 4)).sum().backward()
optimizer.step()
print(time.time(), flush=True)
dist.destroy_process_group()
"""
SETTLE_S = 3.0
"""Pause before the first job, in which the ground and its agents finish their own start."""


class LocalWorld(ClusterWorld):
    """A service that runs jobs on its own machine."""

    def __init__(self, folder: Path, gpus: int) -> None:
        super().__init__(folder, (), gpus)

    def executor_options(self) -> list[str]:
        return ["--gpus", str(self.gpus)]


@contextmanager
def world_on(ground: str, folder: Path, gpus: int) -> Iterator[ClusterWorld]:
    """Start a service with two nodes of a ground, each with so many GPUs, or with two alone."""
    if ground == "slurm":
        with SlurmCluster(2) as slurm, SlurmWorld(folder, slurm, gpus=gpus) as world:
            world.until_nodes(2)
            yield world
    elif ground == "ray":
        with RayCluster(2) as ray, RayWorld(folder, ray, gpus=gpus) as world:
            world.until_nodes(2)
            yield world
    else:
        with LocalWorld(folder, 2) if ground == "local" else ClusterWorld(folder, gpus=gpus) as world:
            yield world


def delays(world: ClusterWorld, count: int, command: list[str], workers: int) -> list[float]:
    """Return the seconds from submit to the time that a job writes, job by job."""
    connection = carpool.connect(home=world.home)
    found = []
    for _ in range(count):
        began = time.time()
        job = connection.submit(command, gpus=workers, clean_env=True)
        job.wait(120.0)
        found.append(float(job.logs()) - began)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--only", nargs="*", choices=GROUNDS, default=GROUNDS)
    parser.add_argument("--train", action="store_true")
    options = parser.parse_args()
    job = ([sys.executable, "-c", TRAINING], 2) if options.train else (SHELL, 1)
    for ground in options.only:
        gpus = 1 if options.train else 2
        with (
            tempfile.TemporaryDirectory(prefix="carpool-grounds-") as folder,
            world_on(ground, Path(folder), gpus) as world,
        ):
            time.sleep(SETTLE_S)
            found = sorted(delays(world, options.jobs, *job))
            print(f"{ground}: median {median(found):.2f} s, slowest {found[-1]:.2f} s of {len(found)} jobs", flush=True)


if __name__ == "__main__":
    main()
