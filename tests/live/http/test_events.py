"""Server-sent events of a real service: resumed, filtered, and ended when the token is revoked."""

import threading
import time

import pytest
import requests

from carpool.live.http.event_stream import messages


def stream(service, token=None, last=None, **query):
    """Open a stream, and return its messages."""
    headers = {"Authorization": f"Bearer {token or service.token}"}
    if last is not None:
        headers["Last-Event-ID"] = str(last)
    response = requests.get(f"{service.url}/v1/events", params=query, headers=headers, stream=True, timeout=30)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    return messages(line + b"\n" for line in response.iter_lines(chunk_size=1))


def kinds(found):
    return [message.kind for message in found if message.kind]


def test_the_header_of_browsers_resumes_a_stream(service):
    first = next(stream(service))
    job = service.submit("true")
    service.until(job, "finished")
    seen = list(stream(service, last=first.number, wait_s=0))
    assert [message.kind for message in seen if message.data and message.data.get("job") == job] == [
        "Submitted", "Started", "Finished",
    ]  # fmt: skip
    middle = seen[2].number
    assert [one.data for one in stream(service, last=middle, after=0, wait_s=0) if one.kind != "Hello"] == [
        one.data for one in seen if one.number > middle
    ]


def test_events_of_one_job_only(service):
    first = next(stream(service)).number
    jobs = [service.submit("true") for _ in range(2)]
    for job in jobs:
        service.until(job, "finished")
    found = list(stream(service, after=first, job=jobs[1], wait_s=0))
    assert [one.data["job"] for one in found if one.data and "job" in one.data] == [jobs[1]] * 3
    assert found[-1].number >= next(stream(service)).number - 1  # what was left out is not sent again


def test_users_see_no_notes_and_no_commands(service, alice):
    job = service.submit("sh", "-c", "true s3cret", env={"KEY": "s3cret"})
    service.until(job, "finished")
    hers, all_of_them = list(stream(service, alice, after=0, wait_s=0)), list(stream(service, after=0, wait_s=0))
    assert "Note" not in kinds(hers)
    assert "Note" in kinds(all_of_them)
    assert "s3cret" not in str(hers) + str(all_of_them)
    assert {"Submitted", "Finished"} <= {*kinds(hers)}


def test_a_revoked_token_ends_its_streams(service):
    admin = service.client()
    token = admin.post("/v1/users", {"name": "eve"})["token"]
    following = stream(service, token)
    assert next(following).kind == "Hello"
    reading = threading.Thread(target=lambda: list(following), daemon=True)
    reading.start()
    time.sleep(0.5)  # the stream is quiet
    admin.delete("/v1/users/eve")
    reading.join(5)
    assert not reading.is_alive()


def test_a_new_token_of_the_same_user_does_not_keep_the_streams_of_the_old_one(service):
    admin = service.client()
    token = admin.post("/v1/users", {"name": "eve"})["token"]
    following = stream(service, token)
    assert next(following).kind == "Hello"
    reading = threading.Thread(target=lambda: list(following), daemon=True)
    reading.start()
    admin.delete("/v1/users/eve")
    admin.post("/v1/users", {"name": "eve"})
    reading.join(5)
    assert not reading.is_alive()
    admin.delete("/v1/users/eve")


@pytest.mark.parametrize("last", ["-1", "x", "9" * 19])
def test_a_wrong_number_is_refused(service, last):
    headers = {"Authorization": f"Bearer {service.token}", "Last-Event-ID": last}
    assert requests.get(f"{service.url}/v1/events", headers=headers, timeout=10).status_code == 422


def test_a_service_that_ends_closes_its_streams(service):
    following = stream(service)
    assert next(following).kind == "Hello"
    assert service.stop() == 0
    assert list(following) is not None  # it ended
    service.start()
