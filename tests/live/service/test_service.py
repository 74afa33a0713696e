"""The service with real processes: what becomes of jobs that users submit, change and leave alone."""

import asyncio
import os
from dataclasses import replace

import pytest

from carpool.core.model import Limits
from carpool.core.perf import Placement
from carpool.errors import InputError
from carpool.live import home as homes
from carpool.live.errors import HomeInUse, NoSuchJob, WrongStatus
from carpool.live.executors.processes import start_ticks
from carpool.profile.schema import load, save
from tests.support.services import notes, one, output, pid_of, python, serving, shell, started, status, until


async def test_workers_get_their_rank_and_nothing_of_the_services_environment(home, monkeypatch):
    monkeypatch.setenv("CARPOOL_TOKEN", "the service's secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another one")

    async with serving(home, gpus=4) as service:
        job = await one(service, shell("env; pwd", gpus=3, env={"COLOUR": "blue"}, directory="/usr"))
        assert await service.queries.wait(job) == "finished"
        for rank in range(3):
            said = dict(line.split("=", 1) for line in output(service, job, rank).splitlines() if "=" in line)
            assert said["RANK"] == said["LOCAL_RANK"] == str(rank)
            assert said["WORLD_SIZE"] == said["LOCAL_WORLD_SIZE"] == "3"
            assert said["MASTER_ADDR"] == "127.0.0.1"
            assert 1024 <= int(said["MASTER_PORT"]) <= 65535
            assert said["CARPOOL_GPUS"] == f"node0:{rank}"
            assert said["CARPOOL_JOB"] == job
            assert said["CUDA_VISIBLE_DEVICES"] == ""
            assert said["COLOUR"] == "blue"
            assert output(service, job, rank).splitlines()[-1] == "/usr"
            assert "CARPOOL_TOKEN" not in said
            assert "secret" not in output(service, job, rank)
        row = service.queries.show(job)
        assert row["exit_code"] == 0
        assert [rank["exit_code"] for rank in row["attempts"][0]["ranks"]] == [0, 0, 0]
        assert row["submitted"] <= row["started"] <= row["finished"]


async def test_torchrun_gets_one_process_for_the_whole_gang(home, tmp_path):
    program = tmp_path / "torchrun"
    program.write_text("#!/bin/sh\necho $CARPOOL_GPUS $WORLD_SIZE\n")
    program.chmod(0o755)

    async with serving(home) as service:
        job = await one(service, shell("", gpus=2, command=[str(program), "train.py"]))
        assert await service.queries.wait(job) == "finished"
        assert output(service, job) == "node0:0,node0:1 1\n"
        assert len(service.queries.show(job)["attempts"][0]["ranks"]) == 1


async def test_a_worker_that_fails_ends_its_gang_and_is_named(home):
    async with serving(home) as service:
        script = "if [ $RANK = 1 ]; then exit 7; fi; sleep 60"
        job, other = await service.requests.submit([shell(script, gpus=2), shell("nosuchprogram")], "admin")
        assert await service.queries.wait(job) == "failed"
        assert (service.queries.show(job)["exit_code"], service.queries.show(job)["reason"]) == (
            7,
            "worker 1 ended with exit code 7",
        )
        assert await service.queries.wait(other) == "failed"
        assert "not found" in output(service, other, stream="stderr")
        missing = await one(service, shell("", command=["/no/such/program"]))
        assert await service.queries.wait(missing) == "failed"
        assert service.queries.show(missing)["exit_code"] == 127
        assert "cannot run /no/such/program" in output(service, missing, stream="stderr")


async def test_a_retry_runs_again_and_the_last_failure_is_final(home, tmp_path):
    async with serving(home) as service:
        lucky = f"echo x >> {tmp_path}/tries; test $(wc -l < {tmp_path}/tries) -ge 3"
        first, second = await service.requests.submit([shell(lucky, retries=2), shell("exit 1", retries=1)], "admin")
        assert await service.queries.wait(first) == "finished"
        assert service.queries.show(first)["attempt"] == 3
        assert await service.queries.wait(second) == "failed"
        assert service.queries.show(second)["attempt"] == 2


async def test_a_dependent_job_starts_after_the_other_or_is_cancelled_with_it(home):
    async with serving(home) as service:
        good, bad = await service.requests.submit([shell("sleep 0.2"), shell("sleep 0.2; exit 1")], "admin")
        later = await one(service, shell("true", after=[good]))
        never = await one(service, shell("true", after=[bad, good]))
        assert service.queries.show(later)["reason"] == f"waits for job {good}"
        assert await service.queries.wait(later) == "finished"
        assert await service.queries.wait(never) == "cancelled"
        assert service.queries.show(later)["started"] >= service.queries.show(good)["finished"]
        assert "which it waits for, failed" in service.queries.show(never)["reason"]
        assert await service.queries.wait(await one(service, shell("true", after=[good]))) == "finished"
        with pytest.raises(InputError, match="failed, so this one would never start"):
            await one(service, shell("true", after=[bad]))
        with pytest.raises(InputError, match="there is no job"):
            await one(service, shell("true", after=["999"]))


