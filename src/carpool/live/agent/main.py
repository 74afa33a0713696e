"""The process of an agent: `python -m carpool.live.agent.main`, with its settings as JSON on standard input.

`carpool agent` starts it through `supervisor.py`. It prints one line when it has joined, and ends on SIGTERM.
"""

import asyncio
import json
import logging
import signal
import sys
from typing import Any

from carpool.errors import InputError
from carpool.live.agent.agent import Agent, AgentOptions
from carpool.live.agent.road import Road
from carpool.live.agent.supervisor import REFUSED, die_with_parent
from carpool.live.grounds.base import make_witness
from carpool.live.home import Home


def make_agent(settings: dict[str, Any]) -> Agent:
    """Return the agent that these settings describe."""
    road = Road(settings["urls"], settings["token"], settings.get("ca"))
    options = AgentOptions(
        Home(settings["home"]),
        settings["node"],
        settings["address"],
        gpus=settings.get("gpus"),
        only=tuple(settings.get("only", ())),
        gpu_memory=settings.get("gpu_memory"),
        mps=settings.get("mps", True),
        emulated=settings.get("emulated", ""),
        ground=settings.get("ground", "hand"),
        pilot=settings.get("pilot", ""),
        leave_on_term=settings.get("leave_on_term", False),
        environment=settings.get("environment", {}),
    )
    return Agent(options, road, make_witness(settings.get("witness")))


async def _run(agent: Agent) -> None:
    loop = asyncio.get_running_loop()
    stop = agent.leave if agent.options.leave_on_term else agent.end
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, stop)
    await agent.run()


def main() -> int:
    die_with_parent()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    settings = json.loads(sys.stdin.read())
    try:
        asyncio.run(_run(make_agent(settings)))
    except InputError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main())
