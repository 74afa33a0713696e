"""The Python client against a real service."""

import asyncio
import threading

import pandas
import pytest

import carpool
from carpool.errors import InputError

pytestmark = pytest.mark.slow


def test_a_job_is_submitted_followed_and_read(connection):
    job = connection.submit(["sh", "-c", "echo one; echo two; exit 3"], name="lines", duration="1m")
    assert list(job.follow()) == ["one", "two"]
    assert job.wait(timeout=30) == "failed"
    assert job.exit_code == 3
    assert job.logs() == "one\ntwo\n"
    assert connection.job(int(job.id)).row["name"] == "lines"
    assert "lines" in job._repr_html_()
    assert "failed" in job.explain()


def test_a_command_may_be_one_line(connection):
    job = connection.submit("echo 'two words' x")
    job.wait(30)
    assert job.logs() == "two words x\n"
    with pytest.raises(InputError, match="needs a shell"):
        connection.submit("echo a | wc")


def test_rows_are_filtered_and_become_a_frame(connection):
    jobs = connection.submit_many(["echo", "{x}"], name="grid", sweep={"x": [1, 2]})
    connection.wait(jobs, timeout=30)
    rows = connection.jobs(all=True, mine=True, status="finished", name="grid*")
    assert [row["job"] for row in rows] == [job.id for job in jobs]
    frame = rows.frame()
    assert list(frame.index) == [job.id for job in jobs]
    assert isinstance(frame["finished"].iloc[0], pandas.Timestamp)


def test_changes_and_refusals(connection):
    job = connection.submit(["sleep", "60"], gpus=2)
    with pytest.raises(TimeoutError, match=f"job {job.id}"):
        job.wait(timeout=0.2)
    second = connection.submit(["true"], gpus=2, exclusive=True)
    second.hold()
    assert second.row["held"]
    second.set_priority(5)
    assert second.row["priority"] == 5
    second.release()
    job.cancel()
    assert job.wait(30) == "cancelled"
    assert second.wait(30) == "finished"
    with pytest.raises(InputError, match="asks for 99 GPUs"):
        connection.submit(["true"], gpus=99)
    with pytest.raises(InputError, match="no such field"):
        connection.submit(["true"], gpu=1)
    with pytest.raises(InputError, match="submit_many"):
        connection.submit(["true"], array="0-3")
    with pytest.raises(InputError):
        connection.job("no id")


def test_a_wrong_address_is_said_at_once():
    with pytest.raises(InputError, match="no service answers"):
        carpool.connect("http://127.0.0.1:9", "token")
    with pytest.raises(InputError, match="token"):
        carpool.connect("http://127.0.0.1:9")


def test_threads_share_a_connection(connection):
    jobs = [None] * 8

    def submit(number):
        jobs[number] = connection.submit(["echo", str(number)])

    threads = [threading.Thread(target=submit, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    connection.wait(jobs, timeout=60)
    assert [job.logs() for job in jobs] == [f"{number}\n" for number in range(8)]


async def test_the_same_for_asyncio(served):
    connection = await carpool.connect_async(served.url, served.token)
    job = await connection.submit(["sh", "-c", "echo a; sleep 0.2; echo b"])
    assert [line async for line in job.follow()] == ["a", "b"]
    assert await job.wait(30) == await job.status() == "finished"
    assert await job.logs() == "a\nb\n"
    assert job.id in [row["job"] for row in await connection.jobs(all=True)]
    many = await connection.submit_many(["sleep", "60"], array="0-1")
    for one in many:
        await one.cancel()
    assert [await one.wait(30) for one in many] == ["cancelled"] * 2
    assert (await connection.job(many[0].id)).id == many[0].id


def test_events_arrive_as_they_happen_and_can_be_resumed(connection):
    with connection.events() as events:
        job = connection.submit(["true"])
        seen = []
        while not seen or seen[-1]["kind"] != "Finished":
            event = next(events)
            if job.id in (event.get("job"), *(one["job"] for one in event.get("decisions", ()))):
                seen.append(event)
    assert [event["kind"] for event in seen] == ["Submitted", "Planned", "Started", "Finished"]
    assert seen[0]["user"] == "admin"
    assert seen[1]["decisions"][0]["on"]
    assert "command" not in str(seen)
    with connection.events(after=seen[1]["seq"], job=job.id) as again:
        assert [next(again) for _ in range(2)] == seen[2:]


def test_closing_ends_an_iteration_that_waits(connection):
    events = connection.events()
    threading.Timer(0.3, events.close).start()
    for event in events:
        assert event["kind"]


async def test_events_for_asyncio(served):
    connection = await carpool.connect_async(served.url, served.token)
    first = await asyncio.to_thread(lambda: connection.connection.events().last)
    job = await connection.submit(["true"])
    async for event in connection.events(after=first, job=job.id):
        if event["kind"] == "Finished":
            break
    assert event["job"] == job.id
