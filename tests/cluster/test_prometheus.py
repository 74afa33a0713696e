"""A real Prometheus server that scrapes a real service, and what promtool thinks of the metrics."""

import json
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

from tests.support.served import Served

ROOT = Path(__file__).parents[2]


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    service = Served(tmp_path_factory.mktemp("scraped") / "home", "--gpus", "2").start()
    try:
        yield service
    finally:
        service.end()


@pytest.fixture(scope="module")
def ask(served, tmp_path_factory):
    """A function that sends a query to a Prometheus server, which scrapes as the example in `contrib` does."""
    folder = tmp_path_factory.mktemp("prometheus")
    token = folder / "token"
    token.write_text(served.client().post("/v1/users", {"name": "prometheus"})["token"])
    example = (ROOT / "contrib/prometheus/carpool.yml").read_text()
    address = served.url.removeprefix("http://")
    settings = example.replace("127.0.0.1:8471", address).replace("/etc/prometheus/carpool.token", str(token))
    assert str(token) in settings
    assert address in settings
    config = folder / "prometheus.yml"
    config.write_text(f"global:\n  scrape_interval: 1s\n  scrape_timeout: 1s\n{settings}")
    subprocess.run([shutil.which("promtool"), "check", "config", str(config)], check=True, capture_output=True)
    port = free_port()
    command = [shutil.which("prometheus"), f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    command.append(f"--web.listen-address=127.0.0.1:{port}")
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)

    def query(text):
        url = f"http://127.0.0.1:{port}/api/v1/query?{urllib.parse.urlencode({'query': text})}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return json.load(answer)["data"]["result"]
        except OSError:
            assert process.poll() is None, (folder / "log").read_text()
            return []

    try:
        yield query
    finally:
        process.terminate()
        process.wait(30)


def until(ask, query, wanted):
    """Ask until the answer is the wanted number."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        found = ask(query)
        if found and float(found[0]["value"][1]) == wanted:
            return
        time.sleep(0.5)
    raise AssertionError(f"{query}: {found}, not {wanted}")


def test_prometheus_scrapes_the_service_and_answers_queries(served, ask):
    until(ask, 'up{job="carpool"}', 1)
    job = served.submit("sleep", "60", gpus=2)
    served.until(job, "running")
    until(ask, 'sum(carpool_gpus{state="busy"})', 2)
    until(ask, 'carpool_jobs{status="running"}', 1)
    served.client().post(f"/v1/jobs/{job}/cancel")
    served.until(job, "cancelled")
    until(ask, 'sum(carpool_jobs_ended_total{status="cancelled"})', 1)
    panels = json.loads((ROOT / "contrib/grafana/carpool.json").read_text())["panels"]
    for panel in panels:
        for target in panel["targets"]:
            query = target["expr"].replace("$instance", ".*").replace("$__rate_interval", "1m")
            assert ask(query), f"{panel['title']}: nothing answers {query}"


def test_promtool_finds_nothing_wrong_with_the_metrics(served):
    text = served.client().raw("/metrics")[0]
    done = subprocess.run([shutil.which("promtool"), "check", "metrics"], input=text, capture_output=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")
