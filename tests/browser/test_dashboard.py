"""The dashboard in a real Chromium: from signing in to a finished job that shared, and what it may not do.

The pictures of the documentation are made here, where `CARPOOL_PICTURES` names a folder.
"""

import contextlib
import http.server
import os
import re
import threading
import time
from pathlib import Path

import pytest
import requests
from playwright.sync_api import Error, expect

from tests.browser.conftest import PHONE, train

pytestmark = pytest.mark.browser
VIEWS = ("Now", "Jobs", "History", "What if", "Usage")


@pytest.fixture(scope="module")
def busy(served):
    """The service with jobs that share, are paused and wait. The first ones have finished."""
    done = [train(served, 20, 0.03, name=f"warm-up-{number}", crowd="warm") for number in range(3)]
    for job in done:
        served.until(job, "finished")
    served.running = [
        train(served, 9000, name=f"resnet50-lr0.{number}", crowd=f"gpu{number}") for number in range(1, 5)
    ]
    for job in served.running:
        served.until(job, "running")
    served.sharing = train(served, 1000, name="bert-short", crowd="short")
    served.until(served.sharing, "running")
    served.client().post(f"/v1/jobs/{served.running[3]}/pause")
    served.waiting = [train(served, 2000, name=f"gpt2-seed{number}", exclusive=True) for number in range(6)]
    served.client().post(f"/v1/jobs/{served.waiting[-1]}/hold")
    return served


def picture(page, name, after_s=0.0):
    """Keep a picture for the documentation; `after_s`: seconds in which something happens that it shows."""
    folder = os.environ.get("CARPOOL_PICTURES")
    if folder:
        page.wait_for_timeout(1000.0 * after_s)
        page.screenshot(path=Path(folder) / f"dashboard-{name}.png", full_page=True, animations="disabled")


def open_view(page, name):
    page.get_by_role("navigation").get_by_role("link", name=name, exact=True).click()
    expect(page.locator("main > *")).to_be_visible()


def test_the_whole_path_from_signing_in_to_a_finished_job_that_shared(open_page, busy):
    dashboard = open_page()
    page = dashboard.sign_in()
    expect(page.get_by_text("GPUs busy")).to_be_visible()
    expect(page.locator(".tile", has_text="GPUs busy")).to_contain_text("4 / 4")
    page.select_option("#range", "60")
    page.get_by_text("As a table").click()
    shared_row = page.get_by_role("row", name=re.compile(r"bert-short"))
    expect(shared_row.get_by_role("link")).to_have_count(2)
    expect(page.get_by_role("row", name=re.compile(r"\(paused\)"))).to_have_count(1)
    # the picture has parts that run, expected ones and hatched ones, and two jobs on one GPU split its row
    assert page.locator("svg path.hatch").count() == 1
    assert page.locator("svg path.later").count() >= 1
    heights = page.evaluate(
        """() => [...document.querySelectorAll('.timeline path.past:not(.starting)')]
             .flatMap((path) => [...path.getAttribute('d').matchAll(/v([\\d.]+)/g)].map((found) => Number(found[1])))"""
    )
    assert max(heights) == pytest.approx(26.0)
    assert min(heights) == pytest.approx(12.0)
    page.get_by_text("As a table").click()
    picture(page, "now", after_s=25.0)
    # the queue says why and when, as ranges
    first = page.locator(".card", has_text="Next in the queue").locator(".item").first
    expect(first).to_contain_text("waits for GPUs")
    expect(first.locator(".when")).to_have_text(re.compile(r"^in .+ – .+$"))
    # the job's page, up to its end, without a reload
    (busy.folder / "short" / "finish").touch()
    page.get_by_role("link", name=re.compile("bert-short")).first.click()
    expect(page.get_by_role("heading", name=re.compile(f"Job {busy.sharing} bert-short"))).to_be_visible()
    expect(page.locator(".state")).to_have_text("finished", timeout=30_000)
    expect(page.locator(".facts")).to_contain_text("Exit code")
    expect(page.get_by_text("It joined a running job once", exact=False).first).to_be_visible()
    expect(page.locator("pre.log")).to_contain_text("iteration 1000: loss")
    expect(page.get_by_label(re.compile("Slow-down over time"))).to_be_visible()
    expect(page.get_by_text("complete", exact=True)).to_be_visible()  # what is said of the output
    picture(page, "job")


