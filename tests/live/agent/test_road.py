"""Requests of an agent: how long one may take."""

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from carpool.live.agent.road import TIMEOUT_S, NoAnswer, Road, Turned


@pytest.fixture
def silent_after_one():
    """The address of a server that answers one request of a connection, and nothing after that."""
    done = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        answered = False

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            if self.answered:
                done.wait(60)
                return
            self.answered = True
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *words):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    done.set()
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_kept_connection_waits_no_longer_than_the_lease_allows_now(silent_after_one):
    road = Road([silent_after_one], "token")
    assert road.sync({}) == {}
    road.timeout_s = 0.1
    began = time.monotonic()
    with pytest.raises(NoAnswer, match="no answer in time"):
        road.sync({})
    assert time.monotonic() - began < TIMEOUT_S
    road.close()


def test_a_token_that_the_service_does_not_know_is_named_as_such(service):
    road = Road([service.url], "x" * 43)
    with pytest.raises(Turned, match="join token is not valid there, or was revoked; `carpool nodes add`"):
        road.sync({})
    road.close()
