"""Owners of jobs: what is lost with the journal never lets a job run as another user, and never widens a right."""

import json
import os
import sqlite3

import pytest

from carpool.core.model import Closure, FairShare, Limits, UserGroup
from carpool.errors import InputError
from carpool.live.errors import Unavailable, WrongStatus
from carpool.live.executors.memory import MemoryExecutor
from carpool.live.home import Home, write_private
from tests.support.fakes import FakeClock
from tests.support.services import notes, one, output, serving, settle, shell, started, status, until

as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can start jobs under other users' ids")
ROWS = {"alice": {"uid": 7_000_101, "max_jobs": 3, "max_gpus": None}, "bob": {"uid": 7_000_102}}


@pytest.fixture
def open_home(tmp_path):
    """A home that other users' jobs can reach, as it is on a real machine."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.getuid() and str(folder).startswith("/tmp/"):
            folder.chmod(0o755)
    return Home(tmp_path / "home")


def lose_journal(home):
    for path in home.path.glob("journal.db*"):
        path.unlink()


async def submitted(home) -> list[str]:
    """Add two users, let each run a job, and return the jobs. Only one GPU is there, so the second one waits."""
    async with serving(home, "fifo", gpus=1, jobs_per_gpu=1) as service:
        for name, row in ROWS.items():
            await service.requests.put_user(name, row)
        await service.requests.set_limits("alice", Limits(3))
        script = "id -u; test $CARPOOL_ATTEMPT = 1 && test -e /tmp && sleep $S"
        jobs = [await one(service, shell(script, env={"S": s}), user) for s, user in (("30", "alice"), ("0", "bob"))]
        await started(service, jobs[0])
        await until(lambda: output(service, jobs[0]))
        return jobs


@as_root
async def test_after_the_journal_is_lost_jobs_run_as_their_owners(open_home):
    jobs = await submitted(open_home)
    lose_journal(open_home)
    async with serving(open_home, "fifo", gpus=2, jobs_per_gpu=1) as service:
        await until(lambda: output(service, jobs[0]) and output(service, jobs[1]))
        assert [output(service, job).split()[-1] for job in jobs] == ["7000101", "7000102"]
        assert service.state.limits["alice"] == Limits(3), "limits are no wider than before"
        await service.requests.cancel(jobs[0])
        await service.queries.wait(jobs[0])


async def settled(home) -> str:
    """Settle a group with a cap and limits, shares and a drain; return a job of the group that waits."""
    async with serving(home, executor=MemoryExecutor(gpus=2), clock=FakeClock(1000.0)) as service:
        await service.requests.put_user("ann", {"uid": 1000, "role": "user", "token_hash": "", "group": "red"})
        await service.requests.set_group(UserGroup("red", cap=1, default_limit_s=60.0, max_limit_s=120.0))
        await service.requests.set_fair_share(FairShare(0.5, 3600.0))
        await service.requests.set_closure(Closure("node0:0", (0,), 1000.0, lets_finish=True))
        await service.requests.set_closure(Closure("r1", (1,), 5000.0, 9000.0, "blue"))
        await service.requests.set_closure(Closure("r2", (1,), 1000.0, 1500.0, "blue"))
        await service.requests.set_closure(Closure("node0:1", (1,), 1000.0))
        await service.requests.remove_closure("node0:1")
        return await one(service, shell("true", duration_s=9000), "ann")


@pytest.mark.parametrize("users_too", [False, True])
async def test_after_the_journal_is_lost_caps_limits_shares_and_drains_come_back(quick_home, monkeypatch, users_too):
    monkeypatch.setattr("carpool.live.service.users.own_uid", lambda: 1000)
    job = await settled(quick_home)
    lose_journal(quick_home)
    if users_too:
        quick_home.users.unlink()
    async with serving(quick_home, executor=MemoryExecutor(gpus=2), clock=FakeClock(2000.0)) as service:
        await settle(service)
        state = service.state
        assert state.tenants.settings == {"red": UserGroup("red", cap=1, default_limit_s=60.0, max_limit_s=120.0)}
        assert state.tenants.fair_share == FairShare(0.5, 3600.0)
        assert set(state.closures) == {"node0:0", "r1"}, "one was taken back, and one is over"
        assert (state.jobs[job].job.group, state.jobs[job].limit_s) == ("red", 60.0)
        await service.requests.remove_closure("node0:0")
    async with serving(quick_home, executor=MemoryExecutor(gpus=2), clock=FakeClock(2000.0)) as service:
        assert set(service.state.closures) == {"r1"}, "what is changed later counts"


async def test_settings_whose_copy_is_damaged_or_older_are_those_of_the_journal(quick_home, monkeypatch):
    monkeypatch.setattr("carpool.live.service.users.own_uid", lambda: 1000)
    await settled(quick_home)
    older = quick_home.settings.read_text()
    async with serving(quick_home, executor=MemoryExecutor(gpus=2), clock=FakeClock(1100.0)) as service:
        await service.requests.remove_closure("node0:0")
        await service.requests.set_group(UserGroup("red", cap=2))
    for content in (older, older[:-20], "[]", '{"mark": 5}', ""):
        quick_home.settings.write_text(content)
        async with serving(quick_home, executor=MemoryExecutor(gpus=2), clock=FakeClock(1100.0)) as service:
            assert "node0:0" not in service.state.closures
            assert service.state.tenants.settings["red"].cap == 2


async def test_settings_that_cannot_be_written_are_not_changed(quick_home, monkeypatch):
    async with serving(quick_home, executor=MemoryExecutor(gpus=2), clock=FakeClock(1000.0)) as service:
        await service.requests.set_group(UserGroup("red", cap=1))
        before = quick_home.settings.read_text()

        async def refuse(prepare):
            raise Unavailable("the disk is full")

        with monkeypatch.context() as patched:
            patched.setattr(service.inbox, "request", refuse)
            with pytest.raises(Unavailable):
                await service.requests.set_group(UserGroup("red", cap=9))
        assert quick_home.settings.read_text() == before


@as_root
async def test_a_user_is_known_from_the_jobs_where_the_list_of_users_is_lost_too(open_home):
    jobs = await submitted(open_home)
    lose_journal(open_home)
    open_home.users.unlink()
    async with serving(open_home, "fifo", gpus=2, jobs_per_gpu=1) as service:
        await until(lambda: output(service, jobs[1]))
        assert output(service, jobs[1]).split() == ["7000102"]
        assert service.queries.users()["bob"]["revoked"], "the token is lost, so nothing grants access"
        await service.requests.cancel(jobs[0])


@as_root
@pytest.mark.parametrize("record", [{"user": "bob"}, {"user": "bob", "uid": 0}, {"user": "alice", "uid": 7_000_102}])
async def test_a_job_whose_owner_is_not_certain_never_starts(open_home, record):
    jobs = await submitted(open_home)
    lose_journal(open_home)
    if record["user"] == "bob":
        open_home.users.unlink()
        (open_home.job(jobs[0]) / "job.json").unlink()
    path = open_home.job(jobs[1]) / "job.json"
    write_private(path, json.dumps({**json.loads(path.read_text()), "uid": None, **record}))
    async with serving(open_home, "fifo", gpus=2, jobs_per_gpu=1) as service:
        await settle(service)
        assert service.state.jobs[jobs[1]].on_hold
        assert any(f"job {jobs[1]}" in text and "uid" in text for text in notes(service))
        await never_starts(service, jobs[1], record["user"])
    async with serving(open_home, "fifo", gpus=2, jobs_per_gpu=1) as service:
        await never_starts(service, jobs[1], record["user"])
        for job in list(service.state.jobs):
            await service.requests.cancel(job)


async def never_starts(service, job, user) -> None:
    """Check that no release starts a job, not even after its user got a uid, and that it is said why."""
    await service.requests.put_user(user, {"uid": 7_000_109})
    with pytest.raises(WrongStatus, match=f"job {job} never starts: its owner is not certain.*; cancel it"):
        await service.requests.release(job)
    await settle(service)
    assert (status(service, job), output(service, job)) == ("pending", "")
    told = (service.queries.show(job)["reason"], service.queries.jobs()[-1]["reason"])
    for reason in (*told, " ".join(service.queries.explain(job)["sentences"])):
        assert "owner is not certain" in reason
        assert "uid" in reason


@as_root
async def test_a_job_does_not_start_under_another_uid_that_its_user_got_since(open_home):
    async with serving(open_home, "fifo", gpus=1, jobs_per_gpu=1) as service:
        await service.requests.put_user("ann", {"uid": 7_000_104})
        first = await one(service, shell("sleep 60"))
        job = await one(service, shell("id -u"), "ann")
        await service.requests.put_user("ann", {"uid": 7_000_105})
        await service.requests.cancel(first)
        await until(lambda: service.state.jobs[job].hold_why)
        await until(lambda: status(service, job) == "pending")
        assert "submitted under uid 7000104, and user ann has uid 7000105 now" in service.queries.show(job)["reason"]
        assert f"`carpool release {job}` tries it again" in " ".join(service.queries.explain(job)["sentences"])
        await service.requests.put_user("ann", {"uid": 7_000_104})
        await service.requests.release(job)
        await until(lambda: output(service, job))
        assert output(service, job).split() == ["7000104"]


@as_root
async def test_a_record_that_another_user_wrote_is_no_record(open_home):
    jobs = await submitted(open_home)
    lose_journal(open_home)
    path = open_home.job(jobs[1]) / "job.json"
    write_private(path, json.dumps({**json.loads(path.read_text()), "user": "admin", "uid": 0}))
    os.chown(path, 7_000_102, -1)
    (open_home.jobs / "77").mkdir()
    write_private(open_home.jobs / "77" / "job.json", '{"user": 5, "id": 3, "spec": []}')
    async with serving(open_home, "fifo", gpus=2, jobs_per_gpu=1) as service:
        await settle(service)
        assert not {jobs[1], "77"} & service.state.jobs.keys()
        assert sum("cannot be trusted" in text for text in notes(service)) == 2
        await service.requests.cancel(jobs[0])


@as_root
async def test_a_user_without_a_uid_cannot_submit_to_a_service_of_root(home):
    async with serving(home) as service:
        await service.requests.put_user("carol", {"uid": None, "token_hash": "x"})
        with pytest.raises(InputError, match="carol has no uid"):
            await one(service, shell("id -u"), "carol")


@as_root
def test_root_does_not_serve_a_home_of_another_user(tmp_path):
    place = Home(tmp_path / "mine")
    place.create()
    os.chown(place.path, 7_000_101, -1)
    with pytest.raises(InputError, match="belongs to uid 7000101"):
        place.create()


async def test_a_revoked_user_stays_revoked_where_the_journal_forgets_it(home):
    async with serving(home) as service:
        await service.requests.put_user("dan", {"uid": 7_000_103, "token_hash": "old"})
    before = sqlite3.connect(home.journal).execute("SELECT row FROM users WHERE name = 'dan'").fetchone()[0]
    async with serving(home) as service:
        await service.requests.put_user("dan", {"uid": 7_000_103, "token_hash": "", "revoked": True})
    with sqlite3.connect(home.journal) as journal:
        journal.execute("UPDATE users SET row = ? WHERE name = 'dan'", (before,))
    async with serving(home) as service:
        assert service.queries.users()["dan"]["revoked"]
    home.users.write_text("{ damaged")
    async with serving(home) as service:
        assert service.queries.users()["dan"]["uid"] == 7_000_103
        assert any("users.json" in text for text in notes(service))