def test_a_change_is_seen_within_a_second(open_page, busy):
    page = open_page().sign_in()
    open_view(page, "Jobs")
    expect(page.get_by_role("link", name=busy.waiting[0], exact=True)).to_be_visible()
    delays = []
    for priority in (3, 4, 5):
        client = busy.client()
        job = client.post(
            "/v1/jobs", {"command": ["true"], "directory": "/", "exclusive": True, "priority": -priority}
        )["job"]
        began = time.monotonic()
        page.locator(f"a[href='#/job/{job}']").wait_for(state="attached", timeout=5000)
        delays.append(time.monotonic() - began)
        client.post(f"/v1/jobs/{job}/cancel")
    assert max(delays) < 1.0, delays


def test_the_owner_changes_a_job(open_page, busy):
    job = busy.waiting[0]
    page = open_page().sign_in()
    page.goto(f"{busy.url}/#/job/{job}")
    page.get_by_role("button", name="Hold").click()
    expect(page.locator(".state")).to_have_text("held")
    page.get_by_role("button", name="Release").click()
    expect(page.locator(".state")).to_have_text("pending")
    page.get_by_label("Priority").fill("7")
    page.get_by_role("button", name="Set priority").click()
    expect(page.locator(".facts")).to_contain_text(re.compile("Priority\\s*7"))
    page.get_by_role("button", name="Cancel", exact=True).click()
    page.get_by_role("button", name="Keep it").click()
    assert busy.client().get(f"/v1/jobs/{job}")["status"] == "pending"
    page.get_by_role("button", name="Cancel", exact=True).click()
    page.get_by_role("button", name="Cancel the job").click()
    expect(page.locator(".state")).to_have_text("cancelled")
    paused = busy.running[3]
    page.goto(f"{busy.url}/#/job/{paused}")
    page.get_by_role("button", name="Resume").click()
    expect(page.locator(".state")).to_have_text("running")


def test_another_user_looks_and_changes_nothing(open_page, busy):
    token = busy.client().post("/v1/users", {"name": "vera"})["token"]
    page = open_page().sign_in(token)
    page.goto(f"{busy.url}/#/job/{busy.running[0]}")
    expect(page.locator(".state")).to_have_text("running")
    expect(page.get_by_role("button", name="Cancel", exact=True)).to_have_count(0)
    expect(page.locator("pre.log")).to_have_count(0)
    expect(page.get_by_text("What was submitted")).to_have_count(0)


def test_history_what_if_and_usage(open_page, busy):
    page = open_page().sign_in()
    open_view(page, "History")
    expect(page.get_by_role("row", name=re.compile("warm-up-2")).first).to_contain_text("finished")
    expect(page.get_by_role("rowheader", name="end", exact=True)).to_be_visible()
    picture(page, "history")
    open_view(page, "What if")
    page.get_by_role("button", name="Simulate").click()
    expect(page.get_by_text("finished jobs of this service, simulated", exact=False)).to_be_visible(timeout=20_000)
    assert page.locator(".pictures svg").count() == 2
    expect(page.get_by_role("heading", name="fifo")).to_be_visible()
    picture(page, "what-if")
    open_view(page, "Usage")
    expect(page.get_by_role("rowheader", name="admin")).to_be_visible()
    assert page.locator("svg.chart rect").count() >= 7


