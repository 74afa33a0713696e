"""What commands say where they were wrong or silent: limits, homes, directories, units, widths."""

import os
import shutil
import time
from types import SimpleNamespace

import pytest

from carpool.live import accounts
from carpool.live.accounts import check_directory, installation_problem
from carpool.live.agent.lease import NodeLease
from carpool.live.clock import since_boot
from carpool.live.commands import doctor as doctors
from carpool.live.commands import serve
from carpool.live.commands.doctor_agent import examine_agent
from carpool.live.commands.overview import slowdown_text
from carpool.live.executors.base import GpuSlot, Launch
from carpool.live.executors.environment import rank_environments
from carpool.live.home import Home, write_private
from tests.support.command_line import call, process
from tests.support.served import Served

pytestmark = pytest.mark.slow

as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can look as another user")


def test_one_limit_changes_and_the_others_stay(service):
    service.call("user", "add", "dora", "--max-jobs", "3", "--max-gpus", "2")
    assert service.call("user", "limit", "dora", "--max-jobs", "5").out == "dora: jobs 5, gpus 2\n"
    assert service.call("user", "limit", "dora", "--max-gpus", "none").out == "dora: jobs 5\n"
    said = service.call("user", "limit", "dora")
    assert (said.code, "give --max-jobs" in said.err) == (2, True)


def test_priority_says_what_it_changed(service):
    job = service.submit("sleep", "60")
    assert service.call("priority", job, "7").out == f"job {job} has priority 7\n"
    service.call("cancel", job)


def test_many_jobs_are_cancelled_in_one_request(service, alice):
    jobs = [service.submit("sleep", "60", gpus=4) for _ in range(3)]
    theirs = service.submit("sleep", "60", gpus=4, token=alice)
    assert service.call("cancel", *jobs, theirs).code == 0
    said = service.call("cancel", jobs[0], "99999", service.submit("sleep", "60", gpus=4), token=alice)
    assert (said.code, said.err.count("error:"), said.out) == (2, 3, "")


def test_a_directory_that_does_not_exist_is_refused(service):
    said = service.call("submit", "--directory", "/no/such/place", "--", "true")
    assert (said.code, "'/no/such/place' does not exist" in said.err) == (2, True)


