"""The process of a pilot: `python -m carpool.live.agent.pilot slurm TICKET`, started by a ground on one machine; on Ray
it is `… pilot ray`, with the ticket on standard input, and `… pilot emulated` for an emulated node.

It reads its ticket, finds out where it is, and becomes the supervisor of an agent. The agent's home is on a local disk
under the node's name, so that a later pilot on the same machine finds what an earlier one left running.
"""

import json
import os
import stat
import sys
import tempfile
from pathlib import Path
from typing import Any

from carpool.errors import InputError
from carpool.live.agent.network import own_address
from carpool.live.agent.supervisor import die_with_parent, supervise
from carpool.live.grounds.base import JoinTicket
from carpool.live.grounds.slurm import node_name
from carpool.live.grounds.tickets import read_ticket, ticket_from


def settings_of(ticket: JoinTicket, ground: str, node: str, witness: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the agent of a pilot on this machine. Blocks."""
    home = agent_home(ticket, node)
    certificate = None
    if ticket.certificate:
        certificate = str(home / "service.pem")
        Path(certificate).write_text(ticket.certificate)
    return {
        "urls": list(ticket.urls),
        "token": ticket.token,
        "node": node,
        "address": own_address(ticket.urls[0]),
        "home": str(home),
        "gpus": ticket.gpus,
        "only": own_gpus(),
        "ca": certificate,
        "mps": ticket.mps,
        "emulated": ticket.emulated,
        "ground": ground,
        "pilot": ticket.pilot,
        "witness": witness,
        "leave_on_term": True,
        "environment": {key: value for key, value in os.environ.items() if key.startswith(("NCCL_", "GLOO_"))},
    }


def agent_home(ticket: JoinTicket, node: str) -> Path:
    """Return the home of this node's agent, made if it is missing. The folder for temporary files is open to all users,
    so a folder there that belongs to another user is refused."""
    top = Path(ticket.home or tempfile.gettempdir()) / f"carpool-{ticket.service}-{os.getuid()}"
    home = top / node
    for path in (top, home):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise InputError(f"{path}: belongs to another user; give `carpool serve` another --agent-home")
    return home


def own_gpus() -> list[str]:
    """Return the UUIDs of the GPUs that Slurm gave this pilot; empty: all that it sees."""
    given = os.environ.get("SLURM_JOB_GPUS", "")
    numbers = {int(word) for word in given.split(",") if word.isdecimal()}
    if not numbers:
        return []
    from carpool.gpu import nvml

    devices = nvml.devices()
    if len(devices) <= len(numbers):  # Slurm hides the others
        return []
    return [device.uuid for device in devices if device.index in numbers]


def slurm_settings(path: Path) -> dict[str, Any]:
    machine, job = os.environ.get("SLURMD_NODENAME", ""), os.environ.get("SLURM_JOB_ID", "")
    if not machine or not job:
        raise InputError("SLURM_JOB_ID and SLURMD_NODENAME are not set; Slurm starts this program")
    return settings_of(read_ticket(path), "slurm", node_name(machine), {"kind": "slurm", "job": job, "node": machine})


def emulated_settings(path: Path, node: str, record: str, address: str) -> dict[str, Any]:
    witness = {"kind": "emulated", "record": record, "address": address}
    return settings_of(read_ticket(path), "emulated", node, witness)


def main() -> int:
    try:
        if sys.argv[1] == "slurm":
            settings = slurm_settings(Path(sys.argv[2]))
        elif sys.argv[1] == "emulated":
            settings = emulated_settings(Path(sys.argv[2]), *sys.argv[3:6])
        else:  # the ticket comes through standard input
            die_with_parent()
            data = json.loads(sys.stdin.read())
            settings = settings_of(ticket_from(data["ticket"]), data["ground"], data["node"], data["witness"])
            # Ray ends what an actor started when the actor dies, and starts the actor again: that does not mean to
            # leave.
            settings |= {"address": data["address"], "leave_on_term": False}
    except InputError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return 2
    return supervise(settings)


if __name__ == "__main__":
    sys.exit(main())
