"""Functions as jobs: `carpool.Executor` against a real service."""

import os
import time
from concurrent.futures import CancelledError

import pytest

import carpool
from carpool.client.functions import JobFailed
from carpool.errors import InputError

pytestmark = pytest.mark.slow


@pytest.fixture
def executor(connection, tmp_path):
    with carpool.Executor(connection, folder=tmp_path / "calls", duration="1m") as found:
        yield found


def test_a_result_comes_back_from_another_process(executor):
    here = os.getpid()

    def add(a, b, *, scale=1):
        assert os.getpid() != here
        assert "CARPOOL_JOB" in os.environ
        return (a + b) * scale

    future = executor.submit(add, 2, 3, scale=10)
    assert future.result(60) == 50
    assert future.job.status == "finished"
    assert future.job.row["name"] == "add"


def test_an_exception_comes_back_with_its_traceback(executor):
    def fail():
        {}["missing"]

    error = executor.submit(fail).exception(60)
    assert isinstance(error, KeyError)
    assert error.args == ("missing",)
    assert "in fail" in str(error.__cause__)


def test_a_job_that_dies_says_so(executor):
    def die():
        os.write(2, b"last words")
        os._exit(9)

    error = executor.submit(die).exception(60)
    assert isinstance(error, JobFailed)
    assert "last words" in str(error)


def test_what_cannot_be_pickled_is_said(executor):
    error = executor.submit(lambda: (x for x in [1])).exception(60)
    assert "cannot be pickled" in str(error)


def test_an_array_of_calls(executor):
    futures = executor.map_array(lambda a, b: a * b, [1, 2, 3], [4, 5, 6])
    assert [future.result(60) for future in futures] == [4, 10, 18]
    assert len({future.job.row["array_job"] for future in futures}) == 1
    assert executor.map_array(abs, []) == []
    assert list(executor.map(abs, [-1, -2], timeout=60)) == [1, 2]


def test_the_first_worker_of_a_gang_answers(connection, tmp_path):
    with carpool.Executor(connection, folder=tmp_path, gpus=2) as executor:
        assert executor.submit(lambda: (os.environ["RANK"], os.environ["WORLD_SIZE"])).result(60) == ("0", "2")


def test_cancel_ends_a_running_job(executor):
    future = executor.submit(time.sleep, 600)
    until = time.monotonic() + 30
    while not future.running() and time.monotonic() < until:
        time.sleep(0.05)
    told = []
    future.add_done_callback(told.append)
    assert future.cancel()
    assert (future.cancelled(), future.done(), told) == (True, True, [future])
    with pytest.raises(CancelledError):
        future.result(60)
    assert future.job.wait(30) == "cancelled"
    assert executor.submit(abs, -1).result(60) == 1, "other calls are still followed"


def test_shutdown_refuses_new_calls_and_a_wrong_field_is_said(connection, tmp_path):
    executor = carpool.Executor(connection, folder=tmp_path, gpu=1)
    with pytest.raises(InputError, match="did you mean gpus"):
        executor.submit(abs, 1)
    executor.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        executor.submit(abs, 1)


def test_calls_are_private(executor, tmp_path):
    executor.submit(abs, -1).result(60)
    assert executor.folder.stat().st_mode & 0o077 == 0
    assert all(file.stat().st_mode & 0o077 == 0 for file in executor.folder.iterdir())
