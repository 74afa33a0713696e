"""What breaks, and what happens then: no job is lost, none runs twice, and the journal says what happened."""

import asyncio
import errno
import json
import os
import shutil
import signal
import sqlite3
from contextlib import suppress
from types import SimpleNamespace
from unittest.mock import ANY

import pytest

from carpool import channel
from carpool.live import clock as clocks
from carpool.live.clock import RealClock
from carpool.live.errors import Unavailable
from carpool.live.executors.base import GangEnded, GangOutcome
from carpool.live.executors.processes import ProcessIdentity, boot_id, start_ticks
from carpool.live.journal import sqlite
from carpool.live.service import driver, reserve
from carpool.live.service.reserve import DiskReserve
from tests.support.services import journalled, notes, one, output, pid_of, serving, shell, started, status, until


def fill_the_disk(service) -> None:
    """SQLite may not add a page: the same error as on a disk without room."""
    connection = service.store._connection
    pages = connection.exec_driver_sql("PRAGMA page_count").scalar()
    connection.exec_driver_sql(f"PRAGMA max_page_count={pages}")
    connection.rollback()
    real = service.store._write

    def write(commit) -> None:  # a small commit would still fit into free pages
        commit.notes.append((0.0, "x" * 100_000))
        try:
            real(commit)
        finally:
            commit.notes.pop()

    service.store._write = write


def make_room(service) -> None:
    del service.store._write
    service.store._connection.exec_driver_sql("PRAGMA max_page_count=1000000")
    service.store._connection.rollback()


def ended_when_stopped(service, job) -> None:
    """Check that a job's times are those of its worker."""
    row = service.queries.show(job)
    (rank,) = row["attempts"][0]["ranks"]
    assert row["finished"] == pytest.approx(rank["ended"], abs=0.5)
    assert row["ran_s"] < rank["ended"] - rank["started"] + 0.5


async def test_a_job_whose_workers_cannot_be_started_says_why_until_they_are(home):
    async with serving(home, gpus=1) as service:
        home.running.rmdir()
        home.running.write_text("no directory")
        job = await one(service, shell("true"))
        await until(lambda: "it cannot start now" in service.queries.jobs()[0]["reason"])
        assert service.queries.show(job)["status"] == "starting"
        assert "File exists" in " ".join(service.queries.explain(job)["sentences"])
        home.running.unlink()
        home.running.mkdir()
        await until(lambda: status(service, job) == "finished")
        assert service.queries.show(job)["reason"] == ""


async def test_a_job_that_its_node_refuses_is_on_hold_with_its_retries_until_it_is_released(home):
    async with serving(home, gpus=1) as service:
        launch, why = service.executor.launch, "b: uid 1001 is 'ann' at the service and unknown there"

        def refuse(wanted) -> None:
            ended = GangEnded(wanted.job, wanted.attempt, GangOutcome.REFUSED, why)
            asyncio.get_running_loop().call_soon(service.executor._listener.gang_ended, ended)

        service.executor.launch = refuse
        job = await one(service, shell("exit $((CARPOOL_ATTEMPT < 3))", retries=1))
        await until(lambda: service.queries.show(job)["held"])
        assert service.queries.jobs()[0]["reason"] == f"on hold: {why}"
        assert f"`carpool release {job}` tries it again" in " ".join(service.queries.explain(job)["sentences"])
        assert f"job {job} does not start: {why}; it is on hold" in notes(service)
        service.executor.launch = launch
        await service.requests.release(job)
        assert await service.queries.wait(job) == "finished"
        assert service.queries.show(job)["attempt"] == 3, "it failed once by itself, and had a retry left"


