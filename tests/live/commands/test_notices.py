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


def test_a_notice_on_the_screen_says_how_the_job_ended(service, tmp_path):
    program, path = tmp_path / "notify-send", f"{tmp_path}:/usr/bin:/bin"
    program.write_text(f'#!/bin/sh\nfor word; do echo "$word"; done > {tmp_path}/shown\n')
    program.chmod(0o755)

    def shown(*words: str) -> tuple[int, str]:
        said = service.run("submit", "--wait", "--desktop", *words, PATH=path)
        assert "notice" not in said.err
        return said.code, (tmp_path / "shown").read_text().splitlines()[-1]

    code, text = shown("--name", "fine", "--", "true")
    assert (code, text.split(" ", 2)[2]) == (0, "(fine) finished")
    code, text = shown("--name", "bad", "--", "sh", "-c", "exit 3")
    assert (code, text.split(" ", 2)[2].startswith("(bad) failed: ")) == (3, True)
    code, text = shown("--array", "0-1", "--", "sh", "-c", "exit $CARPOOL_ARRAY_INDEX")
    assert (code, "(2): 1 finished, 1 failed" in text) == (1, True)
    assert service.call("submit", "--desktop", "--", "true").code == 2


def test_a_notice_that_is_not_shown_is_reported(service, tmp_path):
    def said(path: str) -> str:
        done = service.run("submit", "--wait", "--desktop", "--", "/bin/true", PATH=path)
        assert done.code == 0  # that of the job
        return done.err

    missing = "warning: --desktop: notify-send is not installed here, so no notice will be shown\n"
    assert said(str(tmp_path)).startswith(missing)  # before the wait
    program = tmp_path / "notify-send"
    program.write_text("#!/bin/sh\necho 'Cannot autolaunch D-Bus without X11 $DISPLAY' >&2\nexit 1\n")
    program.chmod(0o755)
    assert "no notice was shown: Cannot autolaunch D-Bus without X11 $DISPLAY\n" in said(f"{tmp_path}:/usr/bin:/bin")
