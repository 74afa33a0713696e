"""`carpool serve --on slurm`, `--on ray` and `--emulate`: the options of grounds, and what `serve` makes from them."""

import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import click

from carpool.errors import InputError
from carpool.field_types import Duration
from carpool.live.commands.options import OptionType
from carpool.live.home import Home
from carpool.live.text import span

LEASE = "lease=1m"
"""Lease of nodes with a ground, which can be asked: shorter than by hand, because workers outlive it."""
FIELDS = [
    "nodes", "partition", "account", "time_limit", "sbatch", "ray_address", "join_url", "agent_home", "idle", "grow",
    "save_before",
]  # fmt: skip
Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass(frozen=True)
class GroundChoice:
    """What the operator chose; `name` is empty where agents are started by hand."""

    name: str
    nodes: tuple[int, int]
    partition: str
    account: str
    time_limit_s: float | None
    sbatch: str
    address: str
    join_urls: tuple[str, ...]
    agent_home: str
    idle_s: float
    grow_s: float
    save_s: float
    gpus: int | None = None
    mps: bool = True
    emulated: str = ""
    """File that describes emulated GPUs; empty: none."""

    def cannot_join(self, url: str) -> str:
        """Return a line for an operator whose nodes will not reach the service at `url`; empty: they may."""
        local = urlsplit(url).hostname in ("127.0.0.1", "::1", "localhost")
        if not local or self.join_urls or self.name not in ("slurm", "ray"):
            return ""
        return f"nodes on other machines cannot join {url}: give --host and a certificate, or --join-url"


def ground_options(command: Command) -> Command:
    """Add the options of grounds to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def take_emulated(options: dict[str, Any], home: Home) -> Any:
    """Take --emulate out of all options of `serve`; return the emulated GPUs, or None. Raise `InputError`."""
    text = options.pop("emulate")
    if text is None:
        return None
    from carpool.emulate.gpus import FILE, parse_gpus

    for name, neutral in (("gpus", None), ("profile", None), ("executor", "local")):
        if options[name] != neutral:
            raise InputError(f"--{name}: --emulate says it already; leave it out")
    found = parse_gpus(text)
    options |= {"perf": found.model(), "profile": found.profile, "emulated": str(home.emulated / FILE)}
    return found


def take_ground(options: dict[str, Any], emulated: Any = None) -> GroundChoice:
    """Take the options of grounds out of all options of `serve`, and choose the executor. Raise `InputError`.

    `emulated`: the emulated GPUs. Several nodes of them without another ground are a ground of their own."""
    given = {name: options.pop(name) for name in FIELDS}
    name = options.pop("ground") or ""
    if emulated is not None and given["nodes"] and not name:
        raise InputError("--nodes: --emulate says it already; leave it out")
    if emulated is not None and (name or emulated.nodes > 1):
        name, given["nodes"] = name or "emulated", given["nodes"] or str(emulated.nodes)
    if not name:
        wrong = [key for key, value in given.items() if value not in (None, "", ())]
        if wrong:
            raise InputError(f"--{wrong[0].replace('_', '-')}: belongs to a ground; add --on slurm or --on ray")
    for key, of in (("partition", "slurm"), ("account", "slurm"), ("sbatch", "slurm"), ("ray_address", "ray")):
        if given[key] and name != of:
            raise InputError(f"--{key.replace('_', '-')}: belongs to --on {of}; leave it out")
    choice = GroundChoice(
        name,
        _range(given["nodes"] or "1"),
        given["partition"] or "",
        given["account"] or "",
        given["time_limit"],
        given["sbatch"] or "",
        given["ray_address"] or "auto",
        tuple(given["join_url"]),
        str(given["agent_home"] or ""),
        300.0 if given["idle"] is None else given["idle"],
        5.0 if given["grow"] is None else given["grow"],
        300.0 if given["save_before"] is None else given["save_before"],
    )
    if not name:
        return choice
    executor = options["executor"] if options["executor"] != "local" else f"agents:{LEASE}"
    if executor.partition(":")[0] != "agents":
        raise InputError(f"--executor {executor}: --on {name} needs `agents`; leave --executor out")
    if "lease" not in executor:
        executor = f"{executor}{',' if ':' in executor else ':'}{LEASE}"
    choice = replace(choice, gpus=options["gpus"], mps=options["mps"], emulated=options.get("emulated", ""))
    options |= {"executor": executor, "gpus": None}
    return choice


def _range(text: str) -> tuple[int, int]:
    low, dash, high = text.partition("-")
    try:
        least, most = int(low), int(high if dash else low)
    except ValueError:
        raise InputError(f"--nodes {ascii(text)[:40]}: write a number, or two such as 1-4") from None
    if not 0 <= least <= most <= 100_000 or most < 1:
        raise InputError(f"--nodes {ascii(text)[:40]}: the second number must be at least 1 and not below the first")
    return least, most


def make_keeper(choice: GroundChoice, service: Any, home: Home, url: str, certificate: Path | None) -> Any:
    """Return the keeper of a ground and the key of its pilots' tokens."""
    from carpool.live.grounds.base import JoinTicket
    from carpool.live.grounds.tickets import PilotKey
    from carpool.live.service.ground_keeper import GroundKeeper, NodePlan

    key = PilotKey(home.pilot_key)
    text = certificate.read_text() if certificate is not None else ""
    urls = choice.join_urls or (url,)

    def ticket(pilot: str) -> JoinTicket:
        place = choice.agent_home or (str(home.emulated / "agents") if choice.name == "emulated" else "")
        made = (choice.gpus, choice.mps, place, key.service, choice.emulated)
        return JoinTicket(pilot, urls, key.token(pilot), text, *made)

    keeper = GroundKeeper(
        _ground(choice, home, key.service, service),
        NodePlan(*choice.nodes, choice.grow_s, choice.idle_s, choice.save_s),
        service.executor,
        service.state,
        service.inbox,
        service.clock,
        home,
        service.driver.dispatcher.longer_nodes,
        ticket,
    )
    return keeper, key


