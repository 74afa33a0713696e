"""What the dashboard writes, in a real Chromium: durations, failed jobs, jobs that do not exist, narrow columns."""

import re

import pytest
from playwright.sync_api import expect

from carpool.live.text import span
from tests.browser.conftest import train

pytestmark = pytest.mark.browser
SMALL_PHONE = {"width": 375, "height": 700}


def test_durations_are_written_as_the_commands_print_them(open_page, served):
    page = open_page().sign_in()
    moments = [0.04, 9.94, 9.95, 59.4, 59.6, 60, 62.3, 100, 125, 3599.6, 3725, 7200, 90_000, 8_640_000, -125]
    found = page.evaluate(
        "async (all) => { const m = await import('/ui/format.js'); return all.map(m.span); }", moments
    )
    assert [text.replace("−", "-") for text in found] == [span(seconds) for seconds in moments]


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_the_page_of_a_failed_job_shows_what_it_said(open_page, served, stream):
    words = "echo no such file" + (" >&2" if stream == "stderr" else "")
    job = served.submit("sh", "-c", f"{words}; exit 3")
    served.until(job, "failed")
    page = open_page().sign_in()
    page.goto(f"{served.url}/#/job/{job}")
    expect(page.locator("pre.log")).to_contain_text("no such file")
    expect(page.locator("#stream")).to_have_value(stream)


def test_a_job_that_does_not_exist_is_asked_for_once(open_page, served):
    dashboard = open_page()
    page = dashboard.sign_in()
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{served.url}/#/job/999999")
    expect(page.get_by_role("alert").filter(has_text="999999")).to_be_visible()
    expect(page.get_by_text("Loading …")).not_to_be_visible()
    expect(page.get_by_role("heading", name="Receipt")).not_to_be_visible()
    for _ in range(3):  # what happens elsewhere makes the page look again
        served.until(served.submit("true"), "finished")
    page.wait_for_timeout(500)
    assert len([url for url in asked if "/v1/jobs/999999" in url]) == 3
    assert all("404" in text for text in dashboard.problems)
    dashboard.problems.clear()


def test_the_range_of_an_end_fits_its_column(open_page, served):
    job = train(served, 9000, name="resnet50")
    served.until(job, "running")
    page = open_page().sign_in()
    page.get_by_role("navigation").get_by_role("link", name="Jobs", exact=True).click()
    cell = page.locator(".vt-space .vt-row", has_text="resnet50").locator("> span").nth(6)
    expect(cell).to_have_text(re.compile("^ends in"), timeout=20_000)  # a forecast is reused for seconds
    longest = "ends in 1 h 35 min – 12 h 45 min"
    measure = "(cell, text) => { cell.textContent = text; return [cell.scrollWidth, cell.clientWidth]; }"
    needed, width = cell.evaluate(measure, longest)
    assert needed <= width
    served.client().post(f"/v1/jobs/{job}/cancel")
    served.until(job, "cancelled")


def test_a_phone_shows_the_whole_accuracy_of_forecasts(open_page, served):
    served.until(served.submit("true"), "finished")
    page = open_page(size=SMALL_PHONE).sign_in()
    page.get_by_role("navigation").get_by_role("link", name="History", exact=True).click()
    table = page.get_by_role("region", name="Accuracy of forecasts")
    expect(table).to_be_visible()
    assert table.evaluate("table => table.scrollWidth <= table.clientWidth")


def test_a_paused_job_is_listed_with_those_on_the_gpus(open_page, served):
    job = train(served, 9000, name="to-be-paused")
    served.until(job, "running")
    served.client().post(f"/v1/jobs/{job}/pause")
    served.until(job, "paused")
    page = open_page().sign_in()
    shown = page.locator("section", has_text="On the GPUs").locator(".item", has_text="to-be-paused")
    expect(shown.locator(".chip")).to_have_text("paused")
    page.goto(f"{served.url}/#/jobs/{job}")  # as the path of the API is written
    expect(page.get_by_role("heading", name=re.compile(f"Job {job} "))).to_be_visible()
    served.client().post(f"/v1/jobs/{job}/cancel")
    served.until(job, "cancelled")


@pytest.mark.parametrize("size", [{"width": 1280, "height": 900}, SMALL_PHONE])
def test_the_text_of_a_chart_is_readable_at_every_width(open_page, served, size):
    job = train(served, 30)
    served.until(job, "finished")
    page = open_page(size=size).sign_in()
    page.goto(f"{served.url}/#/job/{job}")
    heights = page.locator(".chart .axis-text").first.evaluate("text => text.getBoundingClientRect().height")
    assert heights >= 11


def test_the_names_of_a_sweep_are_shown_in_full(open_page, served):
    job = train(served, 9000, name="lr=0.003,width=1024")
    served.until(job, "running")
    page = open_page().sign_in()
    page.get_by_role("navigation").get_by_role("link", name="Jobs", exact=True).click()
    name = page.locator(".vt-space .vt-row .name", has_text="lr=0.003")
    expect(name).to_be_visible()
    assert name.evaluate("cell => cell.scrollWidth <= cell.clientWidth")
    served.client().post(f"/v1/jobs/{job}/cancel")
    served.until(job, "cancelled")


def test_no_time_is_cut_off_at_the_edge_of_the_picture(open_page, served):
    page = open_page().sign_in()
    cut = page.evaluate(
        """async () => {
          const { Timeline } = await import('/ui/timeline.js');
          const timeline = new Timeline({ label: 'GPUs', describe: String, open: () => {} });
          document.querySelector('main').append(timeline.node);
          const cut = [];
          for (let now = 1000000; now < 1000010; now += 0.5) {
            timeline.draw({ gpus: ['node0:0'], slices: [], from: now - 60, to: now + 60, now });
            const picture = timeline.node.querySelector('svg').getBoundingClientRect();
            for (const text of timeline.node.querySelectorAll('.axis-text.middle'))
              if (text.getBoundingClientRect().right > picture.right) cut.push([now, text.textContent]);
          }
          return cut;
        }"""
    )
    assert cut == []