async def test_hold_release_requeue_priority_and_cancel(home):
    async with serving(home, "fifo", gpus=1, jobs_per_gpu=1) as service:
        running, held, last = await service.requests.submit([shell("sleep 30"), shell("true"), shell("true")], "admin")
        await started(service, running)
        await service.requests.hold(held)
        await service.requests.set_priority(last, 5)
        assert (service.queries.show(held)["status"], service.queries.show(held)["held"]) == ("pending", True)
        await service.requests.requeue(running)
        await until(lambda: service.queries.show(running)["attempt"] == 2, 10)
        assert service.queries.show(last)["finished"], "the job of high priority went first"
        assert service.queries.show(held)["started"] is None, "what is on hold does not start"
        await service.requests.cancel(running)
        assert await service.queries.wait(running) == "cancelled"
        await service.requests.release(held)
        assert await service.queries.wait(held) == "finished"
        for change in (
            service.requests.cancel,
            service.requests.hold,
            service.requests.release,
            service.requests.requeue,
        ):
            with pytest.raises(WrongStatus):
                await change(held)
            with pytest.raises(NoSuchJob):
                await change("4711")
        assert [row["job"] for row in service.queries.jobs(all=True)] == [running, held, last]
        assert service.queries.jobs() == []


async def test_a_worker_that_ignores_sigterm_is_killed_with_all_its_children(home, tmp_path):
    async with serving(home) as service:
        deaf = f"trap '' TERM; (setsid sleep 61 & echo $! > {tmp_path}/child; wait) & sleep 60; sleep 60"
        job = await one(service, shell(deaf))
        child = int(await until(lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text()))
        await service.requests.cancel(job)
        assert await service.queries.wait(job) == "cancelled"
        assert service.queries.show(job)["exit_code"] == 137
        assert start_ticks(child) is None, "a child that opened a session of its own is alive"


async def test_a_submission_with_a_job_that_could_never_run_is_refused_whole(home):
    async with serving(home) as service:
        with pytest.raises(InputError, match="asks for 3 GPUs and the cluster has 2"):
            await service.requests.submit([shell("true"), shell("true", gpus=3)], "admin")
        assert service.queries.jobs(all=True) == []
        await service.requests.set_limits("admin", Limits(gpus=1))
        with pytest.raises(InputError, match="may hold 1"):
            await one(service, shell("true", gpus=2))
        await service.requests.put_user("bob", {"uid": 7_000_001})
        assert await service.queries.wait(await one(service, shell("true", gpus=2), "bob")) == "finished"


async def test_a_given_profile_is_used_and_may_differ_at_the_next_start(home, tmp_path):
    known = load("t4").tasks["bert"]
    save(replace(load("t4"), name="mine", tasks={"own": known}), tmp_path / "mine.json")
    spec = shell("sleep 60", model="own", iterations=10, batch=8)

    async with serving(home) as service:
        answer = await service.queries.dry_run([spec], "admin")
        assert answer["run"]["source"] == "an assumption, because nothing is known of the job"
        assert "3600" not in " ".join(answer["sentences"])
    async with serving(home, profile=str(tmp_path / "mine.json")) as service:
        alone_s = 10 * known.core().iteration(8, 1, Placement(1, 1))
        assert (await service.queries.dry_run([spec], "admin"))["run"]["value"] == pytest.approx(alone_s)
        job = await one(service, spec)
        await started(service, job)
    async with serving(home) as service:  # which does not know the job's model
        assert status(service, job) == "running"
        await service.requests.cancel(job)
        await service.queries.wait(job)


async def test_a_code_snapshot_keeps_the_directory_as_it_was(home, tmp_path):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "word").write_text("before")

    async with serving(home) as service:
        await service.requests.submit([shell("sleep 0.3", gpus=2, exclusive=True)], "admin")
        spec = shell("cat word", directory=str(tmp_path / "code"), snapshot=True, exclusive=True)
        job = await one(service, spec)
        (tmp_path / "code" / "word").write_text("after")
        assert await service.queries.wait(job) == "finished"
        assert output(service, job) == "before"


async def test_code_snapshots_of_jobs_that_have_not_ended_have_a_bound_for_each_user(home, tmp_path):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "large").write_bytes(bytes(300_000))
    (tmp_path / "code" / "small").touch()
    waiting = shell("echo x > more; sleep 60", directory=str(tmp_path / "code"), snapshot=True)
    quick = replace(waiting, command=("true",))
    async with serving(home, gpus=4, max_snapshots=2**20) as service:
        answers = await asyncio.gather(
            *(service.requests.submit([waiting, waiting], "admin") for _ in range(2)), return_exceptions=True
        )
        (jobs,) = [found for found in answers if isinstance(found, list)]
        (refused,) = [found for found in answers if isinstance(found, InputError)]
        assert "your jobs that have not ended have 600 KiB of 1.0 MiB" in str(refused)
        ended = await one(service, quick)
        await service.queries.wait(ended)
        await service.queries.wait(await one(service, quick))
        await started(service, jobs[0])
        (home.snapshot(jobs[0]) / "more").write_bytes(bytes(2**20))  # what a job writes there is not part of it

    async with serving(home, gpus=4, max_snapshots=2**20) as service:
        with pytest.raises(InputError, match=r"600 KiB of 1\.0 MiB"):
            await service.requests.submit([waiting, waiting], "admin")
        await service.requests.cancel_all(jobs)
        for job in jobs:
            await service.queries.wait(job)
        last = await service.requests.submit([waiting, waiting, waiting], "admin")
        await service.requests.cancel_all(last)


