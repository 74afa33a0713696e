"""`carpool submit --notify` and `--desktop` from the command line."""

import json


def test_notices_are_checked_and_kept_with_the_job(service, bob):
    target = "slack:https://hooks.example/s3cret"
    wanted = ["--notify", f"end={target}", "--notify", "failure=ntfy:https://ntfy.example/me"]
    said = service.call("submit", *wanted, "--", "true")
    assert said.code == 0, said.err
    job = said.out.split()[-1]
    assert service.client().get(f"/v1/jobs/{job}")["spec"]["notify"] == {
        "end": target,
        "failure": "ntfy:https://ntfy.example/me",
    }
    assert "s3cret" not in json.dumps(service.client(bob).get(f"/v1/jobs/{job}"))
    wrong = service.call("submit", "--notify", "end=ftp://s3cret/", "--", "true")
    assert (wrong.code, "must be a URL" in wrong.err, "s3cret" in wrong.err) == (2, True, False)
    service.until(job, "finished")
    for dry in ((), ("--dry-run",)):
        never = service.call("submit", *dry, "--notify", "end=mailto:me@example.org", "--", "true")
        assert (never.code, "--smtp" in never.err) == (2, True)


def test_a_second_target_for_a_moment_is_kept_beside_the_first(service):
    wanted = ["--notify", "end=https://hooks.example/a", "--notify", "end=ntfy:https://ntfy.example/b"]
    job = service.call("submit", *wanted, "--", "true").out.split()[-1]
    kept = service.client().get(f"/v1/jobs/{job}")["spec"]["notify"]
    assert kept == {"end": ["https://hooks.example/a", "ntfy:https://ntfy.example/b"]}
    many = [word for number in range(9) for word in ("--notify", f"end=https://hooks.example/{number}")]
    said = service.call("submit", *many, "--", "true")
    assert (said.code, "--notify: end: has 9 targets; give at most 8" in said.err) == (2, True)
    service.until(job, "finished")


def test_a_notice_on_the_screen_needs_wait(service, tmp_path):
    program = tmp_path / "notify-send"
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/shown\n')
    program.chmod(0o755)
    said = service.call("submit", "--wait", "--desktop", "--", "true", PATH=f"{tmp_path}:/usr/bin:/bin")
    assert said.code == 0, said.err
    assert "1 finished" in (tmp_path / "shown").read_text()
    assert service.call("submit", "--desktop", "--", "true").code == 2
