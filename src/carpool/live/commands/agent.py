"""`carpool agent`: this machine as a node of a cluster, in the foreground, until SIGTERM or Ctrl-C."""

import os
import re
import socket
import sys
from pathlib import Path

import click

from carpool.errors import InputError
from carpool.live.home import default_home

ENV_TOKEN = "CARPOOL_JOIN_TOKEN"
NODE = re.compile(r"[a-z0-9][a-z0-9_.-]{0,62}")


@click.command()
@click.option("--join", "urls", multiple=True, required=True, metavar="URL", help="Address of the service. Repeatable.")
@click.option(
    "--token-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help=f"File with the join token.  [default: {ENV_TOKEN}]",
)
@click.option("--name", help="Name of the node, as its token has it.  [default: the host name]")
@click.option("--gpus", type=click.IntRange(1, 4096), help="Number of logical GPUs, instead of the real ones.")
@click.option("--address", help="Address at which other nodes reach this one.  [default: the one towards the service]")
@click.option(
    "--home",
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory of the agent, on a local disk.  [default: `agent` in the home directory of a service]",
)
@click.option(
    "--ca", type=click.Path(path_type=Path, dir_okay=False), help="Certificate to check that of the service with."
)
@click.option("--no-mps", is_flag=True, help="Share GPUs by time-slicing.")
@click.option("--leave", is_flag=True, help="On SIGTERM, let jobs save and take the node out of the cluster.")
def agent(
    urls: tuple[str, ...],
    token_file: Path | None,
    name: str | None,
    gpus: int | None,
    address: str | None,
    home: Path | None,
    ca: Path | None,
    no_mps: bool,
    leave: bool,
) -> None:
    """Let a service on another machine run jobs on this one. Jobs outlive the agent until the node's lease is over."""
    from carpool.live.agent.network import own_address
    from carpool.live.agent.road import Road
    from carpool.live.agent.supervisor import supervise

    node = name or _host_name()
    if not NODE.fullmatch(node):
        raise InputError(f"--name {ascii(node)[:80]}: use lower-case letters, digits, dots and dashes")
    token = _token(token_file)
    if ca is not None and not any(url.startswith("https:") for url in urls):
        raise InputError("--ca: belongs to an address that begins with https://; correct --join, or leave --ca out")
    Road(urls, token, str(ca) if ca else None)  # refuses what cannot work
    place = home or default_home() / "agent"
    settings = {
        "urls": list(urls),
        "token": token,
        "node": node,
        "address": address or own_address(urls[0]),
        "home": str(place.expanduser().absolute()),
        "gpus": gpus,
        "ca": str(ca.absolute()) if ca else None,
        "mps": not no_mps,
        "leave_on_term": leave,
        "environment": {key: value for key, value in os.environ.items() if key.startswith(("NCCL_", "GLOO_"))},
    }
    click.echo(f"node {node} joins {', '.join(urls)}; home {settings['home']}", err=True)
    sys.exit(supervise(settings))


def _host_name() -> str:
    return socket.gethostname().partition(".")[0].lower()


def _token(path: Path | None) -> str:
    """Return the join token, and remove it from the environment, which jobs' processes could read."""
    from_environment = os.environ.pop(ENV_TOKEN, "")
    if path is None:
        if not from_environment:
            raise InputError(f"no join token: set {ENV_TOKEN}, or give --token-file; `carpool nodes add` makes one")
        return from_environment.strip()
    from carpool.live.http.auth import read_token

    return read_token(path, "get a new one with `carpool nodes revoke` and `carpool nodes add`")
