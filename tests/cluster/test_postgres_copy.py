"""`carpool journal copy` and `carpool doctor` with a real PostgreSQL server."""

import json
import shutil

import pytest

from tests.cluster.services import Pair
from tests.support.command_line import call
from tests.support.postgres import PASSWORD
from tests.support.served import Served


@pytest.fixture
def address(postgres):
    return postgres.new_database()


def test_a_journal_moves_to_postgresql_and_back_with_its_jobs(postgres, address, tmp_path, monkeypatch):
    assert "no journal so far" in call("doctor", "--home", tmp_path, "--database", address).out
    home = tmp_path / "home"
    served = Served(home, "--gpus", "2").start()
    running = served.submit("sh", "-c", "sleep 90", watch=False)
    ended = served.submit("true", watch=False)
    served.until(ended, "finished")
    served.until(running, "running")
    busy = call("journal", "copy", home, address)
    assert busy.code == 2
    assert "another service" in busy.err
    assert served.stop() == 0
    term = served_term(home)

    moved = call("journal", "copy", home, address, "--json")
    assert moved.code == 0, moved.err
    rows = json.loads(moved.out)["rows"]
    assert rows["jobs"] == 2
    assert rows["events"] == postgres.sql("SELECT count(*) FROM events", address)[0][0] > 5
    assert PASSWORD not in moved.out + moved.err
    again = call("journal", "copy", home, address)
    assert again.code == 2
    assert "was moved to postgresql://carpool@127.0.0.1" in again.err
    refused = call("serve", "--home", home, "--port", "0", "--gpus", "2")
    assert refused.code == 2
    assert "was moved to postgresql://" in refused.err
    elsewhere = call("serve", "--home", home, "--port", "0", "--gpus", "2", "--database", postgres.new_database())
    assert elsewhere.code == 2
    assert "has a journal of its own" in elsewhere.err

    pair = Pair(tmp_path, address)
    try:
        service = pair.serve()
        service.leads()
        assert service.term > term, "agents obey the highest term"
        assert {row["job"]: row["status"] for row in pair.client().jobs(all=True)} == {
            running: "running",
            ended: "finished",
        }
        fresh = pair.submit("true")
        pair.until(fresh, "finished")
        assert fresh == "3", "ids go on"
        check_the_doctor(pair, address, tmp_path, monkeypatch)
        led = call("journal", "copy", address, tmp_path / "backup.db", "--backup")
        assert led.code == 2
        assert "leads; stop the service first" in led.err
        service.end()
        assert service.process.returncode == 0

        check_a_backup(postgres, pair, address, tmp_path)
        full = call("journal", "copy", address, home)
        assert full.code == 2
        assert "is not empty" in full.err
        (home / "journal.db").unlink()
        back = call("journal", "copy", address, home)
        assert back.code == 0, back.err
    finally:
        for one in pair.services:
            one.end()
    served = Served(home, "--gpus", "2").start()
    try:
        rows = {row["job"]: row["status"] for row in served.client().jobs(all=True)}
        assert rows == {running: "running", ended: "finished", fresh: "finished"}
    finally:
        served.end()


def check_the_doctor(pair, address, tmp_path, monkeypatch) -> None:
    """The doctor checks the database and names the leader."""
    found = json.loads(call("doctor", "--home", pair.home, "--database", address, "--json").out)
    assert PASSWORD not in str(found)
    (leader,) = [one for one in found if one["what"] == "leader"]
    assert leader["level"] == "ok"
    assert f"term {pair.services[-1].term}, renewed" in leader["found"]
    told = {one["found"]: one["level"] for one in found if one["what"] == "database"}
    assert told["the address holds the password"] == "warning"
    assert told["fsync is off"] == "error", "the server of the tests does not sync"
    loose = tmp_path / "pgpass"
    loose.write_text(f"*:*:*:carpool:{PASSWORD}\n")
    loose.chmod(0o644)
    monkeypatch.setenv("PGPASSFILE", str(loose))
    by_home = call("doctor", "--home", pair.home)
    assert by_home.code == 1
    assert "others can read" in by_home.out
    away = call("doctor", "--home", pair.home, "--database", "postgresql://carpool@127.0.0.1:1/x")
    assert "cannot be read" in away.out


def check_a_backup(postgres, pair, address, tmp_path) -> None:
    """A backup is a journal of its own, and leaves the original in use."""
    kept = call("journal", "copy", address, tmp_path / "backup.db", "--backup")
    assert kept.code == 0, kept.err
    other = postgres.new_database()
    assert call("journal", "copy", tmp_path / "backup.db", other, "--backup").code == 0
    counts = [postgres.sql("SELECT count(*), max(seq) FROM events", one) for one in (address, other)]
    assert counts[0] == counts[1]
    twin = call("serve", "--home", pair.home, "--port", "0", "--gpus", "2", "--database", other)
    assert twin.code == 2
    assert "belongs to the journal in" in twin.err


def served_term(home) -> int:
    import sqlite3
    from contextlib import closing

    with closing(sqlite3.connect(home / "journal.db")) as raw:
        return raw.execute("SELECT term FROM leader").fetchone()[0]


def test_a_unit_never_holds_a_password(address):
    said = call("service", "install", "--user", "--no-start", "--", "--database", address)
    assert said.code == 2
    assert PASSWORD not in said.err
    assert ".pgpass" in said.err


@pytest.fixture(autouse=True)
def no_unit(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    yield
    shutil.rmtree(tmp_path / "config", ignore_errors=True)