def _ground(choice: GroundChoice, home: Home, name: str, service: Any) -> Any:
    if choice.name == "emulated":
        from carpool.live.grounds.emulated import EmulatedGround

        return EmulatedGround(choice.nodes[1], home.pilots, home.address, lambda: not service.executor.present())
    if choice.name == "slurm":
        from carpool.live.grounds.slurm import SlurmGround, SlurmOptions

        extra = _words(choice.sbatch)
        options = SlurmOptions(choice.partition, choice.account, choice.time_limit_s, choice.save_s, extra)
        return SlurmGround(options, home.pilots, name)
    from carpool.live.grounds.ray import RayGround

    return RayGround(choice.address, name, any_node=choice.gpus is not None or bool(choice.emulated))


def _words(sbatch: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(sbatch))
    except ValueError as error:
        raise InputError(f"--sbatch {ascii(sbatch)[:100]}: {error}; write options as in a shell") from None


def check_ground(choice: GroundChoice) -> None:
    """Refuse a ground that is not installed, before anything is opened."""
    if choice.name == "slurm":
        from carpool.live.grounds.slurm import check_installed

        check_installed()
        _words(choice.sbatch)
        if choice.time_limit_s is not None and choice.time_limit_s <= choice.save_s:
            raise InputError(
                f"--time-limit: jobs save and move {span(choice.save_s)} before a node's end, so none would stay for "
                f"{span(choice.time_limit_s)}; give a longer one, or a shorter --save-before"
            )
    elif choice.name == "ray":
        from carpool.live.grounds.ray import check_installed as check_ray

        check_ray()


_TIME = OptionType(Duration(1.0, 1e9))
_OPTIONS = [
    click.option(
        "--emulate",
        metavar="PROFILE:NODESxGPUS[:SPEED]",
        help="Emulate GPUs of a profile, such as t4:4x4:60: four nodes of four T4s that are 60 times as fast.",
    ),
    click.option("--on", "ground", type=click.Choice(["slurm", "ray"]), help="Where nodes come from: Slurm or Ray."),
    click.option("--nodes", metavar="MIN-MAX", help="Number of nodes to get from there.  [default: 1]"),
    click.option("--partition", help="Slurm's partition."),
    click.option("--account", help="Slurm's account."),
    click.option("--time-limit", type=_TIME, metavar=Duration.metavar, help="Time limit of each node's Slurm job."),
    click.option("--sbatch", metavar="OPTIONS", help="More options of sbatch, such as '--gres=gpu:4'."),
    click.option("--ray-address", metavar="ADDRESS", help="Address of the Ray cluster.  [default: auto]"),
    click.option("--join-url", multiple=True, metavar="URL", help="Where agents reach this service. Repeatable."),
    click.option("--agent-home", metavar="DIRECTORY", help="Local directory on the nodes for agents.  [default: /tmp]"),
    click.option(
        "--grow-after",
        "grow",
        type=_TIME,
        metavar=Duration.metavar,
        help="Wait of a job before the cluster grows.  [default: 5s]",
    ),
    click.option(
        "--idle",
        type=_TIME,
        metavar=Duration.metavar,
        help="Time without a job after which a node is given back.  [default: 5m]",
    ),
    click.option(
        "--save-before",
        type=_TIME,
        metavar=Duration.metavar,
        help="Time before a node's end at which its jobs save and move.  [default: 5m]",
    ),
]