@pytest.mark.parametrize(
    ("size", "dark"), [(None, False), (None, True), (PHONE, False)], ids=["light", "dark", "phone"]
)
def test_no_view_breaks_a_rule_of_accessibility(open_page, busy, size, dark):
    dashboard = open_page(size=size, dark=dark)
    dashboard.page.goto(busy.url)
    dashboard.page.get_by_label("Token").wait_for()
    found = dashboard.violations()
    page = dashboard.sign_in()
    for name in VIEWS:
        open_view(page, name)
        page.wait_for_timeout(300)
        found += dashboard.violations()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{name} is wider than the screen"
        if name == "Now":
            page.select_option("#range", "60")
            page.wait_for_timeout(300)
            if dark or size:
                picture(page, "dark" if dark else "phone")
    page.goto(f"{busy.url}/#/job/{busy.running[0]}")
    expect(page.locator(".state")).to_have_text("running")
    page.wait_for_timeout(300)
    found += dashboard.violations()
    assert found == []


def test_everything_can_be_reached_with_the_keyboard(open_page, busy):
    dashboard = open_page()
    page = dashboard.page
    page.goto(busy.url)
    page.get_by_label("Token").wait_for()
    page.keyboard.type(busy.token)  # the field has the focus
    page.keyboard.press("Enter")
    page.get_by_role("navigation").wait_for()
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.textContent.trim().slice(0, 40)"))
    assert {*VIEWS, "Sign out", "As a table", "All jobs"} <= reached


def test_signing_out_ends_the_session(open_page, busy):
    dashboard = open_page()
    page = dashboard.sign_in()
    cookie = next(one for one in dashboard.context.cookies() if one["name"] == "carpool_session")
    assert cookie["httpOnly"]
    assert cookie["sameSite"] == "Strict"
    assert busy.token not in cookie["value"]
    page.reload()
    page.get_by_role("navigation").wait_for()
    page.get_by_role("button", name="Sign out").click()
    page.get_by_label("Token").wait_for()
    assert dashboard.context.cookies() == []
    assert page.evaluate("localStorage.length") == 0
    page.reload()
    page.get_by_label("Token").wait_for()


def test_requests_that_are_under_way_end_with_the_session(open_page, busy):
    page = open_page().sign_in()
    held = []
    page.route("**/v1/forecast", lambda route: held.append(route))
    with page.expect_request("**/v1/forecast"):
        page.reload()
    page.get_by_role("button", name="Sign out").click()
    page.get_by_label("Token").wait_for()
    with contextlib.suppress(Error):  # the page has dropped the request
        held[0].continue_()
    page.wait_for_timeout(300)  # a refused request would be told on the console, which fails the test


def test_a_wrong_token_is_told(open_page, busy):
    dashboard = open_page()
    page = dashboard.page
    page.goto(busy.url)
    page.get_by_label("Token").fill("x" * 43)
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("alert")).to_contain_text("not known here")
    assert [text for text in dashboard.problems if "401" not in text] == []
    dashboard.problems.clear()  # Chromium writes every refused request to the console


HOSTILE = "<img src=x onerror=document.title='owned'><script>document.title='owned'</script>{{7*7}}\u202e"


def test_hostile_names_and_logs_stay_text(open_page, busy):
    code = f"printf '%s\\n' '</pre><script>document.title=1</script>' \"{HOSTILE.replace(chr(34), '')}\"; exit 3"
    job = busy.submit("sh", "-c", code, name="</title><script>document.title='owned'</script>", priority=1000)
    until = time.monotonic() + 60
    while busy.client().get(f"/v1/jobs/{job}")["status"] == "pending" and time.monotonic() < until:
        time.sleep(0.2)
    dashboard = open_page()
    page = dashboard.sign_in()
    busy.until(job, "failed")
    for view in VIEWS:
        open_view(page, view)
        page.wait_for_timeout(200)
        assert "owned" not in page.title()
    page.goto(f"{busy.url}/#/job/{job}")
    expect(page.locator("pre.log")).to_contain_text("</pre><script>")
    expect(page.get_by_role("heading", level=1)).to_contain_text("<script>")
    assert page.locator("main img, main script, main iframe").count() == 0
    assert page.evaluate("document.title") != "1"


