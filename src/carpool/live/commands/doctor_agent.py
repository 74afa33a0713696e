"""What `carpool doctor` says on a node: whether its agent runs, and whether its lease is renewed."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from carpool.errors import InputError
from carpool.live.agent.lease import SAVE_SHARE, NodeLease
from carpool.live.agent.memory import AgentMemory
from carpool.live.clock import since_boot
from carpool.live.commands.diagnosis import Diagnosis
from carpool.live.home import Home
from carpool.live.text import span


def is_agents_home(place: Home) -> bool:
    with contextlib.suppress(OSError):
        return (place.path / "agent.json").exists()
    return False


def examine_agent(place: Home) -> Iterator[Diagnosis]:
    """Check the agent that has its home here, or in the folder of the default home."""
    for home in (place, Home(place.path / "agent")):
        if is_agents_home(home):
            yield _agent(home)


def _agent(home: Home) -> Diagnosis:
    memory = home.path / "agent.json"
    if os.access(memory, os.R_OK):
        try:
            AgentMemory(memory).load()
        except InputError as error:
            return Diagnosis("agent", "error", str(error), "it does not start before that")
    lease = NodeLease(home.path / "lease")
    length = lease.load()
    left = 0.0 if length is None else lease.until - since_boot()
    jobs = f"workers here may run for {span(left)} more" if left > 0.0 else "no worker may run here"
    if not _is_locked(home.lock):
        found = f"none runs for {home.path}; {jobs}"
        return Diagnosis("agent", "error" if left > 0.0 else "warning", found, "start `carpool agent` again")
    if length is None or left < SAVE_SHARE * length:
        found = f"runs, and its lease is not renewed; {jobs}"
        return Diagnosis("agent", "error", found, "see its output: is the service there, and the join token valid?")
    return Diagnosis("agent", "ok", f"runs; its lease of {span(length)} is renewed")


def _is_locked(path: Path) -> bool:
    """Return whether a process uses a home. Reading the lock of another user's home is not possible: it counts so."""
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False
