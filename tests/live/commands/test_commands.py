"""Every command of the live service, called as a user would, against a real service."""

import json
import os
import pty
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.support.command_line import COMMAND, Said, call, environment, process
from tests.support.served import Served
from tests.support.terminals import Screen

ROW = {"job", "name", "user", "status", "gpus", "submitted", "started", "finished", "exit_code"}


# ---- submit ----------------------------------------------------------------------------------------------------------


def test_submit_and_jobs_as_scripts_rely_on_them(service):
    said = service.call("submit", "--name", "first", "--gpus", 2, "--json", "--", "sh", "-c", "sleep 0.2")
    assert said.code == 0
    job = json.loads(said.out)["job"]
    assert isinstance(job, str)
    service.until(job, "finished")
    row = next(row for row in service.json("jobs", "--all") if row["job"] == job)
    assert set(row) >= ROW
    assert (row["name"], row["user"], row["status"], row["gpus"], row["exit_code"]) == (
        "first",
        "admin",
        "finished",
        2,
        0,
    )
    assert row["submitted"] <= row["started"] <= row["finished"]
    assert job not in {row["job"] for row in service.json("jobs")}


def test_wait_returns_the_exit_code_of_the_job(service):
    assert service.run("submit", "--wait", "--", "true").code == 0
    said = service.run("submit", "--wait", "--json", "--", "sh", "-c", "exit 7")
    assert said.code == 7
    assert json.loads(said.out)["status"] == "failed"
    assert service.call("submit", "--wait", "--", "sh", "-c", "kill -9 $$").code == 128 + 9
    assert service.call("submit", "--wait", "--", "no-such-program-here").code not in (0, 2)


def test_wait_returns_130_for_a_cancelled_job(service):
    """It does not matter whether it waited or ran, or how its workers handled the signal."""
    for script in ("sleep 60", "trap 'exit 0' TERM; while true; do sleep 0.1; done"):
        with subprocess.Popen(
            [*COMMAND, "submit", "--wait", "--json", "--", "sh", "-c", script],
            env=environment(CARPOOL_HOME=str(service.home)),
            stdout=subprocess.DEVNULL,
        ) as waiting:
            job = newest(service, "running")
            time.sleep(0.2)
            assert service.call("cancel", job).code == 0
            assert waiting.wait(30) == 130


def test_a_terminated_wait_says_that_the_job_goes_on(service):
    """`timeout 60 carpool submit --wait …` sends the signal to the command and to its group."""
    with subprocess.Popen(
        [*COMMAND, "submit", "--wait", "--", "sleep", "60"],
        env=environment(CARPOOL_HOME=str(service.home)),
        stderr=subprocess.PIPE,
        text=True,
    ) as waiting:
        job = newest(service, "running")
        time.sleep(0.2)
        waiting.terminate()
        waiting.send_signal(signal.SIGHUP)
        waiting.terminate()
        _, err = waiting.communicate(timeout=30)
    assert waiting.returncode == 143
    assert err.splitlines()[1:] == ["stopped waiting; the job keeps running (`carpool cancel` ends it)"]
    service.call("cancel", job)
    service.until(job, "cancelled")


