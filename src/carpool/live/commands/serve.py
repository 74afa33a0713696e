"""`carpool serve`: the service and its HTTP API in one process, in the foreground, until SIGTERM or Ctrl-C.

Stopping it stops no job: workers keep running under their own wrappers, and the next start finds them. The socket is
bound before anything else, so that a busy port is reported in one line before a service is opened. A service that
stands by does not listen: a client that tries several addresses is refused at once.
"""

import asyncio
import gc
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

from carpool.core.state import RESIDENT_PER_GPU
from carpool.errors import InputError
from carpool.field_types import ByteSize, Duration
from carpool.job_schema import MAX_NUMBER
from carpool.live.commands.notice_options import notice_options, take_notices
from carpool.live.commands.options import ENV_DATABASE, OptionType, database_option, home_option
from carpool.live.commands.serve_ground import (
    GroundChoice,
    check_ground,
    ground_options,
    make_keeper,
    take_emulated,
    take_ground,
)
from carpool.live.errors import Deposed
from carpool.live.home import Home
from carpool.live.service.retention import RetentionLimits

PORT = 8471
COLLECT = (10_000, 10, 10)
"""Thresholds of Python's garbage collection. With 10,000 jobs, a full collection stops everything else for a part of a
second, and with Python's own thresholds it runs every few seconds."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SWEEP_S = 60.0
"""Seconds between two looks for uploads that no job has used."""
DEFAULT = RetentionLimits()
TRUST = (
    "jobs run as {user}, the user of this service: users can read and change each other's files, "
    "so add only users who trust each other (a service started as root runs each job as its own user)"
)
DEPOSED = 3
"""Exit code of a service that another one has replaced."""
VISIBLE = (
    "the password in --database can be read by every user who lists the processes of this machine; "
    "write it into ~/.pgpass or into the file that PGPASSFILE names"
)
WIDE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Addresses that stand for all of a machine, with the one that clients on it use."""
CERTIFIED = "everyone who reaches {host} can talk to this service, over TLS"
OPEN = "everyone who reaches {host} can talk to this service, and tokens are sent in clear text: put TLS in front of it"


