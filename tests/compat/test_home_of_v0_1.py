"""A service starts on a home that release 0.1 left behind when it was killed, and all of its jobs come to their end.

The home has a snapshot and later events, three users, jobs that ended, wait, are held, depend on others, and three
jobs that ran when the service died. Every test works on a copy.
"""

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.request
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

import carpool
from carpool import policies
from carpool.belief.prior import believe
from carpool.core import snapshot
from carpool.core.model import Limits
from carpool.core.perf import ConstantInterference, FittedModel
from carpool.core.state import State
from carpool.live.journal.store import Store
from carpool.live.rank import boot_id, start_ticks
from carpool.profile.schema import load

pytestmark = pytest.mark.slow

HOME = Path(__file__).parent / "data" / "v0.1" / "home"
START_S, END_S = 60.0, 60.0
NOT_ROOT = """
from carpool.live.service import users
users.own_uid = lambda: 1000
from carpool.cli import main
main()
"""
"""`carpool` as a user that is not root: jobs of users without a uid, as this home has them, never start under root."""


@pytest.fixture
def home(tmp_path) -> Path:
    return Path(shutil.copytree(HOME, tmp_path / "home"))


class Served:
    """`carpool serve` on a home, asked over HTTP."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def ask(self, path: str, token: str | None = None, data: dict | None = None):
        url = json.loads((self.home / "address.json").read_text())["url"]
        token = token or (self.home / "admin.token").read_text().strip()
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        body = None if data is None else json.dumps(data).encode()
        with urllib.request.urlopen(urllib.request.Request(f"{url}/v1{path}", body, headers), timeout=30) as answer:
            return json.load(answer)

    def jobs(self) -> dict[str, dict]:
        return {row["job"]: row for row in self.ask("/jobs?all=true")["jobs"]}

    def until(self, condition):
        until = time.monotonic() + END_S
        while not (found := condition()):
            assert time.monotonic() < until, self.jobs()
            time.sleep(0.05)
        return found


@contextmanager
def serving(home: Path, *options: str):
    command = [sys.executable, "-c", NOT_ROOT, "serve", "--home", str(home), "--port", "0", "--gpus", "2"]
    env = {**os.environ, "PYTHONPATH": str(Path(carpool.__file__).parents[1])}
    log = home.with_suffix(".log")
    with log.open("wb") as file:
        process = subprocess.Popen([*command, "--policy", "sjf-ffs", *options], stdout=file, stderr=file, env=env)
    try:
        until = time.monotonic() + START_S
        while not (home / "address.json").exists():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.05)
        yield Served(home)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


@pytest.mark.parametrize("with_snapshot", [True, False])
def test_the_journal_leads_to_the_state_at_the_kill(home, with_snapshot):
    store = Store(home / "journal.db")
    store.open()
    try:
        fitted = FittedModel(load("t4").core_tasks(), ConstantInterference(1.5), 2)
        perf, key = believe(load("t4"), fitted, "logical"), policies.make("sjf-ffs").key
        (seq, data), *_ = store.snapshots() if with_snapshot else [(0, None)]
        state = snapshot.restore(data, perf, key) if data is not None else State(perf, key)
        for _, event in store.events_after(seq):
            state.apply(event)
    finally:
        store.close()
    jobs = state.jobs
    assert {name: str(record.status) for name, record in jobs.items()} == {
        **dict.fromkeys(("9", "10", "11"), "running"),
        **dict.fromkeys(("13", "16", "17"), "pending"),
        "14": "held",
        "15": "blocked",
    }
    assert {name: (jobs[name].accumulation, jobs[name].gpus) for name in ("9", "10", "11")} == {
        "9": (1, (0,)),
        "10": (1, (1,)),
        "11": (2, (0,)),
    }
    assert [record.job.id for record in state.jobs_on(0)] == ["9", "11"]
    assert jobs["9"].job.can_shrink  # its training library certified that
    assert jobs["9"].checkpoint == 1150.0
    assert jobs["15"].waits_for == ("9", "13")
    assert jobs["15"].job.duration_s == 7.5
    assert [record.job.id for record in state.queue] == ["13", "17", "16"]  # priorities 4, 0, -3
    assert state.limits == {"bob": Limits(3, 2), "": Limits(8, None)}


def rows_set_aside(home: Path) -> list[tuple]:
    with closing(sqlite3.connect(home / "journal.db")) as journal:
        return journal.execute("SELECT seq FROM events WHERE kind = 'Damaged'").fetchall()


@pytest.mark.slow
@pytest.mark.parametrize("with_snapshot", [True, False])
def test_all_jobs_come_to_their_end(home, with_snapshot):
    if not with_snapshot:
        with closing(sqlite3.connect(home / "journal.db")) as journal:
            journal.execute("DELETE FROM snapshots")
            journal.commit()
    with serving(home) as served:
        jobs = served.jobs()
        names = ["host-bert", "host-yolo", "guest-bert", "no-library", "late", "held", "after", "gang", "unheld"]
        assert [jobs[str(number)]["name"] for number in range(9, 18)] == names
        assert jobs["14"]["held"]
        assert jobs["14"]["status"] == "pending"
        assert jobs["13"]["priority"] == 4
        assert jobs["16"]["priority"] == -3
        served.ask("/jobs/14/release", data={})
        waiting = ("9", "10", "11", "13", "14", "15", "16", "17")
        served.until(lambda: all(served.jobs()[job]["status"] == "finished" for job in waiting))
        attempts = {job: row["attempt"] for job, row in served.jobs().items()}
        assert [attempts[job] for job in waiting] == [2, 2, 2, 1, 1, 1, 1, 1]  # three were lost with the machine
        assert served.ask("/jobs", data={"command": ["true"], "directory": "/"})["job"] == "18"
    assert rows_set_aside(home) == []


@pytest.mark.slow
def test_a_worker_that_still_runs_is_found_again(home):
    directory = home / "jobs/9/attempt-1/rank-0"
    with subprocess.Popen(["sleep", "600"]) as worker:
        try:
            record = json.loads((directory / "process.json").read_text())
            identity = {"pid": worker.pid, "start": start_ticks(worker.pid)}
            (directory / "process.json").write_text(json.dumps({**record, **identity, "boot": boot_id()}))
            with serving(home) as served:
                served.until(lambda: served.jobs()["10"]["status"] == "finished")
                row = served.jobs()["9"]
                assert (row["status"], row["attempt"], row["on"]) == ("running", 1, ["node0:0"])
                row = served.until(lambda: (row := served.jobs()["9"])["measured"] and row)
                assert row["progress"] == pytest.approx(0.3, abs=0.05)
                ended = (HOME / "jobs/2/attempt-1/rank-0/exit.json").read_text()
                (directory / "exit.json").write_text(ended.replace('"code": 3', '"code": 0'))
                worker.kill()
                worker.wait()
                served.until(lambda: served.jobs()["9"]["status"] == "finished")
                assert served.jobs()["9"]["attempt"] == 1
        finally:
            worker.kill()


def test_history_receipts_users_and_limits(home):
    with serving(home) as served:
        history = {row["job"]: row for row in served.ask("/history")["jobs"]}
        states = {job: history[job]["status"] for job in "12345678"}
        assert states == {**dict.fromkeys("145678", "finished"), "2": "failed", "3": "cancelled"}
        failed = history["2"]
        assert (failed["exit_code"], failed["reason"], failed["attempt"]) == (3, "worker 0 ended with exit code 3", 2)
        receipt = history["8"]["receipt"]
        assert receipt["measured"]
        assert receipt["shares"] == 1
        assert receipt["ran_s"] == pytest.approx(4.561, abs=0.001)
        assert receipt["alone_s"] == pytest.approx(3.548, abs=0.001)
        shown = served.ask("/jobs/11")
        assert shown["spec"]["batch"] == 24
        assert shown["spec"]["can_shrink"] is True
        assert shown["source"]["kind"] == "profile"
        assert served.ask("/jobs/13")["spec"]["duration_s"] == 30.0
        assert {row["job"] for row in served.ask("/workload")["jobs"]} >= {"1", "4", "5", "6", "7", "8", "12"}
        assert served.ask("/me", token="token-of-alice")["name"] == "alice"
        users = {row["name"]: row for row in served.ask("/users")["users"]}
        assert (users["bob"]["max_jobs"], users["bob"]["max_gpus"], users["carol"]["revoked"]) == (3, 2, True)
        assert served.ask("/accuracy")["duration, from time"]["judged"] >= 5