def newest(service, state) -> str:
    """Wait for the only job to reach a status and return its id."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        rows = [row for row in service.json("jobs") if row["status"] == state]
        if rows:
            return rows[-1]["job"]
        time.sleep(0.05)
    raise AssertionError(f"no job is {state}")


def test_a_command_gets_its_words_directory_and_environment(service, tmp_path):
    """The words are not changed, and no other variable of the caller is passed on."""
    script = "import os, sys, json; print(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]))"
    words = ["--gpus", "9", "a b", "$HOME", "*"]
    said = service.call(
        "submit", "--wait", "--env", "OURS", "--env", "SET=a=b", "--", sys.executable, "-c", script, *words,
        cwd=tmp_path, OURS="passed on", SECRET="not passed on",
    )  # fmt: skip
    assert said.code == 0, said.err
    job = max((row["job"] for row in service.json("jobs", "--all")), key=int)
    got, where, env = json.loads(service.call("logs", job).out)
    assert got == words
    assert where == str(tmp_path)
    assert (env["OURS"], env["SET"], env["CARPOOL_GPUS"].partition(":")[1]) == ("passed on", "a=b", ":")
    assert "SECRET" not in env
    assert "CARPOOL_TOKEN" not in env
    assert service.token not in json.dumps(env)


def test_options_override_a_job_file(service, tmp_path):
    (tmp_path / "job.yaml").write_text("name: from-file\ncommand: [sh, -c, 'echo $SEED']\ngpus: 3\nenv: {SEED: 5}\n")
    said = service.call("submit", "--wait", "--gpus", 1, "--json", tmp_path / "job.yaml")
    job = json.loads(said.out)["job"]
    row = service.json("show", job)
    assert (row["name"], row["gpus"]) == ("from-file", 1)
    assert service.call("logs", job).out == "5\n"


def test_a_job_starts_after_all_jobs_of_an_array(service):
    first = json.loads(service.call("submit", "--array", "0-2", "--name", "part", "--json", "--", "sleep", "0.1").out)
    assert len(first["jobs"]) == 3
    names = {row["job"]: row["name"] for row in service.json("jobs", "--all")}
    assert [names[job] for job in first["jobs"]] == ["part[0]", "part[1]", "part[2]"]
    one, *others = first["jobs"]
    said = service.call("submit", "--after", one, "--after", ",".join(others), "--wait", "--json", "--", "true")
    assert said.code == 0
    row = service.json("show", json.loads(said.out)["job"])
    assert row["started"] >= max(service.json("show", job)["finished"] for job in first["jobs"])


def test_a_job_runs_the_copy_of_its_directory(service, tmp_path):
    (tmp_path / "train.sh").write_text("echo as submitted")
    (tmp_path / ".git").mkdir()
    blocker = service.submit("sleep", "1", gpus=4, exclusive=True)
    said = service.call("submit", "--snapshot", "--json", "--", "sh", "-c", "sh train.sh; ls -a", cwd=tmp_path)
    assert said.code == 0, said.err
    job = json.loads(said.out)["job"]
    (tmp_path / "train.sh").write_text("echo edited later")
    service.until(job, "finished")
    assert service.call("logs", job).out.split() == ["as", "submitted", ".", "..", "train.sh"]
    service.until(blocker, "finished")


def test_a_dry_run_says_what_would_happen_and_queues_nothing(service):
    before = len(service.json("jobs", "--all"))
    said = service.call("submit", "--dry-run", "--time", "10m", "--gpus", 4, "--json", "--", "true", "unseen")
    free = json.loads(said.out)
    assert len(free["where"]) == 4
    assert free["run"]["value"] == pytest.approx(600)
    assert "given" in free["run"]["source"]
    assert free["end"]["low"] <= free["end"]["value"] <= free["end"]["high"]
    blocker = service.submit("sleep", "60", gpus=4, exclusive=True, duration_s=60.0)
    service.until(blocker, "running")
    for option in (("--array", "0-6"), ("--sweep", "x=1-7")):
        several = service.call("submit", "--dry-run", *option, "--duration", "1m", "--", "echo", "{x}")
        assert "These are 7 jobs: 0 would start now, 7 would wait." in several.out
        assert "First end expected: " in several.out
        assert "Last end expected: " in several.out
    many = service.call("submit", "--dry-run", "--array", "0-1999", "--", "true")
    assert many.out.startswith("These are 2000 jobs. The forecast is that of the first 1000, without the others:\n")
    said = service.call("submit", "--dry-run", "--time", "10m", "--", "true")
    assert said.out.startswith("The job would wait.")
    service.call("cancel", blocker)
    service.until(blocker, "cancelled")
    assert len(service.json("jobs", "--all")) == before + 1


# ---- looking ---------------------------------------------------------------------------------------------------------


def test_explain_names_the_reason_the_mates_and_the_times(service):
    host = service.submit("sleep", "60", gpus=4, duration_s=1000.0, name="host")
    service.until(host, "running")
    guest = service.submit("sleep", "60", duration_s=5.0, name="guest")
    service.until(guest, "running")
    alone = service.submit("sleep", "60", exclusive=True, duration_s=5.0)
    held = service.submit("true", after=[alone])
    shared = service.json("explain", guest)
    assert [mate["job"] for mate in shared["mates"]] == [host]
    assert shared["mates"][0]["slowdown"]["predicted"] > 1.0
    assert shared["mates"][0]["their_slowdown"]["predicted"] > 1.0
    text = service.call("explain", guest).out
    assert f"with job {host} (host)" in text
    assert "× as long (predicted from no information about this pair; not measured so far)" in text
    waiting = service.json("explain", alone)
    assert (waiting["position"], waiting["status"]) == (1, "pending")
    assert "asked not to share" in waiting["reason"]
    assert waiting["start"]["low"] <= waiting["start"]["value"] <= waiting["start"]["high"]
    assert "given" in waiting["run"]["source"]
    assert f"starts after job {alone}" in service.json("explain", held)["reason"]
    for job in (held, alone, guest, host):
        service.call("cancel", job)
    for job in (guest, host):
        service.until(job, "cancelled")
    assert "Job" in service.call("explain", guest).out


def test_show_prints_the_receipt(service):
    job = service.submit("sleep", "0.3", name="shown")
    service.until(job, "finished")
    text = service.call("show", job).out
    assert "shown" in text
    assert "It never shared a GPU." in text
    receipt = service.json("show", job)["receipt"]
    assert receipt["ran_s"] == pytest.approx(0.3, abs=1.0)
    assert receipt["lost_s"] == pytest.approx(0.0, abs=1e-6)


def test_commands_about_one_job_take_its_name(service):
    job, _, again = (service.submit("echo", name, name=name) for name in ("lonely", "twice", "twice"))
    for one in (job, again):
        service.until(one, "finished")
    assert service.call("logs", "lonely").out == "lonely\n"
    assert service.json("show", "lonely")["job"] == service.json("explain", "lone*")["job"] == job
    several = service.call("show", "twice")
    assert (several.code, "matches 2 jobs" in several.err, again in several.err) == (2, True, True)
    for command in (("logs", "unknown"), ("exec", "lonely", "--", "true")):
        said = service.call(*command)
        assert (said.code, "no job of yours" in said.err) == (2, True)


def test_the_number_of_iterations_is_unknown_unless_it_was_given(service):
    jobs = [service.submit("true"), service.submit("true", iterations=7)]
    for job in jobs:
        service.until(job, "finished")
    rows = {row["job"]: row for row in service.json("jobs", "--all")}
    assert [rows[job]["iterations"] for job in jobs] == [None, 7]
    assert all(row["iterations"] for row in service.client().get("/v1/workload")["jobs"])


def test_wrong_columns_are_refused_also_where_no_job_is_listed(service):
    for option in ("--format", "--sort"):
        said = service.call("jobs", "--name", "no such job", option, "nope")
        assert (said.code, f"{option} 'nope': no such column" in said.err) == (2, True)
    assert service.call("jobs", "--name", "no such job", "--format", "job,iterations").code == 0


def test_logs_follow_until_the_end(service):
    job = service.submit("sh", "-c", "for i in 1 2 3; do echo $i; sleep 0.3; done; echo done >&2")
    said = service.call("logs", "-f", job)
    assert (said.code, said.out, said.err) == (0, "1\n2\n3\n", "done\n")
    assert service.call("logs", job, "--tail", 1, "--stream", "stdout").out == "3\n"
    gang = service.submit("sh", "-c", "echo rank $RANK of $WORLD_SIZE", gpus=2)
    service.until(gang, "finished")
    assert service.call("logs", gang, "--rank", 1).out == "rank 1 of 2\n"


def test_logs_follow_into_the_next_attempt_and_miss_nothing(service):
    script = "for i in 1 2 3; do echo $CARPOOL_ATTEMPT.$i; sleep 0.15; done; test $CARPOOL_ATTEMPT = 3"
    said = json.loads(service.call("submit", "--retries", 2, "--json", "--", "sh", "-c", script).out)
    followed = service.call("logs", "-f", said["job"])
    assert followed.out.split() == [f"{attempt}.{i}" for attempt in (1, 2, 3) for i in (1, 2, 3)]
    assert service.call("logs", "-f", said["job"], "--attempt", 1).out.split() == ["1.1", "1.2", "1.3"]
    assert service.call("logs", said["job"]).out.split() == ["3.1", "3.2", "3.3"]


def test_the_progress_of_a_silent_job_follows_its_stated_duration(service):
    """The queue and `show` agree at any moment, whatever the last event was."""
    job = json.loads(service.call("submit", "--time", "2s", "--json", "--", "sleep", "60").out)["job"]
    service.until(job, "running")
    time.sleep(1.2)
    done = next(row["progress"] for row in service.json("jobs") if row["job"] == job)
    assert done > 0.4
    assert service.json("show", job)["progress"] >= done
    service.call("cancel", job)
    service.until(job, "cancelled")


@pytest.fixture
def history(service):
    """A service with a history of some jobs, also where no other test ran before."""
    finished = [row for row in service.json("history", "--limit", 20) if row["status"] == "finished"]
    for job in [service.submit("true") for _ in range(6 - len(finished))]:
        service.until(job, "finished")
    return service


def test_gpus_history_and_accuracy_are_shown(history):
    service = history
    gpus = service.json("gpus")
    assert [gpu["gpu"] for gpu in gpus["nodes"][0]["gpus"]] == [f"node0:{n}" for n in range(4)]
    assert gpus["mechanism"] == "logical"
    assert "sharing:" not in service.call("gpus").out, "logical GPUs have no mechanism"
    history = service.json("history", "--limit", 3)
    assert len(history) == 3
    assert all(row["receipt"]["waited_s"] >= 0 for row in history)
    accuracy = service.json("history", "--accuracy")
    assert accuracy["duration, from default"]["judged"] >= 3
    assert "within range" in service.call("history", "--accuracy").out


def test_replay_compares_policies_on_the_history(history):
    service = history
    answer = service.json("replay", "--policy", "fifo", "--policy", "sjf")
    assert {mean["policy"] for mean in answer["means"]} == {"fifo", "sjf"}
    assert answer["achieved"]["jobs"] == answer["runs"][0]["jobs"] > 5
    text = service.call("replay").out
    assert "jobs of the history" in text
    assert "achieved live: mean JCT" in text


def test_doctor_finds_a_token_file_that_others_can_read(service):
    findings = service.json("doctor")
    assert not [finding for finding in findings if finding["level"] == "error"]
    assert any(finding["what"] == "service" and "answers" in finding["found"] for finding in findings)
    (service.home / "admin.token").chmod(0o644)
    try:
        said = service.call("doctor")
        assert said.code == 1
        assert "chmod" in said.out
    finally:
        (service.home / "admin.token").chmod(0o600)


def test_doctor_and_jobs_say_that_the_service_cannot_write_its_journal(service):
    journal, aside = service.home / "journal.db", service.home / "aside.db"
    journal.rename(aside)
    try:
        said = service.call("doctor")
        assert said.code == 1
        assert "the service cannot write it" in said.out
        assert "warning: the journal cannot be written" in service.call("jobs").err
    finally:
        aside.rename(journal)
    assert service.call("doctor").code == 0
    assert service.call("jobs").err == ""


# ---- changing --------------------------------------------------------------------------------------------------------


def test_jobs_are_held_released_reprioritized_requeued_and_cancelled(service):
    blocker = service.submit("sleep", "60", gpus=4, exclusive=True)
    service.until(blocker, "running")
    first, second = service.submit(gpus=4, exclusive=True), service.submit(gpus=4, exclusive=True)
    assert service.json("priority", second, 9)["job"] == second
    assert max(service.json("jobs"), key=lambda row: row["priority"])["job"] == second
    assert service.call("hold", second).out == f"job {second} is pending, on hold\n"
    assert "stays on hold" in service.call("hold", blocker).out  # it keeps running
    assert service.call("release", blocker).out == f"job {blocker} is running\n"
    assert "on hold" in next(row["reason"] for row in service.json("jobs") if row["job"] == second)
    assert service.call("release", first).code == 2
    assert "is not on hold" in service.call("release", first).err
    assert service.call("requeue", blocker).code == 0
    service.until(blocker, "pending", "running")
    assert service.call("release", second).code == 0
    said = service.call("cancel", first, second, blocker, "999999")
    assert said.code == 2
    assert said.out.count("job ") == 3
    assert "there is no job '999999'" in said.err
    for job in (first, second, blocker):
        service.until(job, "cancelled")


def test_jobs_are_paused_and_resumed(service):
    job = service.submit("sh", "-c", "while true; do echo x; sleep 0.02; done", can_pause=False)
    service.until(job, "running")
    assert service.call("resume", job).code == 2
    assert service.call("pause", job).out in (f"job {job} is pausing\n", f"job {job} is paused\n")
    service.until(job, "paused")
    written = service.call("logs", job).out
    assert "its owner paused it" in service.call("explain", job).out
    assert "paused" in service.call("show", job).out
    assert "paused" in service.call("jobs").out
    assert service.call("logs", job).out == written
    assert service.call("resume", job).code == 0
    service.until(job, "running")
    row = service.json("show", job)
    assert (row["pauses"], row["spec"]["can_pause"]) == (1, False)
    assert row["paused_s"] > 0.0
    service.call("pause", job)
    assert service.call("cancel", job).code == 0
    service.until(job, "cancelled")


def test_a_negative_priority_follows_two_dashes(service):
    job = service.submit(gpus=4, exclusive=True)
    assert service.call("priority", job, "--", "-5").code == 0
    service.call("cancel", job)
    service.until(job, "cancelled")


def test_users_are_added_limited_and_revoked(service):
    said = service.call("user", "add", "erin", "--max-jobs", 2)
    token = said.out.strip()
    assert (said.code, len(token)) == (0, 43)
    assert "erin" in service.call("user", "list").out
    assert token not in service.call("user", "list").out
    assert service.json("user", "list") == service.client().get("/v1/users")["users"]
    assert service.call("user", "limit", "erin", "--max-gpus", 1).out == "erin: jobs 2, gpus 1\n"
    job = json.loads(service.call("submit", "--json", "--", "true", token=token).out)["job"]
    assert service.until(job, "finished", "failed")["user"] == "erin"
    assert service.call("cancel", "1", token=token).code == 2
    assert service.call("user", "list", token=token).err == "error: only the administrator may do this\n"
    assert service.call("user", "revoke", "erin").code == 0
    said = service.call("jobs", token=token)
    assert (said.code, said.out) == (2, "")
    assert "token" in said.err
    again = service.json("user", "add", "erin", "--max-jobs", "none")
    assert (again["max_jobs"], again["max_gpus"]) == (None, 1), "what no option names stays as it was"


def test_groups_divide_the_cluster(service):
    token = service.call("user", "add", "frank", "--group", "vision").out.strip()
    waiting = json.loads(service.call("submit", "--json", "--", "sleep", "60", token=token).out)["job"]
    (row,) = [row for row in service.json("group", "list")["groups"] if row["name"] == "vision"]
    assert (row["jobs"], row["used_gpu_s"]) == (1, None), "its usage is not counted so far"
    assert "GPU h" not in service.call("group", "list").out
    assert service.call("cancel", waiting, token=token).code == 0
    service.until(waiting, "cancelled")
    said = service.call("group", "set", "vision", "--weight", 2, "--guarantee", 1, "--cap", 4)
    assert said.out == "group vision: weight 2, guarantee 1, cap 4\n"
    assert service.call("group", "share", "0.5", "--half-life", "1d").out == "fair share: strength 0.5, half-life 1 d\n"
    job = json.loads(service.call("submit", "--json", "--", "sleep", "0.3", token=token).out)["job"]
    service.until(job, "finished", "failed")
    listed = service.json("group", "list")
    (row,) = [row for row in listed["groups"] if row["name"] == "vision"]
    assert (row["users"], row["weight"], row["cap"], row["jobs"]) == (["frank"], 2.0, 4, 0)
    assert row["used_gpu_s"] > 0.2, "what its job held was charged to the group"
    assert "GPU h" in service.call("group", "list").out
    ours = json.loads(service.call("submit", "--json", "--", "sleep", "0.1").out)["job"]
    service.until(ours, "finished", "failed")
    fairness = service.json("history", "--fairness")
    assert "vision" in {tenant["tenant"] for tenant in fairness["tenants"]}
    assert fairness["worst_rho"] > 0.0
    assert "worst ρ" in service.call("history", "--fairness").out
    assert service.call("user", "group", "frank", "none").out == "frank: group -\n"
    assert service.call("group", "set", "vision", "--cap", 0).code == 2, "a cap below the guarantee"
    assert service.call("group", "share", "1.5").code == 2
    assert service.call("group", "share", "1", token=token).err == "error: only the administrator may do this\n"
    assert service.call("group", "share", "0").code == 0


def test_a_group_that_may_be_misspelt_is_told(service):
    assert service.call("user", "add", "gus", "--group", "vison").err.startswith("note: group vison is new")
    moved = service.call("user", "group", "gus", "visoin")
    assert (moved.out, moved.err.count("note: group visoin is new")) == ("gus: group visoin\n", 1)
    service.call("group", "set", "known")
    assert service.call("user", "group", "gus", "known").err == ""
    refused = service.call("group", "set", "none")
    assert (refused.code, "no group can be called none" in refused.err) == (2, True)


def test_usage_refuses_days_in_the_wrong_order(service):
    assert (
        "lies before --since 2026-02-01" in service.call("usage", "--since", "2026-02-01", "--until", "2026-01-01").err
    )
    assert "--since: cannot be given with --all" in service.call("usage", "--since", "1d", "--all").err
    assert service.json("usage", "--all", "--until", "2020-01-01")["rows"] == []


def test_gpus_are_drained_and_reserved_from_the_command_line(service):
    said = service.call("drain", "node0:3", "--at", "2h")
    assert said.out.startswith("node0:3 is drained, beginning at "), said
    for name in ("vision", "red"):
        service.call("group", "set", name)
    made = service.json("reserve", "node0:1-2", "--for", "vision", "--from", "1h", "--to", "3h")
    assert (made["name"], made["on"], made["group"]) == ("r1", ["node0:1", "node0:2"], "vision")
    rows = service.json("reservations")
    assert [(row["name"], row["kind"], row["begun"]) for row in rows] == [
        ("r1", "reservation", False),
        ("node0:3", "drain", False),
    ]
    other = service.json("reserve", "1", "--for", "red", "--to", "90m")
    assert (other["name"], other["on"]) == ("r2", ["node0:0"]), "the others are closed before it ends"
    refused = service.call("reserve", "2", "--for", "red", "--to", "90m")
    assert refused.code == 2
    assert "2 GPUs are not there, or not open" in refused.err
    for words, why in [
        (["reserve", "node0:0-1", "--for", "red", "--to", "2h"], "group vision has reserved some of them as r1 until"),
        (["reserve", "node0:0", "--for", "vison", "--to", "2h"], "there is no group 'vison': did you mean vision?"),
        (["drain", "node0", "--at", "2020-01-01T00:00"], "at: that time has passed"),
        (["drain", "node0:3-1"], "write the smaller number first"),
    ]:
        refused = service.call(*words)
        assert (refused.code, why in refused.err) == (2, True), refused
    assert len(service.json("reservations")) == 3
    same = service.json("reserve", "node0:2", "--for", "vision", "--from", "2h", "--to", "4h")["name"]
    later = service.json("reserve", "node0:2", "--for", "red", "--from", "5h", "--to", "6h")["name"]
    for name in (same, later):
        assert service.call("unreserve", name).code == 0
    assert service.call("unreserve", "r2").code == 0
    assert "no job (drained)" in service.call("reservations").out
    assert "reserved for vision from" in service.call("gpus").out
    assert "there is no node 'node7'" in service.call("drain", "node7").err
    assert "write a time such as 18:30" in service.call("reserve", "node0", "--for", "red", "--to", "x").err
    assert service.call("unreserve", "node0:3").code == 2, "a drain is no reservation"
    assert service.call("unreserve", "r1").out == "reservation r1 is taken back\n"
    assert service.call("undrain", "node0:3").out == "node0:3 is open again\n"
    assert service.json("reservations") == []


# ---- terminals -------------------------------------------------------------------------------------------------------


def on_a_terminal(service, *arguments, width=60):
    """Return the output on a pseudo-terminal of that width."""
    ours, theirs = pty.openpty()
    env = environment(CARPOOL_HOME=str(service.home), COLUMNS=str(width), TERM="xterm")
    done = subprocess.Popen([*COMMAND, *arguments], stdout=theirs, stderr=theirs, stdin=theirs, env=env)
    os.close(theirs)
    seen = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:
            break
        if not part:
            break
        seen += part
    os.close(ours)
    done.wait(20)
    return seen.decode()


def test_a_log_is_harmless_on_a_terminal_and_unchanged_in_a_pipe(service):
    job = service.submit("printf", "a\\033[31mb\\033[2J\\033]0;title\\007c\\n")
    service.until(job, "finished")
    assert on_a_terminal(service, "logs", job).replace("\r\n", "\n") == "a\x1b[31mbc\n"
    assert service.call("logs", job).out == "a\x1b[31mb\x1b[2J\x1b]0;title\x07c\n"


def test_tables_fit_narrow_terminals(service):
    job = service.submit("sleep", "60", name="a-name-that-is-rather-long-for-a-narrow-terminal")
    service.until(job, "running")
    for line in on_a_terminal(service, "jobs", width=60).splitlines():
        plain = "".join(c for c in line if c.isprintable())
        assert len(plain.replace("[32m", "").replace("[0m", "").replace("[1m", "")) <= 60
    service.call("cancel", job)


# ---- wrong input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["submit"], "no command: give one after --"),
        (["submit", "--gpus", "9", "--", "true"], "asks for 9 GPUs and the cluster has 4"),
        (["submit", "--time", "soon", "--", "true"], "such as"),
        (["submit", "--time", "5x", "--", "true"], "--duration or --time: "),
        (["submit", "--memory", "8", "--", "true"], "unit"),
        (["submit", "--env", "NOT_SET_ANYWHERE", "--", "true"], "is not set here"),
        (["submit", "--env", "RANK=1", "--", "true"], "set by the scheduler"),
        (["submit", "--name", "a\x1bb", "--", "true"], "control characters"),
        (["submit", "--array", "x", "--", "true"], "array"),
        (["submit", "--after", "999999", "--", "true"], "there is no job"),
        (["submit", "--after", "abc", "--", "true"], "no job of yours matches it"),
        (["submit", "nothing-here.yaml"], "there is no such job file"),
        (["submit", "nothing-here.yaml", "--gpus", "2"], "options before the job file"),
        (["show", "999999"], "there is no job"),
        (["show", "../1"], "job"),
        (["show", ""], "job"),
        (["explain", "abc"], "job"),
        (["logs", "999999"], "there is no job"),
        (["cancel", "999999"], "there is no job"),
        (["user", "revoke", "nobody-here"], "there is no user"),
        (["user", "add", "Not A Name"], "name"),
        (["replay", "--policy", "nonsense"], "nonsense"),
    ],
)
def test_wrong_input_gets_one_line_and_exit_code_2(service, arguments, words, tmp_path):
    said = service.call(*arguments, cwd=tmp_path)
    assert said.code == 2
    assert words in said.err
    assert len(said.err.splitlines()) == 1
    assert "\x1b" not in said.err
    assert said.out == ""


@pytest.mark.parametrize("command", ["jobs", "gpus", "history", "replay"])
def test_without_a_service_a_command_prints_one_line(tmp_path, command):
    said = call(command, env={"CARPOOL_HOME": str(tmp_path / "none")})
    assert said.code == 2
    assert "`carpool serve`" in said.err
    assert len(said.err.splitlines()) == 1


def test_a_client_finds_the_service_by_address_and_token(service, tmp_path):
    elsewhere = str(tmp_path / "none")
    said = process("jobs", "--json", CARPOOL_HOME=elsewhere, CARPOOL_URL=service.url, CARPOOL_TOKEN=service.token)
    assert said.code == 0

    def jobs(**env: str) -> Said:
        return call("jobs", env={"CARPOOL_HOME": elsewhere, **env})

    assert jobs(CARPOOL_URL=service.url, CARPOOL_TOKEN="wrong").code == 2
    said = jobs(CARPOOL_URL="http://gpu.example:1")
    assert "CARPOOL_TOKEN" in said.err  # the home's token is not sent to other hosts
    assert jobs(CARPOOL_URL="ftp://x", CARPOOL_TOKEN="x" * 43).code == 2
    with socket.create_server(("127.0.0.1", 0)) as other:
        url = f"http://127.0.0.1:{other.getsockname()[1]}"
    said = jobs(CARPOOL_URL=url, CARPOOL_TOKEN="x" * 43)
    assert "no service answers" in said.err


# ---- serve -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_busy_port_and_a_home_in_use_are_one_line_each(service, tmp_path):
    port = service.url.rpartition(":")[2]
    said = process("serve", "--home", tmp_path / "other", "--gpus", 1, "--port", port)
    assert (said.code, len(said.err.splitlines())) == (2, 1)
    assert "another program listens there" in said.err
    for own in (0, port):
        said = process("serve", "--home", service.home, "--gpus", 1, "--port", own)
        assert (said.code, len(said.err.splitlines())) == (2, 1)
        assert "another service" in said.err
    for option in ("--policy", "--profile"):
        said = call("serve", "--home", tmp_path / "other", option, "nonsense")
        assert (said.code, len(said.err.splitlines())) == (2, 1)
        assert "nonsense" in said.err
    assert service.json("jobs") is not None  # the first service is not disturbed


def test_the_home_is_private_and_no_process_shows_a_token(service):
    assert (service.home / "admin.token").stat().st_mode & 0o777 == 0o600
    assert (service.home / "journal.db").stat().st_mode & 0o077 == 0
    lines = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert service.token not in lines


@pytest.mark.slow
@pytest.mark.parametrize(("options", "expected"), [([], 6), (["--policy", "sjf-ffs"], 2), (["--jobs-per-gpu", "3"], 3)])
def test_the_number_of_jobs_that_compute_on_a_gpu_follows_from_the_policy(tmp_path, options, expected):
    served = Served(tmp_path / "home", "--gpus", "1", *options).start()
    try:
        assert json.loads(served.call("gpus", "--json").out)["jobs_per_gpu"] == expected
    finally:
        served.end()


@pytest.mark.slow
def test_waiting_and_following_survive_a_killed_service(tmp_path):
    """The service comes back at another address; the exit code and the log are those of the job."""
    served = Served(tmp_path / "home", "--gpus", "1").start()
    try:
        script = f"echo one; while ! test -e {tmp_path}/go; do sleep 0.1; done; echo two; exit 5"
        env = environment(CARPOOL_HOME=str(served.home))
        waiting = subprocess.Popen(
            [*COMMAND, "submit", "--wait", "--", "sh", "-c", script], env=env, stderr=subprocess.PIPE, text=True
        )
        job = newest(served, "running")
        following = subprocess.Popen([*COMMAND, "logs", "-f", job], env=env, stdout=subprocess.PIPE, text=True)
        assert following.stdout is not None
        assert following.stdout.readline() == "one\n"
        assert served.process is not None
        served.process.kill()
        served.process.wait(20)
        time.sleep(1.0)
        served.start()
        (tmp_path / "go").touch()
        _, err = waiting.communicate(timeout=30)
        assert waiting.returncode == 5, err
        assert "the service does not answer" in err
        assert following.communicate(timeout=30)[0] == "two\n"
        assert following.returncode == 0
    finally:
        served.end()


@pytest.mark.slow
def test_sigterm_ends_the_service_and_not_the_jobs(tmp_path):
    served = Served(tmp_path / "home", "--gpus", "2").start()
    try:
        script = f"echo $$ > {tmp_path}/pid; while ! test -e {tmp_path}/go; do sleep 0.1; done; echo survived"
        job = served.submit("sh", "-c", script)
        served.until(job, "running")
        began = time.monotonic()
        assert served.stop() == 0
        assert time.monotonic() - began < 10
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
            time.sleep(0.05)
        os.kill(int((tmp_path / "pid").read_text()), 0)  # it still runs
        assert served.call("jobs").code == 2
        served.start()
        (tmp_path / "go").touch()
        assert served.until(job, "finished", "failed")["exit_code"] == 0
        assert served.call("logs", job).out == "survived\n"
        assert served.process is not None
        served.process.send_signal(signal.SIGINT)
        assert served.process.wait(20) == 0
    finally:
        served.end()


def test_a_terminal_breaks_an_explanation_between_words(service):
    job = service.submit("sleep", "60", name="explained")
    service.until(job, "running")
    screen = Screen(service.home, "explain", job, columns=60)
    assert screen.end() == 0
    lines = screen.shown.decode().replace("\r", "").splitlines()
    whole = service.call("explain", job).out.split()
    assert max(map(len, lines)) <= 60 < max(map(len, service.call("explain", job).out.splitlines()))
    assert [word for line in lines for word in line.split()][:8] == whole[:8]
    service.client().post(f"/v1/jobs/{job}/cancel")