@click.command()
@home_option
@database_option
@click.option(
    "--machine-is-gone",
    is_flag=True,
    help="Take over a journal whose jobs ran on another machine, which will not come back with them running.",
)
@click.option("--gpus", type=click.IntRange(1, 4096), help="Number of logical GPUs, instead of the real ones.")
@click.option("--policy", default="carpool", show_default=True, help="Scheduling policy; see `carpool policies`.")
@click.option(
    "--executor",
    default="local",
    show_default=True,
    metavar="NAME[:KEY=VALUE,...]",
    help="Where jobs run: `local` is this machine, `agents` a cluster; installed packages may add others.",
)
@click.option(
    "--jobs-per-gpu",
    type=click.IntRange(1, 100),
    show_default="6 for `carpool`, 2 for others",
    help="Maximum number of jobs that compute on a GPU.",
)
@click.option(
    "--mps/--no-mps",
    default=True,
    show_default=True,
    help="Share GPUs by MPS where it is available, else by time-slicing.",
)
@click.option(
    "--resident-per-gpu",
    type=click.IntRange(1, 100),
    default=RESIDENT_PER_GPU,
    show_default=True,
    help="Maximum number of jobs on a GPU, paused ones included.",
)
@click.option(
    "--pause-patience",
    "pause_patience_s",
    type=OptionType(Duration(1.0, 1e9)),
    metavar=Duration.metavar,
    default="10m",
    show_default=True,
    help="Time without a service after which paused jobs go on.",
)
@click.option(
    "--gang-pause",
    "gang_pause_s",
    type=OptionType(Duration(1.0, 1e9)),
    metavar=Duration.metavar,
    default="4m",
    show_default=True,
    help="Time for which `carpool pause` may pause a job of several GPUs that does not use the training library.",
)
@click.option(
    "--max-grace",
    "max_grace_s",
    type=OptionType(Duration(1.0, 86_400.0)),
    metavar=Duration.metavar,
    default="1h",
    show_default=True,
    help="Longest `--grace` of a job: time that it may stay on its GPUs when it is stopped, also at its time limit.",
)
@click.option(
    "--max-snapshots",
    type=OptionType(ByteSize(2**20, 2**60)),
    default=2**34,
    help="Size of the code snapshots of each user's jobs that have not ended.  [default: 16GiB]",
)
@click.option(
    "--keep-files",
    type=OptionType(Duration(60.0, MAX_NUMBER)),
    default=DEFAULT.files_s,
    help="Time for which logs and code snapshots are kept after a job's end.  [default: 30d]",
)
@click.option(
    "--keep-checkpoints",
    type=OptionType(Duration(60.0, MAX_NUMBER)),
    default=DEFAULT.checkpoints_s,
    help="Time for which checkpoints are kept after a job's end, unless their owner releases them.  [default: 90d]",
)
@click.option(
    "--keep-size",
    type=OptionType(ByteSize(2**20, 2**60)),
    default=DEFAULT.size,
    help="Size of the logs and code snapshots of each user's ended jobs.  [default: 20GiB]",
)
@click.option("--profile", help="Profile of tasks: a shipped name or a file.  [default: h200 on an H200, else t4]")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=PORT,
    show_default=True,
    help="Port to listen on; 0: any free port.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--host-name",
    "names",
    multiple=True,
    help="Host name in the URLs of clients; needed where they use a name other than localhost. Repeatable.",
)
@click.option(
    "--tls-certificate", "certificate", type=click.Path(path_type=Path, dir_okay=False), help="Certificate for HTTPS."
)
@click.option("--tls-key", "key", type=click.Path(path_type=Path, dir_okay=False), help="Key of the certificate.")
@ground_options
@notice_options
def serve(
    home: Path | None, port: int, host: str, names: tuple[str, ...], database: str | None, **options: Any
) -> None:
    """Run the scheduling service in the foreground until SIGTERM. Jobs outlive it."""
    _check_installed()
    from carpool import policies
    from carpool.live.http.tls import check_files
    from carpool.live.service.config import ServiceConfig
    from carpool.policies.base import BasePolicy
    from carpool.profile.schema import load

    tls = (options.pop("certificate"), options.pop("key"))
    check_files(*tls)
    place = Home(home)
    emulated = take_emulated(options, place)
    choice = take_ground(options, emulated)
    check_ground(choice)
    policy = policies.make(options["policy"])
    if options["jobs_per_gpu"] is None:
        options["jobs_per_gpu"] = getattr(policy, "jobs_per_gpu", BasePolicy.jobs_per_gpu)
    if options["profile"] is not None:
        load(options["profile"])
    kept = RetentionLimits(options.pop("keep_files"), options.pop("keep_checkpoints"), options.pop("keep_size"))
    notices = take_notices(options)
    config = ServiceConfig(place, retention=kept, database=_database(database), notices=notices, **options)
    if config.database is None or emulated is not None:
        place.create()
    if config.database is None:  # first: a port that is in use may be that of this home's service
        place.acquire_ahead()  # clients wait for a service whose home is locked
    with _released(place), _bound(host, port) as listening:
        if emulated is not None:
            emulated.write(place.emulated)
        logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        try:
            gc.set_threshold(*COLLECT)
            code = asyncio.run(_serve(config, listening, names, tls, choice))
        except OSError as error:
            where = error.filename or place.path
            raise InputError(f"{where}: {error.strerror or error}; make the home writable, or give --home") from None
    sys.exit(code)


def _database(address: str | None) -> Any:
    """Return the database of the journal, if one is given, and hide its password from all processes started later."""
    os.environ.pop(ENV_DATABASE, None)
    if not address:
        return None
    from carpool.live.journal.postgres import PostgresJournal

    database = PostgresJournal(address)
    if find_spec("psycopg") is None:
        raise InputError("--database: psycopg is not installed: pip install 'carpool[postgres]'")
    database.take_secrets()
    if database.has_password:
        click.echo(VISIBLE, err=True)
    return database


def _check_installed() -> None:
    missing = [name for name in ("fastapi", "uvicorn", "sqlalchemy") if find_spec(name) is None]
    if missing:
        raise InputError(f"`carpool serve` needs {', '.join(missing)}: pip install 'carpool[live]'")


@contextmanager
def _released(place: Home) -> Iterator[None]:
    """Unlock the home at the end, also of a service that did not start."""
    try:
        yield
    finally:
        place.release()


@contextmanager
def _bound(host: str, port: int) -> Iterator[socket.socket]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listening = socket.socket(*found[:3])
    except (OSError, UnicodeError):
        raise InputError(
            f"--host {host!a}: is not an address of this machine; leave it out to listen on loopback"
        ) from None
    with listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(found[4])
        except OSError as error:
            remedy = "another program listens there; give another --port (0: any free port)"
            if isinstance(error, PermissionError) or "in use" not in (error.strerror or ""):
                remedy = f"{error.strerror}; give another --host or --port"
            raise InputError(f"port {port} on {host}: {remedy}") from None
        yield listening


