"""Workers that replace or falsify the files of their directory: the service goes on, and their jobs end."""

import asyncio
import json
import os
import resource
import signal
import time

import pytest

from carpool import channel
from carpool.live.home import read_json
from tests.support.services import notes, one, output, python, serving, shell, started, until

pytestmark = pytest.mark.slow

LONG_S = 30.0
FILES = "report watch control.json process.json exit.json stop.json pause.json paused.json stdout.log stderr.log"
REPLACE = {
    "fifo": "rm -f $f; mkfifo $f",
    "device": "rm -f $f; ln -s /dev/zero $f",
    "sparse": "rm -f $f; truncate -s 4G $f",
    "nonsense": "rm -f $f; echo '[[], {}]' > $f",
}


@pytest.fixture(autouse=True)
def no_test_hangs():
    """A service that hangs in a read does not see a timeout of asyncio."""

    def give_up(*_):
        raise AssertionError("the service hangs")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, LONG_S)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("how", REPLACE)
async def test_a_worker_that_replaces_its_files_harms_only_itself(home, how):
    """The job ends after a while; a second one, which waits, is cancelled."""
    hostile = f"cd $CARPOOL_WORKER_DIR; for f in {FILES} ../gang.json; do {REPLACE[how]}; done; sleep "
    async with serving(home, gpus=3) as service:
        ends, stays = await one(service, shell(hostile + "1.3; exit 3")), await one(service, shell(hostile + "60"))
        await started(service, stays)
        await asyncio.sleep(0.5)
        began = time.monotonic()
        for job in (ends, stays):
            service.queries.show(job)
            service.progress.look()
        assert len(service.queries.jobs()) == 2
        assert time.monotonic() - began < 10.0, "a look does not wait for a FIFO that nothing writes"
        assert await service.queries.wait(await one(service, shell("true"))) == "finished"
        assert await service.queries.wait(ends) in ("failed", "finished")
        await service.requests.cancel(stays)
        assert await service.queries.wait(stays) == "cancelled"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 2_000_000


async def test_a_restart_gets_over_files_that_a_worker_replaced(home):
    files = f"{FILES} ../gang.json ../broken.json"
    async with serving(home, gpus=2) as service:
        jobs = []
        for how in ("fifo", "nonsense"):
            script = f"cd $CARPOOL_WORKER_DIR; for f in {files}; do {REPLACE[how]}; done; sleep 60"
            jobs.append(await one(service, shell(script)))
            await started(service, jobs[-1])
        await asyncio.sleep(0.5)
    async with serving(home, gpus=2) as service:
        for job in jobs:
            service.queries.show(job)
            await service.requests.cancel(job)
            assert await service.queries.wait(job) == "cancelled"


async def test_a_report_with_unknown_values_does_not_keep_a_job_running(home):
    code = (
        "import os, time; from carpool import channel\n"
        "report = channel.Report(attempt=1, iteration=5, checkpoint=2, status=77, shrinking=99, seconds=float('nan'))\n"
        "open(os.environ['CARPOOL_WORKER_DIR'] + '/report', 'wb').write(channel.pack(report, 1))\n"
        "time.sleep(1.2)\n"
    )
    async with serving(home) as service:
        async with asyncio.timeout(20):
            assert await service.queries.wait(await one(service, python(code))) == "finished"
        assert not any("Error" in text for text in notes(service))


async def test_an_exception_while_an_end_is_read_does_not_keep_a_job_running(home, monkeypatch):
    from carpool.live.executors import gang

    def fails(self):
        raise RuntimeError("oops")

    monkeypatch.setattr(gang.LocalGang, "ended", fails)
    async with serving(home) as service:
        job = await one(service, shell("true"))
        async with asyncio.timeout(20):
            assert await service.queries.wait(job) == "failed"
        assert "oops" in service.queries.show(job)["reason"]


@pytest.mark.parametrize("error", [RuntimeError("oops"), ValueError("embedded null byte")])
async def test_a_gang_that_cannot_be_prepared_fails_and_is_not_called_finished(home, monkeypatch, error):
    from carpool.live.executors import launching

    def fails(*_):
        raise error

    monkeypatch.setattr(launching, "rank_environments", fails)
    async with serving(home) as service:
        job = await one(service, shell("true"))
        async with asyncio.timeout(20):
            assert await service.queries.wait(job) == "failed"
        assert str(error) in service.queries.show(job)["reason"]


async def test_open_files_of_the_service_do_not_reach_jobs(home, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    descriptor = os.open(secret, os.O_RDONLY)
    os.set_inheritable(descriptor, True)
    try:
        async with serving(home) as service:
            job = await one(service, shell(f"ls -l /proc/self/fd; cat <&{descriptor}"))
            await service.queries.wait(job)
            assert "secret" not in output(service, job)
            wrapper = await one(service, shell("ls -l /proc/$PPID/fd; true"))
            await service.queries.wait(wrapper)
            assert "rank-0" in output(service, wrapper), "it shows the files of the wrapper"
            assert "secret" not in output(service, wrapper)
    finally:
        os.close(descriptor)


class TestReading:
    def test_unknown_values_of_a_report_are_read_as_neutral_ones(self, tmp_path):
        strange = channel.Report(status=200, shrinking=9, seconds=float("inf"), time=float("nan"), iteration=3)
        (tmp_path / "report").write_bytes(channel.pack(strange, 1))
        found = channel.read_report(tmp_path)
        assert found.status is channel.WorkerStatus.RUNNING
        assert found.shrinking is channel.Shrinking.UNKNOWN
        assert (found.seconds, found.time, found.iteration) == (0.0, 0.0, 3)

    def test_only_regular_files_of_limited_size_are_read(self, tmp_path):
        os.mkfifo(tmp_path / "fifo")
        (tmp_path / "link").symlink_to("/dev/zero")
        (tmp_path / "elsewhere").symlink_to(tmp_path / "good")
        (tmp_path / "good").write_text("{}")
        (tmp_path / "large").write_text(json.dumps("x" * channel.JSON_BYTES))
        (tmp_path / "deep").write_text("[" * 100_000)
        with (tmp_path / "sparse").open("wb") as file:
            file.truncate(1 << 40)
        assert read_json(tmp_path / "good") == {}
        for name in ("fifo", "link", "elsewhere", "large", "sparse", "deep", "missing"):
            assert read_json(tmp_path / name) is None
            assert channel.read_control(tmp_path / name) is None
        for name in ("fifo", "link", "sparse"):
            os.rename(tmp_path / name, tmp_path / "report")
            assert channel.read_report(tmp_path) is None

    async def test_a_log_that_became_a_fifo_does_not_hang_the_search_for_out_of_memory(self, home):
        script = "cd $CARPOOL_WORKER_DIR; rm stderr.log; mkfifo stderr.log; exit 1"
        async with serving(home) as service:
            job = await one(service, shell(script))
            assert await service.queries.wait(job) == "failed"
            await until(lambda: not service.executor.present())
