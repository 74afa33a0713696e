"""The environment of a worker: its rank in the gang, its GPUs, its user, and nothing from the service's environment."""

import os
import pwd
import sys
from collections.abc import Sequence
from pathlib import Path

from carpool import channel
from carpool.live.accounts import account
from carpool.live.executors.base import GpuSlot, Launch
from carpool.watch import INJECTED

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
TORCHRUN = ("torch.distributed.run", "torch.distributed.launch")


def one_process_per_node(command: Sequence[str]) -> bool:
    """Return whether the command starts the workers of a node itself, as torchrun does."""
    words = [Path(word).name for word in command[:6]]
    return words[0] == "torchrun" or any(word in TORCHRUN for word in words)


def first_rank(launch: Launch) -> int:
    """Return the rank of the first process here: 0, unless others of the gang run on other nodes."""
    if launch.part is None:
        return 0
    return launch.part.node_rank if one_process_per_node(launch.command) else launch.part.first_rank


def meeting_point(launch: Launch, address: str, port: int) -> dict[str, str]:
    """Return the variables by which the workers of a gang over several nodes find each other."""
    if launch.part is not None and one_process_per_node(launch.command):  # torchrun reads these
        return {"PET_MASTER_ADDR": address, "PET_MASTER_PORT": str(port)}
    return {"MASTER_ADDR": address, "MASTER_PORT": str(port)}


def rank_environments(launch: Launch, gang_slots: Sequence[GpuSlot], port: int) -> list[dict[str, str]]:
    """Return the variables that each process of the gang gets, in the order of the ranks."""
    slots_by_rank = [[slot] for slot in gang_slots]
    part, first = launch.part, first_rank(launch)
    more: dict[str, str] = {}
    size = part.world_size if part is not None else len(gang_slots)
    if one_process_per_node(launch.command) or launch.idle_s is not None:
        slots_by_rank = [list(gang_slots)]
        size = part.nodes if part is not None else 1
        if part is not None:
            numbers = {"NNODES": part.nodes, "NODE_RANK": part.node_rank, "NPROC_PER_NODE": len(gang_slots)}
            more = {f"PET_{name}": str(number) for name, number in numbers.items()}
    # Hugging Face's libraries take a worker that has LOCAL_RANK for one of several, and wrap its model accordingly.
    together, here = size > 1, str(len(slots_by_rank))
    return [
        {
            "RANK": str(first + number),
            "WORLD_SIZE": str(size),
            **({"LOCAL_RANK": str(number), "LOCAL_WORLD_SIZE": here} if together else {}),
            **meeting_point(launch, "127.0.0.1", port),
            **more,
            "CUDA_VISIBLE_DEVICES": ",".join(slot.uuid for slot in gang_slots if slot.uuid),
            "CARPOOL_GPUS": ",".join(slot.label for slot in slots),
            "CARPOOL_JOB": launch.job,
            channel.ENV_ATTEMPT: str(launch.attempt),
        }
        for number, slots in enumerate(slots_by_rank)
    ]


def watch_python(environment: dict[str, str]) -> None:
    """Let the job's Python processes be watched: see `carpool.watch`."""
    own = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = f"{INJECTED}{os.pathsep}{own}" if own else str(INJECTED)


def base_environment(user: pwd.struct_passwd | None) -> dict[str, str]:
    """Return the variables that every worker needs: its user and where programs are."""
    owner = user or account(os.getuid())
    return {
        "PATH": f"{Path(sys.executable).parent}:{DEFAULT_PATH}",
        "LANG": "C.UTF-8",
        "HOME": owner.pw_dir,
        "USER": owner.pw_name,
        "LOGNAME": owner.pw_name,
        "SHELL": owner.pw_shell or "/bin/sh",
    }