def test_the_policy_of_the_page_forbids_scripts_from_elsewhere(open_page, busy):
    dashboard = open_page()
    page = dashboard.sign_in()
    ran = page.evaluate(
        """() => { const script = document.createElement('script'); script.textContent = 'window.ran = 1';
                   document.body.append(script); return window.ran ?? 0; }"""
    )
    assert ran == 0
    assert page.evaluate("fetch('http://127.0.0.1:9/').then(() => 'sent', () => 'blocked')") == "blocked"
    assert any("Content Security Policy" in text for text in dashboard.problems)
    dashboard.problems.clear()


def test_a_page_of_another_origin_can_do_nothing_with_the_session(open_page, busy):
    """Another port of the same host is the same site: the browser sends the cookie there and from there."""
    seen = []

    class Evil(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            seen.append(self.headers.get("Cookie", ""))
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<title>evil</title>")

        def log_message(self, *words):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Evil)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        dashboard = open_page()
        page = dashboard.sign_in()
        page.goto(f"http://127.0.0.1:{server.server_port}/")
        stolen = next(one for one in seen if "carpool_session" in one)  # cookies know no ports
        assert requests.get(f"{busy.url}/v1/me", headers={"Cookie": stolen}, timeout=10).status_code == 401
        path = f"{busy.url}/v1/jobs/{busy.running[0]}/cancel"
        tried = page.evaluate(
            """async (path) => {
                 const outcomes = [];
                 for (const headers of [{}, {'Carpool-Key': 'x'}]) {
                   const mode = headers['Carpool-Key'] ? 'cors' : 'no-cors';
                   try { await fetch(path, {method: 'POST', headers, credentials: 'include', mode});
                         outcomes.push('sent'); } catch { outcomes.push('blocked'); }
                 }
                 const form = document.createElement('form');
                 Object.assign(form, {method: 'post', action: path});
                 document.body.append(form); form.submit();
                 return outcomes;
               }""",
            path,
        )
        assert tried[1] == "blocked"  # the browser asks first, and the service does not allow it
        page.wait_for_timeout(500)
        assert busy.client().get(f"/v1/jobs/{busy.running[0]}")["status"] == "running"
        dashboard.problems.clear()
    finally:
        server.shutdown()
        server.server_close()


def test_ten_thousand_jobs_scroll_without_lag(open_page, busy):
    """The rows are made here: submitting as many jobs takes longer than all other tests."""
    page = open_page().page
    like = next(row for row in busy.client().jobs() if row["job"] == busy.waiting[1])

    def answer(route):
        before = re.search(r"before=(\d+)", route.request.url)
        first = int(before[1]) - 1000 if before else 1_009_000
        rows = [{**like, "job": str(first + number), "name": f"job number {number}"} for number in range(1000)]
        route.fulfill(json={"jobs": rows, "next": str(first) if first > 1_000_000 else None})

    page.route("**/v1/jobs?limit=*", answer)
    page.goto(busy.url)
    page.get_by_label("Token").fill(busy.token)
    page.get_by_role("button", name="Sign in").click()
    open_view(page, "Jobs")
    expect(page.locator(".card-head .quiet")).to_have_text(re.compile(r"^1000\d jobs$"), timeout=30_000)
    assert page.locator(".vt-space .vt-row").count() < 80
    devtools = page.context.new_cdp_session(page)
    devtools.send("Performance.enable", {"timeDomain": "threadTicks"})  # CPU time: the machine may be busy

    def worked():
        return next(
            m["value"] for m in devtools.send("Performance.getMetrics")["metrics"] if m["name"] == "TaskDuration"
        )

    began = worked()
    page.evaluate(
        """async () => {
             const body = document.querySelector('.vt-body');
             for (let step = 1; step <= 40; step++) {
               body.scrollTop = (body.scrollHeight / 40) * step;
               await new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)));
             }
           }"""
    )
    step_ms = (worked() - began) / 40 * 1000
    last = page.locator(".vt-space .vt-row").last
    assert int(last.get_attribute("aria-rowindex")) > 10_000
    assert step_ms < 50, f"{step_ms:.0f} ms of CPU for one step"