def _url(listening: socket.socket, shared: str = "", *, scheme: str = "http") -> str:
    """Return where clients find the service. `shared`: name of this machine, where those on other machines look too."""
    host, port = listening.getsockname()[:2]
    if host in WIDE:
        host = shared or WIDE[host]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _is_called_by_other_machines(config: Any) -> bool:
    """Return whether agents or clients on other machines read the service's address in its home."""
    return config.database is not None or str(config.executor).partition(":")[0] == "agents"


def _publish_certificate(place: Home, certificate: Path | None) -> None:
    """Copy the certificate into the home, for the clients that look there; without one, remove an earlier copy."""
    if certificate is None:
        place.certificate.unlink(missing_ok=True)
    else:
        place.certificate.write_bytes(certificate.read_bytes())


async def _serve(
    config: Any,
    listening: socket.socket,
    names: tuple[str, ...],
    tls: tuple[Path | None, Path | None],
    choice: GroundChoice,
) -> int:
    from carpool.live.http.auth import AGENT, Keyring, admin_token, digest

    place = config.home
    service = await _opened(config)
    if service is None:
        return 0
    scheme = "https" if tls[0] else "http"
    url = _url(listening, scheme=scheme)
    try:
        token = admin_token(place.admin_token)
        known = {name: row["token_hash"] for name, row in service.queries.users().items() if row.get("token_hash")}
        rows = service.queries.users().items()
        speaking = {name: str(row["node"]) for name, row in rows if row.get("role") == AGENT}
        if _is_called_by_other_machines(config) and listening.getsockname()[0] in WIDE:
            names = names or (socket.gethostname(),)
            url = _url(listening, names[0], scheme=scheme)
        keyring, keeper = Keyring(digest(token), known, speaking), None
        if choice.name:
            keeper, key = make_keeper(choice, service, place, url, tls[0])
            if problem := choice.cannot_join(url):
                click.echo(problem, err=True)
            keyring.pilot_of = key.pilot_of
        context = _context(service, config, keyring, listening, names, keeper)
        server = _server(context, tls)
        _publish_certificate(place, tls[0])
        listening.listen(1024)  # a client that reads the address may connect at once
        place.write_address(url)
        _greet(url, config, service, listening.getsockname()[0])
        return await _run_until_signal(service, server, context, listening)
    finally:
        place.remove_address(url)
        await service.close()


