"""Metrics of a real service: what is counted, who may read it, and that the Grafana dashboard asks for what exists."""

import json
import re
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from carpool.live.http.client import Refusal

ROOT = Path(__file__).parents[3]


def read(service, token=None):
    body, headers = service.client(token).raw("/metrics")
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


def test_jobs_gpus_and_answers_are_counted(service, alice):
    before = read(service)
    running, waiting = service.submit("sleep", "60", gpus=4, exclusive=True), service.submit("sleep", "60", gpus=4)
    service.until(running, "running")
    during = read(service, alice)
    assert during["carpool_jobs", ("status", "running")] == 1
    assert during["carpool_jobs", ("status", "pending")] == 1
    assert during["carpool_gpus", ("state", "busy")] == 4
    for job in (running, waiting):
        service.client().post(f"/v1/jobs/{job}/cancel")
        service.until(job, "cancelled")
    failed = service.submit("sh", "-c", "exit 3")
    service.until(failed, "failed")
    done = service.submit("true")
    service.until(done, "finished")
    service.client().get("/v1/jobs", limit=1)
    ended = "carpool_jobs_ended_total", ("status", "finished")
    limit = time.monotonic() + 30.0
    while (after := read(service))[ended] == before.get(ended, 0.0):  # it is counted a moment after it is shown
        assert time.monotonic() < limit
        time.sleep(0.02)

    def grown(*key):
        return after[key] - before.get(key, 0.0)

    assert grown("carpool_jobs_submitted_total") == 4
    assert grown("carpool_jobs_ended_total", ("status", "cancelled")) == 2
    assert grown("carpool_jobs_ended_total", ("status", "finished")) == 1
    assert grown("carpool_faults_total", ("kind", "job failed")) == 1
    assert grown("carpool_job_wait_seconds_count") == 4
    assert grown("carpool_job_completion_seconds_count") == 1
    assert grown("carpool_decisions_total", ("kind", "place")) >= 3
    assert grown("carpool_decision_seconds_count") >= 8, "four jobs come, and four end"
    assert 0.0 < grown("carpool_decision_seconds_sum") < 5.0
    assert grown("carpool_decision_seconds_bucket", ("le", "0.1")) > 0
    assert grown("carpool_forecast_error_seconds_count", ("kind", "duration")) == 1
    assert grown("carpool_http_requests_total", ("route", "/v1/jobs"), ("status", "200")) >= 1
    assert after["carpool_gpus", ("state", "free")] == 4
    assert after["carpool_journal_writable",] == 1
    assert after["process_cpu_seconds_total",] > before["process_cpu_seconds_total",]


def test_metrics_name_no_job_and_no_user_and_need_a_token(service, alice):
    service.until(service.submit("true", name="s3cret", token=alice), "finished")
    text = service.client(alice).raw("/metrics")[0].decode()
    assert "s3cret" not in text
    assert "alice" not in text
    routes = re.findall(r'route="([^"]*)"', text)
    assert all(not re.search(r"\d", route.replace("/v1", "")) for route in routes)
    with pytest.raises(Refusal, match="not known here"):
        service.client("x" * 43).raw("/metrics")


def test_the_grafana_dashboard_asks_for_metrics_that_exist(service):
    service.until(service.submit("true"), "finished")
    known = {name for name, *_ in read(service)}
    panels = json.loads((ROOT / "contrib/grafana/carpool.json").read_text())["panels"]
    asked = {
        name for panel in panels for target in panel["targets"] for name in re.findall(r"carpool_\w+", target["expr"])
    }
    assert len(asked) > 15
    assert asked <= known, asked - known