async def test_jobs_whose_snapshots_cannot_be_copied_leave_nothing(home, tmp_path, monkeypatch):
    (tmp_path / "code").mkdir()
    spec = shell("true", directory=str(tmp_path / "code"), snapshot=True)
    async with serving(home) as service:
        made = service.requests._copy
        monkeypatch.setattr(service.requests, "_copy", lambda *a: made(*a) if not list(home.jobs.iterdir()) else 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await service.requests.submit([spec, spec], "admin")
        assert list(home.jobs.iterdir()) == []


async def test_a_restarted_service_finds_running_jobs_and_jobs_that_ended_meanwhile(home, monkeypatch, tmp_path):
    monkeypatch.setattr(homes, "LOCK_S", 0.1)

    def until_file(name: str, then: str):
        return shell(f"while [ ! -e {tmp_path / name} ]; do sleep 0.05; done; {then}")

    async with serving(home) as service:
        specs = [until_file("long", "echo done"), until_file("short", "exit 5")]
        long, short = await service.requests.submit(specs, "admin")
        await started(service, long)
        await started(service, short)
        pid = await until(lambda: pid_of(service, long))  # a gang runs before its first worker has recorded its pid
        with pytest.raises(HomeInUse, match="another service"):
            async with serving(home):
                pass
    (tmp_path / "short").touch()
    await asyncio.sleep(0.6)
    async with serving(home) as service:
        assert await service.queries.wait(short) == "failed"
        assert service.queries.show(short)["exit_code"] == 5
        assert status(service, long) == "running"
        assert pid_of(service, long) == pid
        (tmp_path / "long").touch()
        assert await service.queries.wait(long) == "finished"
        assert output(service, long) == "done\n"
        assert service.queries.show(long)["attempt"] == 1


async def test_memory_and_cores_are_limited_as_the_job_asks(home):
    code = """
import os
print(len(os.sched_getaffinity(0)))
try:
    bytearray(300 << 20)
    print("fits")
except MemoryError:
    print("no")
"""

    async with serving(home) as service:
        bound = await one(service, python(code, cpus=1, memory=200 << 20))
        free = await one(service, python(code))
        assert await service.queries.wait(bound) == await service.queries.wait(free) == "finished"
        assert output(service, bound).split() == ["1", "no"]
        assert output(service, free).split() == [str(len(os.sched_getaffinity(0))), "fits"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start jobs under other users' ids")
async def test_as_root_each_job_runs_as_its_own_user(home, tmp_path):
    os.chmod(tmp_path, 0o755)
    for parent in tmp_path.parents:
        if parent.stat().st_uid == 0 and str(parent).startswith("/tmp/"):
            parent.chmod(0o755)

    async with serving(home) as service:
        await service.requests.put_user("nobody", {"uid": 65534})
        script = """
            id -u; touch $CARPOOL_CHECKPOINT_DIR/mine
            cat $CARPOOL_WORKER_DIR/control.json > /dev/null && echo read
            touch $CARPOOL_WORKER_DIR/x 2> /dev/null || echo kept
            cat $CARPOOL_WORKER_DIR/../../../../journal.db
        """
        job = await one(service, shell(script), "nobody")
        assert await service.queries.wait(job) == "failed", "it cannot read the journal"
        assert output(service, job).split() == ["65534", "read", "kept"]
        assert "Permission denied" in output(service, job, stream="stderr")


async def test_jobs_of_gpus_that_are_gone_run_again_on_the_others(home, tmp_path):
    script = f"echo $CARPOOL_GPUS >> {tmp_path}/ran; test $CARPOOL_ATTEMPT = 2 || sleep 30"

    async with serving(home, "fifo", gpus=2, jobs_per_gpu=1) as service:
        jobs = [await one(service, shell(script)) for _ in range(2)]
        for job in jobs:
            await started(service, job)
        written = tmp_path / "ran"  # a job is running before its script has written anything
        await until(lambda: written.exists() and len(written.read_text().split()) == 2)
    async with serving(home, "fifo", gpus=1, jobs_per_gpu=1) as service:
        assert any("the GPUs of node0 changed" in text for text in notes(service))
        for job in jobs:
            assert await service.queries.wait(job) == "finished"
        assert len(service.queries.gpus()["nodes"][0]["gpus"]) == 1
    ran = (tmp_path / "ran").read_text().split()
    assert (sorted(ran[:2]), ran[2:]) == (["node0:0", "node0:1"], ["node0:0", "node0:0"])
