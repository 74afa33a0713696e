"""What the dashboard costs with 1,000 jobs on 64 GPUs: CPU time of the service and of the page, and how late it is.

`python bench/dashboard.py` needs Chromium and Playwright (`make test-browser` installs them), and takes three minutes.
It serves 64 logical GPUs with as many running jobs, submits jobs that wait up to 1,000, and changes two of them every
second. It measures once without and once with an open page. CPU times are of the process, so that a busy machine
changes them little; delays include it.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil
from playwright.sync_api import CDPSession, Page, sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.served import Served  # the same service as in the tests

SEEN = "(job) => [...document.querySelectorAll('.vt-row')].some((row) => row.textContent.startsWith(job))"


def cpu_s(served: Served) -> float:
    times = psutil.Process(served.process.pid).cpu_times()
    return float(times.user + times.system)


def change_jobs(served: Served, waiting: list[str], seconds: float) -> float:
    """Change two priorities every second, and return the share of a core that the service took."""
    client, began, used = served.client(), time.monotonic(), cpu_s(served)
    number = 0
    while time.monotonic() - began < seconds:
        number += 1
        client.put(f"/v1/jobs/{waiting[number % len(waiting)]}/priority", {"priority": number % 5})
        time.sleep(0.5)
    return (cpu_s(served) - used) / (time.monotonic() - began)


def delays(served: Served, page: Page, number: int) -> list[float]:
    """Return the seconds from the answer to a submission until the page shows the job."""
    found = []
    for index in range(number):
        request = {"command": ["true"], "directory": "/", "gpus": 64, "exclusive": True, "name": f"late-{index}"}
        page.fill("#filter", f"late-{index}")
        job = served.client().post("/v1/jobs", request)["job"]
        began = time.monotonic()
        page.wait_for_function(SEEN, arg=job, polling=20)
        found.append(time.monotonic() - began)
        served.client().post(f"/v1/jobs/{job}/cancel")
    return found


def worked(devtools: CDPSession) -> float:
    metrics = devtools.send("Performance.getMetrics")["metrics"]
    return float(next(one["value"] for one in metrics if one["name"] == "TaskDuration"))


def measure(served: Served, seconds: float, jobs: int, gpus: int) -> dict[str, object]:
    client = served.client()
    client.post(
        "/v1/jobs", {"command": ["sleep", "3600"], "directory": "/", "array": f"0-{gpus - 1}", "exclusive": True}
    )
    while sum(row["status"] == "running" for row in client.jobs()) < gpus:
        time.sleep(1.0)
    rest = {"command": ["true"], "directory": "/", "exclusive": True, "array": f"0-{jobs - gpus - 1}"}
    waiting = client.post("/v1/jobs", rest)["jobs"]
    time.sleep(5.0)
    without = change_jobs(served, waiting, seconds)
    result: dict[str, object] = {"jobs": jobs, "gpus": gpus, "service_without": round(without, 4)}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(served.url)
        page.fill("#token", served.token)
        page.click("button[type=submit]")
        page.get_by_text("GPUs busy").wait_for()
        devtools = page.context.new_cdp_session(page)
        devtools.send("Performance.enable", {"timeDomain": "threadTicks"})
        time.sleep(15.0)
        began, moment = worked(devtools), time.monotonic()
        shared = change_jobs(served, waiting, seconds)
        result["page"] = round((worked(devtools) - began) / (time.monotonic() - moment), 4)
        result["service_with"] = round(shared, 4)
        result["service_for_the_page"] = round(shared - without, 4)
        page.goto(f"{served.url}/#/jobs")
        page.wait_for_selector("#filter")
        time.sleep(3.0)
        late = delays(served, page, 20)
        result["delay_median_s"], result["delay_slowest_s"] = round(statistics.median(late), 3), round(max(late), 3)
        result["load_average"] = round(psutil.getloadavg()[0], 1)
        browser.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--gpus", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        served = Served(Path(folder) / "home", "--gpus", str(given.gpus), "--policy", "sjf-bsbf").start()
        try:
            print(json.dumps(measure(served, given.seconds, given.jobs, given.gpus), indent=2))
        finally:
            served.end()


if __name__ == "__main__":
    main()
