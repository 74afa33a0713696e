"""What a worker finds in its environment: its place in the gang, its GPUs, who it is, and nothing of the service's."""

import os
import pwd
import sys
from collections.abc import Sequence
from pathlib import Path

from carpool import channel
from carpool.live.accounts import account
from carpool.live.executors.base import Launch

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
TORCHRUN = ("torch.distributed.run", "torch.distributed.launch")


def one_process_per_node(command: Sequence[str]) -> bool:
    """Does the command start the workers itself?"""
    words = [Path(word).name for word in command[:6]]
    return words[0] == "torchrun" or any(word in TORCHRUN for word in words)


def environments(launch: Launch, port: int) -> list[dict[str, str]]:
    """What each process of the gang finds in its environment."""
    own = [[slot] for slot in launch.slots]
    if one_process_per_node(launch.command):
        own = [list(launch.slots)]
    environments = []
    for number, slots in enumerate(own):
        environments.append(
            {
                "RANK": str(number),
                "LOCAL_RANK": str(number),
                "WORLD_SIZE": str(len(own)),
                "LOCAL_WORLD_SIZE": str(len(own)),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "CUDA_VISIBLE_DEVICES": ",".join(slot.uuid for slot in launch.slots if slot.uuid),
                "CARPOOL_GPUS": ",".join(slot.name for slot in slots),
                "CARPOOL_JOB": launch.job,
                channel.ENV_ATTEMPT: str(launch.attempt),
            }
        )
    return environments


def base_environment(user: pwd.struct_passwd | None) -> dict[str, str]:
    """Who one is and where programs are: nothing else of ours gets into a job."""
    me = user or account(os.getuid())
    programs = f"{Path(sys.executable).parent}:{DEFAULT_PATH}"
    who = {"HOME": me.pw_dir, "USER": me.pw_name, "LOGNAME": me.pw_name, "SHELL": me.pw_shell or "/bin/sh"}
    return {"PATH": programs, "LANG": "C.UTF-8", **who}
