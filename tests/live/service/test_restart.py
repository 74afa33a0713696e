"""What a restarted service makes of gangs that ended, run or were hidden while it was away, and when it says so."""

import asyncio
import json
import os
import shutil
import sqlite3
import time

import pytest

from carpool.errors import InputError
from carpool.live.executors import local
from carpool.live.executors.launching import kill_workers
from carpool.live.executors.processes import boot_id, start_ticks
from carpool.live.freezer import cgroup_below, make_cgroup
from carpool.live.rank import CGROUP
from carpool.live.service.executor_events import ExecutorEvents
from tests.support.services import journalled, notes, one, pid_of, serving, shell, started, status, until

pytestmark = pytest.mark.slow


def exits(home, job: str, attempt: int = 1) -> dict | None:
    """The exit record of a job's first worker; None while it runs."""
    path = home.rank(job, attempt, 0) / "exit.json"
    text = path.read_text().strip() if path.exists() else ""
    return json.loads(text) if text else None


async def test_a_gang_that_ended_meanwhile_is_not_run_again_while_others_are_recovered(home, tmp_path, monkeypatch):
    async with serving(home) as service:
        job = await one(service, shell(f"echo x >> {tmp_path}/ran; sleep 0.3"))
        await started(service, job)
    await until(lambda: exits(home, job))
    (home.running / "999-1").touch()  # a gang that the journal does not know
    monkeypatch.setattr(local, "kill_workers", lambda directory: time.sleep(0.8) or 0)
    async with serving(home) as service:
        assert await service.queries.wait(job) == "finished"
        assert service.queries.show(job)["attempt"] == 1
        assert not journalled(service, "Failed")
    assert (tmp_path / "ran").read_text() == "x\n"


@pytest.mark.parametrize("change", ["requeue", "cancel"])
async def test_a_change_while_an_end_is_read_does_not_undo_it(home, tmp_path, monkeypatch, change):
    """The end of a gang is read in a thread; a request that comes meanwhile must not find a job without a gang."""
    read = local.LocalGang.ended

    def slowly(gang):
        time.sleep(0.6)
        return read(gang)

    monkeypatch.setattr(local.LocalGang, "ended", slowly)
    async with serving(home) as service:
        job = await one(service, shell(f"echo x >> {tmp_path}/ran; sleep 0.2"))
        await until(lambda: exits(home, job))
        await asyncio.sleep(0.2)
        await getattr(service.requests, change)(job)
        assert await service.queries.wait(job) == "finished"
    assert (tmp_path / "ran").read_text() == "x\n"


