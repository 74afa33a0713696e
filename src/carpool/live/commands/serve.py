"""`carpool serve`: the service and its HTTP API in one process, in the foreground, until SIGTERM or Ctrl-C.

Stopping it stops nothing else: workers run on under their own wrappers and are found again at the next start. The
socket is bound before anything is begun, so that a busy port is one clear line and never half a service.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from carpool.errors import InputError
from carpool.live.commands.options import home_option
from carpool.live.home import Home

PORT = 8471
TRUST = (
    "jobs run as {user}, the user of this service: those who may submit can read and change each other's files, "
    "so let in only people who trust each other (started as root, every job runs as its own user)"
)
OPEN = "anybody who reaches {host} can talk to this service, and tokens travel in clear text: put TLS in front of it"


@click.command()
@home_option
@click.option("--gpus", type=click.IntRange(1, 4096), help="Logical GPUs instead of those that NVML finds.")
@click.option("--policy", default="sjf-bsbf", show_default=True, help="See `carpool policies`.")
@click.option("--jobs-per-gpu", type=click.IntRange(1, 100), default=2, show_default=True, help="Most jobs on a GPU.")
@click.option("--profile", help="What is known of jobs: a shipped name or a file.  [default: h200 on an H200, else t4]")
@click.option("--port", type=click.IntRange(0, 65535), default=PORT, show_default=True, help="0: any free one.")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option("--host-name", "names", multiple=True, help="A name by which clients reach it, besides loopback.")
def serve(home: Path | None, port: int, host: str, names: tuple[str, ...], **options: Any) -> None:
    """Schedule jobs on this machine, in the foreground, until SIGTERM. Jobs outlive it."""
    _check_installed()
    from carpool import policies
    from carpool.profile.schema import load

    policies.make(options["policy"])
    if options["profile"] is not None:
        load(options["profile"])
    place = Home(home)
    place.create()
    with _bound(host, port) as listening:
        logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        code = asyncio.run(_serve(place, listening, names, **options))
    sys.exit(code)


def _check_installed() -> None:
    missing = [name for name in ("fastapi", "uvicorn", "sqlalchemy") if find_spec(name) is None]
    if missing:
        raise InputError(f"`carpool serve` needs {', '.join(missing)}: pip install 'carpool[live]'")


@contextmanager
def _bound(host: str, port: int) -> Iterator[socket.socket]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listening = socket.socket(*found[:3])
    except (OSError, UnicodeError):
        raise InputError(
            f"--host {host!a}: is no address of this machine; leave it out to listen on loopback"
        ) from None
    with listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(found[4])
        except OSError as error:
            remedy = "another program listens there; give another --port (0: any free one)"
            if isinstance(error, PermissionError) or "in use" not in (error.strerror or ""):
                remedy = f"{error.strerror}; give another --host or --port"
            raise InputError(f"port {port} on {host}: {remedy}") from None
        yield listening


def _url(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def _serve(place: Home, listening: socket.socket, names: tuple[str, ...], **options: Any) -> int:
    from carpool.live.http.auth import Keyring, admin_token, digest
    from carpool.live.service.service import Service

    service = Service(place, **options)
    await service.start()
    try:
        token = admin_token(place.admin_token)
        known = {name: row["token_hash"] for name, row in service.queries.users().items() if row.get("token_hash")}
        server = _server(service, place, Keyring(digest(token), known), listening, names, options)
        url = _url(listening)
        listening.listen(128)  # who reads the address may call at once, and is answered a moment later
        place.write_address(url)
        _greet(url, place, service, options)
        return await _until_told(service, server, listening)
    finally:
        place.remove_address()
        await service.stop()


def _server(service: Any, place: Home, keyring: Any, listening: Any, names: tuple[str, ...], options: Any) -> Any:
    import uvicorn

    from carpool.live.http.api import ApiContext, create_app

    class Quiet(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # signals are ours: they end the service too

    hosts = (*names, listening.getsockname()[0])
    box = ApiContext(
        service,
        place,
        keyring,
        policy=options["policy"],
        jobs_per_gpu=options["jobs_per_gpu"],
        as_root=os.geteuid() == 0,
        hosts=hosts,
    )
    config = uvicorn.Config(
        create_app(box),
        access_log=False,
        log_config=None,
        lifespan="off",
        server_header=False,
        limit_concurrency=500,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=2,
        h11_max_incomplete_event_size=32_768,
        ws="none",
    )
    return Quiet(config)


def _greet(url: str, place: Home, service: Any, options: dict[str, Any]) -> None:
    from carpool.live.commands.tables import gpus_of

    gpus = service.queries.gpus()
    number, mechanism = len(gpus_of(gpus)), gpus.get("mechanism")
    kind = "logical GPUs" if options["gpus"] else "GPUs"
    click.echo(f"carpool serves {number} {kind} ({mechanism}) under {options['policy']} at {url}", err=True)
    click.echo(f"home {place.path}; SIGTERM or Ctrl-C ends the service, jobs go on", err=True)
    if os.geteuid() != 0:
        import getpass

        try:
            user = getpass.getuser()
        except (KeyError, OSError):
            user = f"uid {os.geteuid()}"
        click.echo(TRUST.format(user=user), err=True)
    host = url.split("//")[1].rpartition(":")[0].strip("[]")
    if host not in ("127.0.0.1", "::1", "localhost"):
        click.echo(OPEN.format(host=host), err=True)


async def _until_told(service: Any, server: Any, listening: socket.socket) -> int:
    """Run both until a signal comes or one of them fails."""
    loop, told = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, told.set)
    scheduling = asyncio.create_task(service.run(), name="scheduling")
    answering = asyncio.create_task(server.serve(sockets=[listening]), name="answering")
    waiting = asyncio.create_task(told.wait(), name="signals")
    done, _ = await asyncio.wait({scheduling, answering, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    server.should_exit = True
    failed = [task for task in done if task is not waiting and not task.cancelled() and task.exception()]
    await asyncio.wait({answering}, timeout=5.0)
    await service.stop()
    scheduling.cancel()
    await asyncio.gather(scheduling, answering, waiting, return_exceptions=True)
    for task in failed:
        error = task.exception()
        if isinstance(error, InputError):
            raise error
        logging.getLogger("carpool.serve").critical("%s ended", task.get_name(), exc_info=error)
    return 1 if failed or not told.is_set() else 0