@as_root
def test_root_looks_at_a_directory_as_the_user(tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    check_directory(str(closed), None)
    with pytest.raises(ValueError, match="may not enter it"):
        check_directory(str(closed), 65534)
    check_directory("/", 65534)


@as_root
def test_an_installation_that_users_cannot_read_is_said(home, tmp_path, monkeypatch):
    python = tmp_path / "closed" / "python"
    python.parent.mkdir(mode=0o700)
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    monkeypatch.setattr(accounts.sys, "executable", str(python))
    assert str(python) in installation_problem(65534)
    home.create()
    write_private(home.users, '{"eve": {"uid": 65534}, "gone": {"uid": 65534, "revoked": true}}')
    found = list(doctors._users(home))
    assert [(one.level, one.found.partition(":")[0]) for one in found] == [("error", "eve")]


@as_root
def test_agents_are_no_users_without_a_uid(home):
    home.create()
    write_private(home.users, '{"agent:n1": {"role": "agent", "node": "n1", "revoked": false}}')
    assert list(doctors._users(home)) == []


def test_doctor_says_on_a_node_how_its_agent_is(home):
    def levels():
        return [(one.level, one.found.partition(" ")[0]) for one in examine_agent(home)]

    assert levels() == []
    home.create()
    write_private(home.path / "agent.json", "{}")
    assert [(one.level, "cannot be read" in one.found) for one in examine_agent(home)] == [("error", True)]
    write_private(home.path / "agent.json", '{"identity": "n1", "term": 1}')
    assert levels() == [("warning", "none")]
    home.acquire()
    assert levels() == [("error", "runs,")]
    NodeLease(home.path / "lease").extend(since_boot() - 55, 100.0)  # less than half is left
    assert levels() == [("error", "runs,")]
    NodeLease(home.path / "lease").extend(since_boot() - 1, 100.0)
    assert levels() == [("ok", "runs;")]
    assert [one.what for one in doctors.examine(home.path)][-1] != "service"
    home.release()
    assert levels() == [("error", "none")]


@pytest.mark.parametrize(
    ("executor", "database", "others"),
    [("local", None, False), ("agents", None, True), ("agents:lease=1m", None, True), ("local", "postgresql://", True)],
)
def test_other_machines_call_a_service_with_agents_or_a_database(executor, database, others):
    config = SimpleNamespace(executor=executor, database=database)
    assert serve._is_called_by_other_machines(config) is others


def test_a_join_token_is_renewed_as_join_tokens_are(tmp_path):
    token = tmp_path / "token"
    token.write_text("x" * 43)
    token.chmod(0o644)
    join = ("agent", "--join", "http://127.0.0.1:1", "--home", tmp_path / "a", "--token-file", token)
    assert "carpool nodes add" in call(*join).err
    token.chmod(0o600)
    said = call(*join, "--ca", token)
    assert (said.code, "--ca: belongs to an address that begins with https://" in said.err) == (2, True)


def test_a_home_that_cannot_be_written_is_one_line(home, monkeypatch):
    home.create()
    home.lock.mkdir()
    said = process("serve", "--home", str(home.path), "--gpus", "1", "--port", "0")
    assert (said.code, said.err.count("\n"), "chmod -R u+w" in said.err) == (2, 1, True)
    monkeypatch.setattr(os, "access", lambda path, mode: path != home.jobs)
    assert [one.level for one in doctors._home(Home(home.path))] == ["error"]


def test_a_home_that_is_deleted_under_the_service_refuses_submits(tmp_path):
    served = Served(tmp_path / "home", "--gpus", "1").start()
    client = served.client()
    try:
        shutil.rmtree(served.home)
        for _ in range(2):
            with pytest.raises(ValueError, match=r"journal\.db is gone"):
                client.post("/v1/jobs", {"command": ["true"], "directory": "/"})
            time.sleep(0.1)
    finally:
        served.stop()


def test_a_worker_that_is_alone_is_not_taken_for_one_of_several():
    slots = [GpuSlot(number, "node0", number) for number in range(2)]
    alone = rank_environments(Launch("1", 1, (0,), ("true",), "/", {}), slots[:1], 1)
    assert "LOCAL_RANK" not in alone[0]
    assert (alone[0]["RANK"], alone[0]["WORLD_SIZE"]) == ("0", "1"), "init_process_group works"
    both = rank_environments(Launch("1", 1, (0, 1), ("true",), "/", {}), slots, 1)
    assert [one["LOCAL_RANK"] for one in both] == ["0", "1"]


def test_piped_tables_follow_columns():
    wide, narrow = (call("policies", env={"COLUMNS": width}).out for width in (None, "60"))
    assert max(map(len, narrow.splitlines())) <= 60 < max(map(len, wide.splitlines()))


def test_history_marks_what_is_believed():
    shared = {"slowdown": 1.5, "shares": 1, "hosted": 0}
    assert slowdown_text({**shared, "measured": False}) == "≈1.50"
    assert slowdown_text({**shared, "measured": True}) == "1.50"
    assert slowdown_text({"slowdown": 1.0, "shares": 0, "hosted": 0, "measured": False}) == "1.00"
    assert slowdown_text({**shared, "slowdown": 0.004, "measured": False}) == "-", "it was too short to tell"
    assert slowdown_text({"slowdown": None}) == "-"


def test_accuracy_has_units(service):
    service.until(service.submit("sleep", "0.1", duration_s=5), "finished")
    until = time.monotonic() + 20
    while "%" not in (accuracy := service.call("history", "--accuracy").out):  # a job is judged just after its end
        assert time.monotonic() < until
    assert " s" in accuracy