async def test_a_job_that_ended_while_no_service_ran_is_recorded_with_its_own_times(home, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(ExecutorEvents, "gang_started", lambda *_: None)  # as if it was killed before it wrote that
        async with serving(home) as service:
            job, mate = [await one(service, shell(f"sleep {n}", duration_s=100.0)) for n in (0.4, 0.7)]
            await until(lambda: exits(home, mate) is None and pid_of(service, mate))
    await until(lambda: exits(home, mate) and exits(home, job))
    await asyncio.sleep(1.5)
    async with serving(home) as service:
        for name in (job, mate):
            assert await service.queries.wait(name) == "finished"
            row, seen = service.queries.show(name), exits(home, name)
            assert row["started"] == pytest.approx(seen["began"], abs=0.2)
            assert row["finished"] == pytest.approx(seen["ended"], abs=0.2)
            assert row["ran_s"] < seen["ended"] - seen["began"] + 0.5
        (replayed,) = [row for row in await service.queries.workload() if row["job"] == job]
        assert replayed["finished"] == pytest.approx(exits(home, job)["ended"], abs=0.2)
        now = service.clock.now()
    async with serving(home) as service:
        assert service.clock.now() >= now, "the clock follows the journal's last moment, not an end of long ago"


async def test_the_seconds_from_cancel_to_death_are_no_waiting(home):
    async with serving(home, gpus=1) as service:
        job = await one(service, shell("trap '' TERM; echo deaf; sleep 9; sleep 9", grace_s=1.5))
        await started(service, job)
        while b"deaf" not in (await service.queries.read_log(job, 0, "stdout", attempt=1)).data:
            await asyncio.sleep(0.02)
        waited_s = service.queries.show(job)["waited_s"]
        await service.requests.cancel(job)
        await asyncio.sleep(0.4)
        row, listed = service.queries.show(job), service.queries.jobs()[0]
        assert row["waited_s"] == row["receipt"]["waited_s"] == listed["waited_s"] == waited_s
        await service.queries.wait(job)
        row, listed = service.queries.show(job), service.queries.jobs(all=True)[0]
        assert row["waited_s"] == row["receipt"]["waited_s"] == listed["waited_s"] == waited_s


async def test_a_waiting_job_has_waited_the_same_time_in_every_answer(home):
    async with serving(home, gpus=1, jobs_per_gpu=1) as service:
        await started(service, await one(service, shell("sleep 5", exclusive=True)))
        job = await one(service, shell("true"))
        await asyncio.sleep(0.1)
        row = service.queries.show(job)
        assert row["waited_s"] == row["receipt"]["waited_s"]


@pytest.mark.parametrize("folder", ["running", "jobs"])
async def test_jobs_start_after_a_folder_of_the_home_was_removed(home, folder):
    async with serving(home) as service:
        assert await service.queries.wait(await one(service, shell("true"))) == "finished"
        while getattr(home, folder).exists():  # the service may be writing the end of the first job
            shutil.rmtree(getattr(home, folder), ignore_errors=True)
        async with asyncio.timeout(20):
            assert await service.queries.wait(await one(service, shell("true"))) == "finished"


async def test_what_runs_is_ended_before_a_job_whose_directory_was_removed_runs_again(home, tmp_path):
    script = f"setsid sleep 31 & echo $! >> {tmp_path}/children; sleep 30"
    async with serving(home, gpus=2) as service:
        jobs = [await one(service, shell(script)) for _ in range(2)]
        for job in jobs:
            await started(service, job)
        before = [await until(lambda job=job: pid_of(service, job)) for job in jobs]
        await until(lambda: (tmp_path / "children").exists() and len((tmp_path / "children").read_text().split()) == 2)
        children = [int(pid) for pid in (tmp_path / "children").read_text().split()]
    shutil.rmtree(home.jobs)
    shutil.rmtree(home.running)
    assert all(start_ticks(pid) for pid in [*before, *children])
    async with serving(home, gpus=2) as service:
        assert not any(start_ticks(pid) for pid in [*before, *children]), "they are gone before anything is launched"
        assert any("without its directory" in text for text in notes(service))
        for job in jobs:
            await until(lambda job=job: status(service, job) == "running" and pid_of(service, job))
            assert service.queries.show(job)["attempt"] == 2
            await service.requests.cancel(job)
            await service.queries.wait(job)


async def test_processes_of_other_homes_and_of_people_are_left_alone(home, tmp_path):
    mark = {**os.environ, "CARPOOL_WORKER_DIR": f"{home.jobs}-of-another/1/attempt-1/rank-0"}
    other = await asyncio.create_subprocess_exec("sleep", "20", env=mark)
    try:
        async with serving(home) as service:
            assert await service.queries.wait(await one(service, shell("true"))) == "finished"
            assert other.returncode is None
    finally:
        other.kill()
        await other.wait()


async def test_a_cgroup_is_removed_whose_wrapper_was_killed_after_it_recorded_the_exit(home):
    cgroup = make_cgroup(cgroup_below(f"{CGROUP}test-{os.getpid()}") or "")
    if cgroup is None:
        pytest.skip("no cgroups can be made here")
    async with serving(home) as service:
        job = await one(service, shell("sleep 0.3"))
        await started(service, job)
    await until(lambda: exits(home, job))
    record = home.rank(job, 1, 0) / "process.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "cgroup": cgroup.path}))
    async with serving(home) as service:
        assert await service.queries.wait(job) == "finished"
        assert not os.path.exists(cgroup.path)


def test_the_cgroup_of_a_wrapper_that_never_ran_its_worker_is_removed(tmp_path):
    """The service was killed during the launch; the next one kills the wrapper while that removes its cgroup."""
    cgroup = make_cgroup(cgroup_below(f"{CGROUP}never-{os.getpid()}") or "")
    if cgroup is None:
        pytest.skip("no cgroups can be made here")
    (tmp_path / "rank-0").mkdir()
    gone = {"pid": 2**22 + 1, "start": 1, "boot": boot_id(), "cgroup": cgroup.path}
    (tmp_path / "rank-0" / "process.json").write_text(json.dumps(gone))
    (tmp_path / "rank-0" / "exit.json").write_text('{"never": true}')
    kill_workers(tmp_path)
    assert not os.path.exists(cgroup.path)


async def test_a_wrapper_that_records_its_cgroup_while_it_is_killed_leaves_none(home, monkeypatch):
    """A service was killed right after it started the wrapper, which has written nothing when the next one looks."""
    path = cgroup_below(f"{CGROUP}late-{os.getpid()}") or ""

    def kill_too_late(processes):
        make_cgroup(path)
        (home.rank("7", 1, 0) / "process.json").write_text(json.dumps({**gone, "cgroup": path}))
        return 1

    gone = {"pid": 2**22 + 1, "start": 1, "boot": boot_id()}
    home.create()
    home.rank("7", 1, 0).mkdir(parents=True)
    (home.running / "7-1").touch()
    monkeypatch.setattr(local, "kill_processes", kill_too_late)
    async with serving(home):
        assert not os.path.exists(path)
        assert not (home.running / "7-1").exists()


@pytest.mark.parametrize("copy", [True, False])
async def test_damaged_rows_of_jobs_do_not_keep_the_service_from_starting(home, copy):
    """A spec that is damaged comes from the copy in the job's directory; without one, the job is kept on hold."""
    async with serving(home, gpus=1, jobs_per_gpu=1) as service:
        done = await one(service, shell("true"))
        assert await service.queries.wait(done) == "finished"
        runs = await one(service, shell("sleep 30"))
        await started(service, runs)
        waits, other = await one(service, shell("true", name="kept")), await one(service, shell("true"))
    if not copy:
        (home.job(waits) / "job.json").unlink()
    with sqlite3.connect(home.journal) as journal:
        journal.execute("UPDATE jobs SET spec = '{\"command\": 7', source = '{' WHERE id = ?", (waits,))
        journal.execute("UPDATE jobs SET spec = '[]', story = '[' WHERE id = ?", (done,))
        journal.execute("UPDATE meta SET value = 'many' WHERE key = 'jobs_per_gpu'")
        journal.execute("INSERT INTO users VALUES ('eve', '{')")
    journal.close()
    async with serving(home, gpus=1, jobs_per_gpu=1) as service:
        assert any(f"job {waits}: its row in the journal is damaged" in text for text in notes(service))
        assert {row["job"] for row in service.queries.jobs(all=True)} == {runs, waits, other}
        with pytest.raises(InputError, match="damaged"):
            service.queries.show(done)
        await service.requests.cancel(runs)
        assert await service.queries.wait(other) == "finished"
        if copy:
            assert await service.queries.wait(waits) == "finished"
            assert service.queries.show(waits)["name"] == "kept"
        else:
            await until(lambda: service.state.jobs[waits].on_hold)
            assert any(f"job {waits} does not start: what was submitted is lost" in text for text in notes(service))
            await service.requests.cancel(waits)
            assert await service.queries.wait(waits) == "cancelled"
            assert not home.attempt(waits, 1).exists()
