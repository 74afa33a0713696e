"""Room for connections: strangers and greedy users keep nobody else out, and slow heads are cut off."""

import asyncio
import contextlib
import errno
import socket
import subprocess
import sys
import time

import pytest
import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol
from uvicorn.server import ServerState

from carpool.live.http.connections import LEAST, Room, Rooms, guarded_protocol
from carpool.live.http.open_files import RESERVED, AcceptFaults
from tests.support.command_line import environment, process

pytestmark = pytest.mark.slow


class Connection:
    def __init__(self, busy=False):
        self.busy, self.closed = busy, False

    def close_now(self):
        self.closed = True


def test_the_greediest_loses_its_oldest_idle_connection():
    room = Room(4, 3)
    modest, busy = Connection(), Connection(busy=True)
    greedy = [Connection() for _ in range(4)]
    room.enter(modest, "a")
    room.enter(busy, "b")
    for one in greedy:
        room.enter(one, "b")
    assert [one.closed for one in (modest, busy, *greedy)] == [False, False, True, True, False, False]
    another = Connection()
    room.enter(another, "c")
    assert greedy[2].closed
    assert not another.closed
    assert len(room) == 4


def test_rooms_are_smaller_where_few_files_can_be_open():
    rooms, guests = Rooms(300 - RESERVED), [Connection() for _ in range(1000)]
    for number, guest in enumerate(guests):
        rooms.arrived(guest, f"address {number % 7}")
        if number % 2:
            rooms.authenticated(guest, f"user {number % 5}", agent=number % 3 == 0)
    left = [guest for guest in guests if not guest.closed]
    assert 100 < len(left) < 300 - RESERVED + LEAST
    assert not guests[-1].closed


async def test_running_out_of_files_is_said_in_one_line(caplog):
    loop, faults = asyncio.get_running_loop(), AcceptFaults()
    for _ in range(1000):
        error = OSError(errno.EMFILE, "Too many open files")
        faults.handle(loop, {"message": "socket.accept() out of system resource", "exception": error})
    assert [row.message for row in caplog.records] == [
        "new connections wait (Too many open files); raise the limit of open files (`ulimit -n`)"
    ]
    faults.handle(loop, {"message": "something else"})
    assert caplog.records[-1].message == "something else"


def test_the_limit_of_open_files_is_raised():
    code = "import resource as r; from carpool.live.http.open_files import raise_limit as f; "
    code += "r.setrlimit(r.RLIMIT_NOFILE, (200, 300)); print(f(), *r.getrlimit(r.RLIMIT_NOFILE))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment())
    assert done.stdout == "300 300 300\n", done.stderr


async def _hello(scope, receive, send):
    if scope["path"] == "/known":
        scope["carpool.connection"].authenticated("eve")
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: x\r\nA: ", None])
async def test_a_request_whose_head_does_not_come_is_cut_off(sent):
    """None: after a whole request, the next one does not come."""
    config = uvicorn.Config(_hello, lifespan="off", timeout_keep_alive=30)
    rooms = Rooms()
    protocol = guarded_protocol(AutoHTTPProtocol, rooms, head_s=0.2, kept_s=0.3)
    state = ServerState()
    server = await asyncio.get_running_loop().create_server(lambda: protocol(config, state, {}), "127.0.0.1", 0)
    async with server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(b"GET /known HTTP/1.1\r\nHost: x\r\n\r\n" if sent is None else sent)
        if sent is None:
            assert b"200" in await reader.readline()
            await reader.readuntil(b"ok")
            writer.write(b"GET /known HT")
            assert (len(rooms.strangers), len(rooms.known)) == (0, 1)
        began = time.monotonic()
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        assert 0.1 < time.monotonic() - began < 10.0
        writer.close()
        await asyncio.sleep(0.05)
        assert len(rooms.strangers) + len(rooms.known) == 0


def test_idle_connections_without_a_token_keep_no_one_out(service):
    host, port = service.url.removeprefix("http://").split(":")
    idle = []
    try:
        for _ in range(700):
            with contextlib.suppress(OSError):
                idle.append(socket.create_connection((host, int(port)), timeout=5))
        assert service.client().get("/v1/me")["name"] == "admin"
        assert process("jobs", CARPOOL_HOME=str(service.home)).code == 0
    finally:
        for one in idle:
            one.close()


def test_one_users_connections_keep_no_other_user_out(service, alice, bob):
    clients = [service.client(alice) for _ in range(600)]
    for client in clients:
        with contextlib.suppress(ValueError):
            client.get("/v1/me")
    assert service.client(bob).get("/v1/me")["name"] == "bob"
    assert service.client(alice).get("/v1/me")["name"] == "alice"
    for client in clients:
        client.close()