async def _opened(config: Any) -> Any:
    """Return the service as soon as it leads; None: a signal came before."""
    from carpool.live.service.service import open_service

    if config.database is None:
        return await open_service(config)
    # A service that takes over must answer soon, so it loads everything before.
    import uvicorn  # noqa: F401

    from carpool.live.http import api, job_routes, service_routes  # noqa: F401

    def waiting(leader: Any) -> None:
        who = f"{leader.holder} has term {leader.term} of {config.database}"
        click.echo(f"carpool stands by: {who}; this service leads when that one is silent or ends", err=True)

    loop, signalled = asyncio.get_running_loop(), asyncio.Event()
    for number in SIGNALS:
        loop.add_signal_handler(number, signalled.set)
    opening = asyncio.create_task(open_service(config, waiting))
    stopping = asyncio.create_task(signalled.wait())
    await asyncio.wait({opening, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not opening.done():
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
        return None
    return opening.result()


def _context(
    service: Any, config: Any, keyring: Any, listening: Any, names: tuple[str, ...], keeper: Any = None
) -> Any:
    from carpool.live.http.api import ApiContext

    return ApiContext(
        service,
        config.home,
        keyring,
        policy=config.policy,
        jobs_per_gpu=config.jobs_per_gpu,
        as_root=os.geteuid() == 0,
        hosts=(*names, listening.getsockname()[0]),
        keeper=keeper,
    )


def _server(context: Any, tls: tuple[Path | None, Path | None] = (None, None)) -> Any:
    import uvicorn
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    from carpool.live.http.api import create_app
    from carpool.live.http.connections import Rooms, guarded_protocol
    from carpool.live.http.open_files import RESERVED, raise_limit

    class SignalFreeServer(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # signals end the service too, so they are handled below

    settings = uvicorn.Config(
        create_app(context),
        access_log=False,
        log_config=None,
        lifespan="off",
        server_header=False,
        http=guarded_protocol(AutoHTTPProtocol, Rooms(raise_limit() - RESERVED)),
        timeout_keep_alive=30,
        timeout_graceful_shutdown=2,
        h11_max_incomplete_event_size=32_768,
        ws="none",
        ssl_certfile=tls[0],
        ssl_keyfile=tls[1],
    )
    return SignalFreeServer(settings)


def _greet(url: str, config: Any, service: Any, listens_on: str) -> None:
    from carpool.live.commands.tables import gpus_of

    gpus = service.queries.gpus()
    number, mechanism = len(gpus_of(gpus)), gpus.get("mechanism")
    kind, shared = ("logical GPU", "") if mechanism == "logical" else ("GPU", f" ({mechanism})" if mechanism else "")
    if config.emulated:
        from carpool.emulate.gpus import read_gpus

        emulated = read_gpus(config.emulated)
        number, kind = emulated.nodes * emulated.gpus, "GPU"
        shared = f" ({emulated.label}, {emulated.nodes} × {emulated.gpus}, slow-downs of {emulated.interference})"
    plural = "" if number == 1 else "s"
    click.echo(f"carpool serves {number} {kind}{plural}{shared} under {config.policy} at {url}", err=True)
    click.echo(f"dashboard at {url}; sign in with the token in {config.home.admin_token}", err=True)
    if config.database is not None:
        click.echo(f"leads in term {service.store.leadership.term} of {config.database}", err=True)
    click.echo(f"home {config.home.path}; SIGTERM or Ctrl-C ends the service, jobs keep running", err=True)
    if os.geteuid() != 0:
        import getpass

        try:
            user = getpass.getuser()
        except (KeyError, OSError):
            user = f"uid {os.geteuid()}"
        click.echo(TRUST.format(user=user), err=True)
    if listens_on in ("0.0.0.0", "::"):
        click.echo(f"listens on {listens_on}: other machines can reach it", err=True)
    if listens_on not in ("127.0.0.1", "::1", "localhost"):
        click.echo((CERTIFIED if url.startswith("https:") else OPEN).format(host=listens_on), err=True)


def _leave(deposed: BaseException | None) -> None:
    """End this process as if it were killed: home and jobs are those of the service that leads."""
    print(f"error: {deposed}", file=sys.stderr, flush=True)
    os._exit(DEPOSED)


async def _sweep(uploads: Any) -> None:
    """Remove uploads that no job has used, also where no user uploads any more."""
    while True:
        await asyncio.to_thread(uploads.forget_old)
        await asyncio.sleep(SWEEP_S)


async def _keep(keeper: Any) -> None:
    """Get nodes from the ground, if there is one."""
    if keeper is None:
        return
    try:
        await keeper.run()
    finally:
        await keeper.ground.close()


async def _run_until_signal(service: Any, server: Any, context: Any, listening: socket.socket) -> int:
    """Run service and HTTP server until a signal comes or one of them fails; return the exit code."""
    from carpool.live.http.open_files import AcceptFaults

    loop, signalled = asyncio.get_running_loop(), asyncio.Event()
    loop.set_exception_handler(AcceptFaults().handle)
    for number in SIGNALS:
        loop.add_signal_handler(number, signalled.set)
    sweeping = asyncio.create_task(_sweep(context.uploads), name="sweeping")
    keeping = asyncio.create_task(_keep(context.keeper), name="keeping")
    scheduling = asyncio.create_task(service.run(), name="scheduling")
    answering = asyncio.create_task(server.serve(sockets=[listening]), name="answering")
    waiting = asyncio.create_task(signalled.wait(), name="signals")
    done, _ = await asyncio.wait({scheduling, answering, waiting}, return_when=asyncio.FIRST_COMPLETED)
    for task in (waiting, sweeping, keeping):
        task.cancel()
    if scheduling in done and isinstance(scheduling.exception(), Deposed):
        _leave(scheduling.exception())
    service.feed.close()
    service.terminals.close()
    service.book.end_waiting()  # else the server would cancel these requests, and answer with a fault of its own
    server.should_exit = True
    failed = [task for task in done if task is not waiting and not task.cancelled() and task.exception()]
    await asyncio.wait({answering}, timeout=5.0)
    await service.close()
    scheduling.cancel()
    await asyncio.gather(scheduling, answering, waiting, sweeping, keeping, return_exceptions=True)
    for task in failed:
        error = task.exception()
        if isinstance(error, InputError):
            raise error
        logging.getLogger("carpool.serve").critical("%s ended", task.get_name(), exc_info=error)
    return 1 if failed or not signalled.is_set() else 0
