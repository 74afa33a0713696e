"""Two services on one database, from outside: one leads, the other takes over, and an old leader does nothing more."""

import contextlib
import json
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from tests.cluster.services import Pair, Relay, descendants, events, everything_readable
from tests.cluster.world import until
from tests.support.command_line import call
from tests.support.postgres import PASSWORD, PostgresServer

LIMIT_S = 10.0
"""Seconds within which a service that stands by must have taken the lead. It answers a second later on an idle machine;
on a busy one, Python's own work takes longer, so that is not limited here (bench/journal.py measures it)."""


@pytest.fixture
def password_file(tmp_path):
    path = tmp_path / "pgpass"
    path.write_text(f"*:*:*:carpool:{PASSWORD}\n")
    path.chmod(0o600)
    return path


@pytest.fixture
def pair(postgres, tmp_path, password_file):
    address = postgres.new_database().replace(f":{PASSWORD}", "")
    pair = Pair(tmp_path, address, password_file)
    try:
        yield pair
    finally:
        pair.close()


@pytest.fixture
def server():
    """A server of its own, for tests that stop or kill it."""
    server = PostgresServer()
    try:
        yield server.start()
    finally:
        server.close()


def taken_over(postgres, pair, term: int, until: float) -> None:
    """Wait until another service has the lead."""
    while postgres.sql("SELECT term FROM leader", full_address(pair)) == [(term,)]:
        assert time.monotonic() < until, f"nobody took over\n{pair.logs()}"
        time.sleep(0.05)


def full_address(pair) -> str:
    return pair.address.replace("carpool@", f"carpool:{PASSWORD}@")


def test_a_standby_takes_over_with_all_jobs_when_the_leader_is_killed(postgres, pair, tmp_path):
    first = pair.serve()
    first.leads()
    assert "~/.pgpass" not in first.said(), "the password came from PGPASSFILE"
    assert PASSWORD not in Path(f"/proc/{first.process.pid}/cmdline").read_text()
    until((pair.home / "reserve").exists)  # the leader makes it a moment after it leads
    before = home_without_life(pair)
    second = pair.serve()
    second.until_it_says("stands by: process ")
    time.sleep(1.0)
    second.signal(signal.SIGTERM)
    assert second.process.wait(10) == 0
    assert home_without_life(pair) == before, "a service that stands by touches nothing in the home"
    assert pair.leader() is first

    third = pair.serve()
    third.until_it_says("stands by: process ")
    ledger = tmp_path / "ledger"
    running = [pair.submit(f"echo start-{n} >> {ledger}; sleep 12; echo end-{n} >> {ledger}") for n in range(2)]
    waiting = pair.submit(f"echo waited >> {ledger}")
    for job in running:
        pair.until(job, "running")
    client = pair.client()
    client.get("/v1/me")
    ends = []
    following = threading.Thread(target=lambda: ends.append(client.wait(waiting)["status"]))
    following.start()
    first.kill()
    killed = time.monotonic()
    taken_over(postgres, pair, first.term, killed + LIMIT_S)
    third.leads()
    assert third.term > first.term
    rows = {row["job"]: row["status"] for row in pair.client().jobs()}
    assert rows == {running[0]: "running", running[1]: "running", waiting: "pending"}

    fourth = pair.serve()
    fourth.until_it_says("stands by: process ")
    third.signal(signal.SIGTERM)
    assert third.process.wait(10) == 0
    taken_over(postgres, pair, third.term, time.monotonic() + 3.0)  # at once: it gave the lead up
    fourth.leads()
    for job in (*running, waiting):
        assert pair.until(job, "finished")["attempt"] == 1
    assert sorted(ledger.read_text().split()) == ["end-0", "end-1", "start-0", "start-1", "waited"], "no job ran twice"
    following.join(20)
    assert ends == ["finished"], "a client that waits finds every leader"
    fourth.signal(signal.SIGTERM)
    assert fourth.process.wait(10) == 0
    assert not (pair.home / "address.json").exists()
    without = call("serve", "--gpus", "1", "--port", "0", "--home", pair.home)
    assert without.code == 2
    assert "its journal is in postgresql://carpool@127.0.0.1" in without.err
    empty = call("serve", "--port", "0", "--gpus", "1", "--home", tmp_path / "empty", "--database", pair.address,
                 env=pair.variables)  # fmt: skip
    assert empty.code == 2
    assert f"has its files in {pair.home}" in empty.err
    assert not (tmp_path / "empty").exists()