@pytest.mark.slow
class TestJournal:
    async def test_a_full_disk_refuses_submits_and_leaves_running_jobs_alone(self, home, monkeypatch):
        monkeypatch.setattr(driver, "RETRY_S", 0.1)

        async with serving(home, gpus=1) as service:
            job = await one(service, shell("sleep 0.5; echo through"))
            waiting = await one(service, shell("true", exclusive=True))
            await started(service, job)
            await asyncio.get_running_loop().run_in_executor(service.store._writer, fill_the_disk, service)
            with pytest.raises(Unavailable, match=r"disk is full.*running jobs continue"):
                await service.requests.submit([shell("true", name="x" * 200)] * 100, "admin")
            with pytest.raises(Unavailable):
                await service.requests.hold(waiting)
            await asyncio.sleep(0.8)
            assert output(service, job) == "through\n"
            assert not home.attempt(waiting, 1).exists(), "nothing is started that is not on disk"
            await asyncio.get_running_loop().run_in_executor(service.store._writer, make_room, service)
            assert await service.queries.wait(job) == "finished"
            assert await service.queries.wait(waiting) == "finished"
            assert await service.queries.wait(await one(service, shell("true"))) == "finished"
            assert len(service.queries.jobs(all=True)) == 3, "what was refused is not there"
            assert any("can be written again" in text for text in notes(service))

    @pytest.mark.parametrize("restart", [False, True])
    async def test_a_full_disk_keeps_no_job_from_being_cancelled(self, home, monkeypatch, restart):
        monkeypatch.setattr(driver, "RETRY_S", 0.1)

        async with serving(home, gpus=1, jobs_per_gpu=1) as service:
            job = await one(service, shell("trap '' TERM; sleep 30; sleep 30", retries=2))
            waiting, other = await one(service, shell("true")), await one(service, shell("true"))
            await started(service, job)
            pid = pid_of(service, job)
            await asyncio.get_running_loop().run_in_executor(service.store._writer, fill_the_disk, service)
            assert await service.requests.cancel_all([job, waiting, "999"]) == {"999": ANY}
            await service.requests.cancel(job)  # again, as a user would
            assert [service.queries.show(name)["status"] for name in (job, waiting)] == ["stopping", "stopping"]
            await until(lambda: start_ticks(pid) is None)
            assert "the journal records it" in service.queries.show(job)["reason"]
            await asyncio.sleep(1.5)
            if restart:
                service.driver.stopped = True  # as if it were killed before it could write
                service.inbox.woken.set()
            await asyncio.get_running_loop().run_in_executor(service.store._writer, make_room, service)
            if not restart:
                assert await service.queries.wait(job) == await service.queries.wait(waiting) == "cancelled"
                assert await service.queries.wait(other) == "finished"
                ended_when_stopped(service, job)
                return
            await service.executor.close()
            service.store.close()
            home.release()
        async with serving(home, gpus=1, jobs_per_gpu=1) as service:
            assert await service.queries.wait(job) == await service.queries.wait(waiting) == "cancelled"
            assert await service.queries.wait(other) == "finished"
            assert not any(home.cancelled.read_bytes()), "nothing is cancelled twice"
            ended_when_stopped(service, job)
            assert not home.attempt(waiting, 1).exists()

    async def test_a_locked_journal_is_waited_for_and_then_refuses_requests(self, home, monkeypatch):
        monkeypatch.setattr(sqlite, "BUSY_S", 0.3)
        monkeypatch.setattr(driver, "RETRY_S", 0.1)

        async with serving(home) as service:
            with sqlite3.connect(home.journal, isolation_level=None) as other:
                other.execute("BEGIN IMMEDIATE")
                with pytest.raises(Unavailable, match="locked"):
                    await one(service, shell("true"))
                other.execute("COMMIT")
            other.close()
            await until(lambda: not service.driver.write_error)
            assert await service.queries.wait(await one(service, shell("true"))) == "finished"

    async def test_a_damaged_tail_loses_no_job_and_runs_none_twice(self, home, tmp_path):
        async def before():
            async with serving(home, gpus=1, jobs_per_gpu=1) as service:
                first = await one(service, shell(f"echo a >> {tmp_path}/ran; sleep 5; echo b >> {tmp_path}/ran"))
                await started(service, first)
                second = await one(service, shell("true", name="lost"))
                return first, second

        async def after(first, second):
            async with serving(home, gpus=1, jobs_per_gpu=1) as service:
                assert await service.queries.wait(second) == "finished"
                assert await service.queries.wait(first) == "finished"
                assert any("set aside" in text for text in notes(service))
                return service.queries.show(first)["attempt"]

        first, second = await before()
        with sqlite3.connect(home.journal) as book:  # the plan of the first job and all after it become unreadable
            book.execute("DELETE FROM snapshots")
            (plan,) = book.execute("SELECT min(seq) FROM events WHERE kind = 'Planned'").fetchone()
            book.execute("UPDATE events SET data = substr(data, 1, 10) WHERE seq >= ? AND kind <> 'Note'", (plan,))
        book.close()
        await after(first, second)
        ran = (tmp_path / "ran").read_text().split()
        assert ran in (["a", "b"], ["a", "a", "b"]), "the lost workers were killed before it ran again"

    async def test_a_cut_write_ahead_log_loses_no_accepted_job(self, home):
        """As if the machine had died with half of the log on disk."""
        log = home.path / "journal.db-wal"

        async def before():
            async with serving(home, gpus=1, jobs_per_gpu=1) as service:
                jobs = [await one(service, shell("sleep 0.1", name=f"n{n}")) for n in range(6)]
                return jobs, home.journal.read_bytes(), log.read_bytes()

        jobs, book, written = await before()
        home.journal.write_bytes(book)
        log.write_bytes(written[: len(written) // 2])

        async def after():
            async with serving(home, gpus=1, jobs_per_gpu=1) as service:
                assert any("the journal lost it" in text for text in notes(service))
                await asyncio.gather(*(service.queries.wait(job) for job in jobs))
                assert [service.queries.show(job)["name"] for job in jobs] == [f"n{n}" for n in range(6)]

        await after()

    @pytest.mark.parametrize("damage", ["cut", "end", "begin"])
    async def test_a_damaged_file_is_salvaged_and_no_job_is_lost(self, home, tmp_path, damage):
        async def before():
            async with serving(home, gpus=1, jobs_per_gpu=1) as service:
                done = await one(service, shell(f"echo once >> {tmp_path}/ran"))
                assert await service.queries.wait(done) == "finished"
                gone = await one(service, shell("true", gpus=1))
                await service.requests.hold(gone)
                await service.requests.cancel(gone)
                running = await one(service, shell("sleep 1; echo through"))
                waiting = [await one(service, shell("true", name=f"n{n}" + "x" * 190)) for n in range(25)]
                await started(service, running)
                return done, gone, running, waiting

        done, gone, running, waiting = await before()
        data = home.journal.read_bytes()
        if damage == "cut":
            home.journal.write_bytes(data[: len(data) * 2 // 3])
        elif damage == "end":
            home.journal.write_bytes(data[:-9000] + os.urandom(9000))
        else:
            home.journal.write_bytes(os.urandom(5000) + data[5000:])

        async def after():
            async with serving(home, "sjf-ffs", gpus=1, jobs_per_gpu=8) as service:
                assert any("damaged" in text for text in notes(service))
                for job in (running, *waiting):
                    assert await service.queries.wait(job) == "finished"
                assert service.queries.show(done)["status"] == "finished"
                assert service.queries.show(gone)["status"] == "cancelled"
                assert await one(service, shell("true")) == str(int(waiting[-1]) + 1)

        await after()
        assert (tmp_path / "ran").read_text() == "once\n", "what had ended is not run again"
        assert list(home.path.glob("journal.damaged-*.db")), "the damaged file is kept"


class TestReserve:
    async def test_a_service_starts_on_a_full_disk_in_the_room_that_was_kept(self, home, monkeypatch):
        monkeypatch.setattr(reserve, "FIRST_S", 0.0)
        async with serving(home) as service:
            await until(home.reserve.exists)
            assert home.reserve.stat().st_size == reserve.RESERVE_BYTES
        assert home.reserve.exists(), "it stays while the disk has room"
        async with serving(home):
            assert home.reserve.exists()
        real = reserve._fill

        def full(path, size):
            if home.reserve.exists():
                path.write_bytes(b"as far as there was room")
                raise OSError(errno.ENOSPC, "No space left on device")
            real(path, size)

        monkeypatch.setattr(reserve, "_fill", full)
        monkeypatch.setattr(reserve, "FIRST_S", 1.0)
        async with serving(home) as service:
            assert not home.reserve.exists()
            assert any("the disk is full" in text for text in notes(service))
            await until(home.reserve.exists)
        assert not [path for path in home.path.iterdir() if path.name in (".probe", ".reserve")]

    def test_no_room_is_kept_where_there_is_little(self, tmp_path, monkeypatch):
        found = DiskReserve(tmp_path / "reserve")
        monkeypatch.setattr(reserve.shutil, "disk_usage", lambda path: SimpleNamespace(free=reserve.RESERVE_BYTES))
        assert not found.make()
        assert not list(tmp_path.iterdir())
        assert found.free_if_full() == "", "there is nothing to free"


class TestProcesses:
    async def test_a_killed_worker_fails_its_job_or_uses_a_retry(self, home):
        async with serving(home, gpus=4) as service:
            alone = await one(service, shell("sleep 30", gpus=2))
            again = await one(service, shell("test $CARPOOL_ATTEMPT = 2 || sleep 30", retries=1))
            for job in (alone, again):
                await started(service, job)
                os.kill(await until(lambda job=job: pid_of(service, job)), signal.SIGKILL)
            assert await service.queries.wait(alone) == "failed"
            assert service.queries.show(alone)["reason"] == "worker 0 was killed by SIGKILL"
            assert service.queries.show(alone)["exit_code"] == 137
            assert await service.queries.wait(again) == "finished"

    @pytest.mark.parametrize("placeholder", [False, True])
    async def test_a_job_that_ends_while_the_home_is_away_ends_as_it_did(self, home, tmp_path, placeholder):
        async with serving(home, gpus=3) as service:
            script = f"until test -e {tmp_path}/leave; do sleep 0.1; done; exit $CODE"
            jobs = [await one(service, shell(script, env={"CODE": code}, retries=2)) for code in ("0", "5")]
            killed = await one(service, shell("sleep 60"))
            for job in (*jobs, killed):
                await started(service, job)
            wrapper = json.loads((home.rank(killed, 1, 0) / "process.json").read_text())["pid"]
            aside = home.path.rename(home.path.with_name("aside"))
            if placeholder:  # what is left of a file system that was unmounted
                home.path.mkdir()
            os.kill(wrapper, signal.SIGKILL)
            (tmp_path / "leave").touch()
            await asyncio.sleep(2.5)
            assert [status(service, job) for job in (*jobs, killed)] == ["running"] * 3
            if placeholder:
                for path in sorted(home.path.rglob("*"), reverse=True):
                    path.rmdir() if path.is_dir() else path.unlink()
                home.path.rmdir()
            aside.rename(home.path)
            assert await service.queries.wait(killed) == "failed"
            assert [await service.queries.wait(job) for job in jobs] == ["finished", "failed"]
            assert [service.queries.show(job)["attempt"] for job in jobs] == [1, 3]
            assert sum("files cannot be read" in text for text in notes(service)) == 3

    async def test_a_read_that_fails_decides_nothing(self, home, monkeypatch):
        async with serving(home) as service:
            job = await one(service, shell("sleep 0.5"))
            await started(service, job)
            real = channel.read_json_in

            def fail(directory, path, *more):
                if path == "exit.json":
                    raise OSError(errno.EIO, "Input/output error")
                return real(directory, path, *more)

            with monkeypatch.context() as patched:
                patched.setattr(channel, "read_json_in", fail)
                await asyncio.sleep(1.5)
                assert status(service, job) == "running"
            assert await service.queries.wait(job) == "finished"

    async def test_a_job_whose_directory_is_removed_for_good_has_failed(self, home):
        async with serving(home) as service:
            job = await one(service, shell("sleep 1"))
            await started(service, job)
            while home.attempt(job, 1).exists():
                with suppress(OSError):  # the wrapper may write a file meanwhile
                    shutil.rmtree(home.attempt(job, 1))
            assert await service.queries.wait(job) == "failed"

    async def test_no_process_is_left_when_a_wrapper_is_killed(self, home, tmp_path):
        async with serving(home) as service:
            path = tmp_path / "child"
            hidden = "setsid env -i sleep 43"  # in a session of its own, without the mark
            script = f"sleep 41 & echo $! > {path}; {hidden} & echo $! >> {path}; sleep 42"
            job = await one(service, shell(script))
            children = await until(lambda: path.exists() and len(found := path.read_text().split()) == 2 and found)
            log = home.rank(job, 1, 0) / "stdout.log"
            reader = await asyncio.create_subprocess_exec("tail", "-f", str(log), stdout=asyncio.subprocess.DEVNULL)
            worker = await until(lambda: pid_of(service, job))
            record = json.loads((home.rank(job, 1, 0) / "process.json").read_text())
            os.kill(record["pid"], signal.SIGKILL)
            assert await service.queries.wait(job) == "failed"
            assert service.queries.show(job)["reason"] == "worker 0: its wrapper was killed"
            assert service.queries.show(job)["exit_code"] == 137  # the kernel killed the worker
            assert start_ticks(worker) is None
            await until(lambda: not any(start_ticks(int(child)) for child in children))
            assert reader.returncode is None, "who reads a log is left alone"
            reader.kill()
            await reader.wait()

    async def test_after_a_reboot_jobs_restart_and_processes_with_the_old_pids_are_left_alone(self, home, tmp_path):
        async with serving(home) as service:
            job = await one(service, shell(f"echo x >> {tmp_path}/ran; test $CARPOOL_ATTEMPT = 2 || sleep 30"))
            await started(service, job)
            worker = await until(lambda: pid_of(service, job))
        path = home.rank(job, 1, 0) / "process.json"
        record = json.loads(path.read_text())
        wrapper = ProcessIdentity.of(record)
        path.write_text(json.dumps({**record, "boot": "an earlier one"}))
        with sqlite3.connect(home.journal) as book:
            book.execute("UPDATE meta SET value = 'an earlier one' WHERE key = 'boot'")
        book.close()
        async with serving(home) as service:
            assert await service.queries.wait(job) == "finished"
            assert service.queries.show(job)["attempt"] == 2
            assert journalled(service, "Failed")[0]["reason"] == "the machine restarted"
            assert start_ticks(worker) is not None, "a process of that number is another one after a reboot"
        wrapper.signal(signal.SIGKILL)

    def test_a_reused_pid_is_not_mistaken_for_the_recorded_process(self):
        me = ProcessIdentity(os.getpid(), start_ticks(os.getpid()), boot_id())
        assert me.alive()
        assert not ProcessIdentity(me.pid, me.start - 1, me.boot).alive()
        assert not ProcessIdentity(me.pid, me.start, "another boot").alive()
        assert not ProcessIdentity(me.pid, me.start - 1, me.boot).signal(signal.SIGKILL)

    async def test_a_policy_that_raises_stops_nothing_else(self, home, tmp_path):
        (tmp_path / "bad.py").write_text(
            "from carpool.policies.simple.fifo import Fifo\n"
            "class Bad(Fifo):\n"
            "    def decide(self, view):\n"
            "        if any(job.job.gpus == 2 for job in view.queue): raise RuntimeError('oops')\n"
            "        return super().decide(view)\n"
        )

        async with serving(home, f"{tmp_path}/bad.py:Bad") as service:
            runs = await one(service, shell("sleep 0.3"))
            await started(service, runs)
            bad = await one(service, shell("true", gpus=2))
            assert await service.queries.wait(runs) == "finished"
            assert await service.queries.wait(bad) == "finished", "another policy stands in"
            assert await service.queries.wait(await one(service, shell("true"))) == "finished"
            assert any("RuntimeError: oops (bad.py, line 4)" in text for text in notes(service))


class TestMemory:
    SCRIPT = "test $CARPOOL_ATTEMPT = {last} && exit 0; echo 'torch.OutOfMemoryError: CUDA out of memory.' >&2; exit 1"

    async def test_a_job_out_of_memory_restarts_split_then_alone_then_fails(self, home):
        async with serving(home, "sjf-ffs", gpus=1) as service:
            mate = await one(service, shell("sleep 30", duration_s=1000))
            await started(service, mate)
            hopeless = shell(self.SCRIPT.format(last=9), can_shrink=True, batch=8, duration_s=2000, iterations=10)
            job = await one(service, hopeless)
            await until(lambda: service.queries.show(job)["attempt"] == 2)
            await until(lambda: len(journalled(service, "ConstraintsChanged")) == 2)
            assert [r["min_accumulation"] or r["exclusive"] for r in journalled(service, "ConstraintsChanged")] == [
                2,
                True,
            ]
            await until(lambda: status(service, job) == "pending")  # alone means that it waits for its mate to end
            await service.requests.cancel(mate)
            assert await service.queries.wait(job) == "failed"
            reasons = [event["reason"] for event in journalled(service, "Failed")]
            assert [reason.partition(";")[2].split(" with")[0] for reason in reasons[:2]] == [
                " it restarts",
                " it restarts alone on its GPUs",
            ]
            assert reasons[2] == "out of GPU memory, although it had its GPUs to itself"

    async def test_a_job_that_cannot_be_split_restarts_alone_at_once(self, home):
        async with serving(home, "sjf-ffs", gpus=1) as service:
            mate = await one(service, shell("sleep 0.6", duration_s=1000))
            await started(service, mate)
            job = await one(service, shell(self.SCRIPT.format(last=2), duration_s=2000))
            assert await service.queries.wait(job) == "finished"
            assert [r["exclusive"] for r in journalled(service, "ConstraintsChanged")] == [True]
            assert (
                service.queries.show(job)["started"]
                < service.queries.show(mate)["finished"]
                < service.queries.show(job)["finished"]
            )


class TestClock:
    def test_setting_the_wall_clock_changes_nothing(self, monkeypatch):
        clock = RealClock()
        before = clock.now()
        monkeypatch.setattr(clocks.time, "time", lambda: before + 1e6)
        assert clock.now() - before < 60.0

    def test_a_restart_follows_the_time_since_boot_while_jobs_run(self, monkeypatch):
        clock, up = RealClock(), clocks.since_boot()
        wrong = clock.now() - 5e6  # the journal was written before the wall clock was set forwards
        clock.resume(wrong, up - 10.0, boot_id(), busy=True)
        assert clock.now() == pytest.approx(wrong + 10.0, abs=1.0), "no progress is faked"

    def test_a_restart_never_goes_back(self):
        clock = RealClock()
        future = clock.now() + 1e6
        clock.resume(future, 5.0, "an earlier boot", busy=True)
        assert clock.now() == pytest.approx(future, abs=1.0)
        clock = RealClock()
        clock.resume(clock.now() - 1e6, 5.0, "an earlier boot", busy=False)
        assert clock.now() == pytest.approx(RealClock().now(), abs=1.0), "with nothing running the wall clock is right"
