"""What the dashboard draws, as the API tells it: places, forecasts, traces, usage, what-if."""

import csv
import io
import json
import time

import pytest

from carpool.live.http.client import Refusal
from tests.support.command_line import call
from tests.support.served import Served


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A service with one GPU on which two jobs have shared and finished."""
    served = Served(tmp_path_factory.mktemp("pictures") / "home", "--gpus", "1", "--policy", "sjf-ffs").start()
    try:
        served.jobs = [served.submit("sleep", "0.8", name=f"sharing{number}", duration_s=60) for number in range(2)]
        for job in served.jobs:
            served.until(job, "finished")
        yield served
    finally:
        served.end()


def test_places_tell_which_jobs_shared_a_gpu(shared):
    told = shared.client().get("/v1/timeline")
    assert told["gpus"] == ["node0:0"]
    running = {one["job"]: one for one in told["places"] if one["kind"] == "running"}
    first, second = (running[job] for job in shared.jobs)
    assert first["on"] == second["on"] == ["node0:0"]
    assert max(first["start"], second["start"]) < first["end"] <= told["now"]
    later = shared.client().get("/v1/timeline", since=told["now"] + 1)
    assert later["places"] == []


def test_places_and_traces_survive_a_restart(shared):
    before = shared.client().get("/v1/timeline")["places"]
    trace = shared.client().get(f"/v1/jobs/{shared.jobs[0]}/trace")
    assert trace["points"][0][1] == 0.0
    assert {one["kind"] for one in trace["places"]} == {"starting", "running"}
    shared.stop()
    shared.start()
    after = shared.client().get("/v1/timeline")["places"]
    key = lambda one: (one["job"], one["start"])  # noqa: E731
    assert sorted(after, key=key) == sorted(before, key=key)
    again = shared.client().get(f"/v1/jobs/{shared.jobs[0]}/trace")
    assert (again["points"], again["places"]) == (trace["points"], trace["places"])
    assert "trace" not in json.dumps(shared.client().get("/v1/history"))


def test_a_forecast_says_when_and_where_as_ranges(shared):
    running, waiting = (shared.submit("sleep", "60", duration_s=100, exclusive=True) for _ in range(2))
    shared.until(running, "running")
    time.sleep(2.1)  # an earlier forecast may be reused
    told = shared.client().get("/v1/forecast")
    believed, early, late = told["jobs"][waiting]["start"]
    assert told["now"] < early < believed < late
    places = {one["job"]: one for one in told["places"] if one["kind"] == "running"}
    assert places[waiting]["on"] == ["node0:0"]
    assert places[running]["end"] <= places[waiting]["start"] <= believed + 0.1
    rows = shared.client().get("/v1/jobs", ids=f"{waiting},{shared.jobs[0]},999")["jobs"]
    assert {row["job"]: row["status"] for row in rows} == {waiting: "pending", shared.jobs[0]: "finished"}
    for job in (running, waiting):
        shared.client().post(f"/v1/jobs/{job}/cancel")
        shared.until(job, "cancelled")


def test_usage_is_the_same_by_all_keys_and_adds_up(shared):
    client = shared.client()
    today = time.strftime("%Y-%m-%d", time.gmtime())
    for by in ("user", "group", "project", "day", "user,day"):
        told = client.get("/v1/usage", by=by, since="2020-01-01", until="2100-01-01")
        assert sum(row["held_gpu_s"] for row in told["rows"]) == pytest.approx(told["total"]["held_gpu_s"])
        existed = told["total"]["held_gpu_s"] + told["gpus"]["idle_gpu_s"] + told["gpus"]["closed_gpu_s"]
        assert existed == pytest.approx(told["gpus"]["existed_gpu_s"])
        assert told["gpus"]["existed_gpu_s"] == pytest.approx(told["now"] - told["counted_since"])
    assert {row["user"] for row in told["rows"]} == {"admin"}
    assert today in {row["day"] for row in told["rows"]}
    receipts = [row["receipt"] for row in client.get("/v1/history")["jobs"]]
    assert told["total"]["jobs"] == len(receipts)
    assert 0.8 < told["total"]["held_gpu_s"] < sum(one["gpu_s"] for one in receipts), "two shared one GPU"
    assert client.get("/v1/usage", until="2020-01-01")["rows"] == []
    for wrong in ({"by": "job"}, {"since": "yesterday"}, {"by": "user,user,day,day,day"}):
        with pytest.raises(Refusal) as refusal:
            client.get("/v1/usage", **wrong)
        assert refusal.value.status == 422


def test_the_command_shows_usage_as_table_csv_and_json(shared):
    said = call("usage", "--home", shared.home, "--by", "user,day")
    assert said.code == 0
    assert "admin" in said.out
    assert "held + idle + closed = all GPUs" in said.out
    rows = list(csv.DictReader(io.StringIO(call("usage", "--home", shared.home, "--csv").out)))
    told = json.loads(call("usage", "--home", shared.home, "--json", "--all").out)
    assert [row["user"] for row in rows] == ["admin", "(idle)", "(closed)"]
    held = sum(float(row["held_gpu_s"]) for row in rows)
    assert held == pytest.approx(told["gpus"]["existed_gpu_s"], abs=5.0)  # a moment later
    assert call("usage", "--home", shared.home, "--by", "users").code == 2
    assert call("usage", "--home", shared.home, "--since", "monday").code == 2


def test_what_if_simulates_another_policy_on_what_ran_here(shared):
    told = shared.client().post("/v1/what-if", {"policy": "fifo"})
    assert [run["policy"] for run in told["runs"]] == ["sjf-ffs", "fifo"]
    own, other = told["runs"]
    assert any(len(one["jobs"]) == 2 for one in own["slices"])
    assert all(len(one["jobs"]) == 1 for one in other["slices"])
    assert told["jobs"] == 2
    assert "fifo" in [one["name"] for one in shared.client().get("/v1/policies")["policies"]]


@pytest.mark.parametrize("policy", ["nothing", "fifo:x=1", "/tmp/evil.py:Evil", "evil"])
def test_what_if_runs_no_code_that_a_user_names(shared, policy):
    with pytest.raises(Refusal) as refusal:
        shared.client().post("/v1/what-if", {"policy": policy})
    assert refusal.value.status == 422