def home_without_life(pair) -> dict:
    """Return when the files of the home changed, without the one that a leader touches all the time."""
    return {path: path.stat().st_mtime_ns for path in pair.home.rglob("*") if path.name != "alive"}


def test_an_old_leader_that_wakes_up_writes_and_starts_nothing_and_ends(postgres, pair, tmp_path):
    ledger = tmp_path / "ledger"
    first = pair.serve()
    first.leads()
    second = pair.serve()
    second.until_it_says("stands by: ")
    old = pair.client()
    running = pair.submit(f"echo start >> {ledger}; sleep 60", gpus=2)
    pair.until(running, "running")
    # What comes in while it is stopped, waits in its socket: it must be neither accepted nor answered as by a leader.
    planned = [pair.submit(f"echo planned-{n} >> {ledger}; sleep 0.3") for n in range(2)]
    pair.client().post(f"/v1/jobs/{running}/cancel")
    # The most dangerous moment: a plan is in the journal, and the leader is about to act on it.
    first.signal(signal.SIGSTOP)
    stopped = time.monotonic()
    taken_over(postgres, pair, first.term, stopped + LIMIT_S)
    second.leads()
    queued = [pair.submit(f"echo queued-{n} >> {ledger}") for n in range(2)]
    request = json.dumps({"command": ["sh", "-c", f"echo ghost >> {ledger}"], "directory": "/"})
    host, port = old.url.removeprefix("http://").split(":")
    sending = _post(host, int(port), "/v1/jobs", request, old)
    last = events(postgres, full_address(pair))
    address = (pair.home / "address.json").read_text()
    first.signal(signal.SIGCONT)
    answer = sending()
    assert first.process.wait(10) == 3, "it ends itself"
    assert b" 201 " not in answer.split(b"\r\n")[0]
    assert b" 503 " in answer.split(b"\r\n")[0] or answer == b"", answer
    assert (pair.home / "address.json").read_text() == address, "the address is that of the new leader"
    assert "another service leads" in first.said()
    for job in (*planned, *queued):
        pair.until(job, "finished")
    assert sorted(ledger.read_text().split()) == sorted(
        ["start", "start", "planned-0", "planned-1", "queued-0", "queued-1"]
    ), "each worker ran once"
    now = events(postgres, full_address(pair))
    assert now[: len(last)] == last, "what the new leader wrote is unchanged"
    assert [seq for seq, *_ in now] == list(range(1, len(now) + 1)), "the numbers have no gap and none twice"
    assert "ghost" not in str(now)


def _post(host, port, path, body, client):
    """Send a request; return a function that reads the answer."""
    token = client._headers["Authorization"]
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nAuthorization: {token}\r\nContent-Type: application/json\r\n"
    connection = socket.create_connection((host, port), timeout=20)
    connection.sendall(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode())

    def read() -> bytes:
        parts = []
        with contextlib.suppress(OSError):
            while part := connection.recv(65536):
                parts.append(part)
        connection.close()
        return b"".join(parts)

    return read


def test_the_service_survives_a_database_that_is_away_and_back(server, tmp_path, password_file):
    address = server.new_database().replace(f":{PASSWORD}", "")
    pair = Pair(tmp_path, address, password_file)
    try:
        first = pair.serve()
        first.leads()
        ledger = tmp_path / "ledger"
        running = pair.submit(f"sleep 3; echo ran >> {ledger}")
        pair.until(running, "running")
        server.kill()
        time.sleep(1.0)
        with pytest.raises(ValueError, match=r"cannot be written|not certain to lead"):
            pair.submit("true")
        time.sleep(6.0)
        with pytest.raises(ValueError, match="not certain to lead"):
            pair.client().get("/v1/jobs")
        assert first.process.poll() is None
        server.start()
        assert pair.until(running, "finished", seconds=20.0)["attempt"] == 1
        assert ledger.read_text() == "ran\n"
        assert pair.until(pair.submit("true"), "finished")
        assert first.term == 1, "nobody else was there to take over"
    finally:
        pair.close()


def test_a_database_that_does_not_answer_is_given_up(server, tmp_path, password_file):
    """Stopped processes keep their connections open: only a deadline of the client's own helps."""
    pair = Pair(tmp_path, server.new_database().replace(f":{PASSWORD}", ""), password_file)
    try:
        first = pair.serve()
        first.leads()
        server.signal(signal.SIGSTOP)
        time.sleep(6.0)
        with pytest.raises(ValueError, match="not certain to lead"):
            pair.client().get("/v1/jobs")
        server.signal(signal.SIGCONT)
        assert pair.until(pair.submit_again("true"), "finished")
        assert first.process.poll() is None
    finally:
        server.signal(signal.SIGCONT)
        pair.close()


def test_a_commit_whose_answer_is_lost_is_neither_repeated_nor_forgotten(postgres, tmp_path, password_file):
    direct = postgres.new_database()
    relay = Relay(postgres.port)
    address = direct.replace(f":{PASSWORD}", "").replace(f":{postgres.port}/", f":{relay.port}/")
    pair = Pair(tmp_path, address, password_file)
    try:
        first = pair.serve()
        first.leads()
        for turn in range(3):
            relay.swallowed.clear()
            relay.swallow_after = b"COMMIT"
            job = pair.submit("true", name=f"turn-{turn}")  # answered, although the commit's answer was lost
            assert relay.swallowed.wait(5)
            assert pair.until(job, "finished")["attempt"] == 1
        rows = postgres.sql("SELECT id, name FROM jobs ORDER BY id", direct)
        assert [name for _, name in rows] == ["turn-0", "turn-1", "turn-2"]
        written = events(postgres, direct)
        assert [seq for seq, *_ in written] == list(range(1, len(written) + 1))
        assert sum(kind == "Submitted" for _, kind, _ in written) == 3
        assert first.process.poll() is None
        assert "duplicate key" not in first.said() + str(written)
    finally:
        pair.close()
        relay.close()


def test_the_password_is_shown_nowhere(postgres, tmp_path):
    address = postgres.new_database()
    pair = Pair(tmp_path, address)
    try:
        first = pair.serve()
        first.leads()
        job = pair.submit("env; tr '\\0' '\\n' < /proc/$PPID/cmdline; tr '\\0' '\\n' < /proc/$PPID/environ; sleep 30")
        pair.until(job, "running")
        time.sleep(0.3)
        below = descendants(first.process.pid)
        assert below, "the wrapper is a child of the service"
        seen = everything_readable(pair, below)
        assert "PATH=" in seen
        assert "env; tr" in seen
        assert PASSWORD not in seen
        assert "write it into ~/.pgpass" in first.said()
        pair.client().post(f"/v1/jobs/{job}/cancel")
        for words in (("serve", "--gpus", "1", "--port", "0", "--database"), ("doctor", "--database")):
            for wrong in (address.replace("127.0.0.1", "127.0.0.1:1:2"), address.replace(f":{postgres.port}/", ":1/")):
                said = call(*words, wrong, "--home", tmp_path / "other")
                assert said.code != 0
                assert PASSWORD not in said.out + said.err
    finally:
        pair.close()
