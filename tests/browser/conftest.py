"""A real service, a real Chromium, and pages that fail a test when the console says something."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.served import Served

if find_spec("playwright") is None:  # `make test-browser` installs it
    collect_ignore_glob = ["test_*.py"]

ROOT = Path(__file__).parents[2]
AXE = ROOT / "out" / "browser" / "node_modules" / "axe-core" / "axe.min.js"
TRAINING = str(Path(__file__).parent / "training.py")
WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


class DashboardPage:
    """A page of the dashboard in a context of its own, which no other page shares its cookies with."""

    def __init__(self, browser, served, *, size=None, dark=False):
        self.served = served
        self.problems = []
        self.context = browser.new_context(
            viewport=size or WIDE, color_scheme="dark" if dark else "light", reduced_motion="reduce", locale="en-GB"
        )
        self.page = self.context.new_page()
        self.page.on("console", self._heard)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))

    def _heard(self, message):
        if message.type in ("error", "warning"):
            self.problems.append(message.text)

    def sign_in(self, token=None):
        self.page.goto(self.served.url)
        self.page.get_by_label("Token").fill(token or self.served.token)
        self.page.get_by_role("button", name="Sign in").click()
        self.page.get_by_role("navigation").wait_for()
        return self.page

    def violations(self):
        """What axe finds on the page as it is."""
        self.page.evaluate(AXE.read_text())  # a script element would break the page's own policy
        found = self.page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        return [(one["id"], [node["html"][:160] for node in one["nodes"]]) for one in found["violations"]]


@pytest.fixture(scope="session")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        options = ["--no-sandbox", "--disable-background-networking"]
        chromium = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=options)
        yield chromium
        chromium.close()


@pytest.fixture(scope="package")
def served(tmp_path_factory):
    """A service with four GPUs, on which jobs have run, run and wait."""
    folder = tmp_path_factory.mktemp("browser")
    service = Served(folder / "home", "--gpus", "4", "--policy", "sjf-ffs").start()
    service.folder = folder
    try:
        yield service
    finally:
        service.end()


@pytest.fixture
def open_page(browser, served):
    """Open pages, and check at the end that none of them complained."""
    opened = []

    def open_one(**options):
        opened.append(DashboardPage(browser, served, **options))
        return opened[-1]

    yield open_one
    problems = [text for one in opened for text in one.problems]
    for one in opened:
        one.context.close()
    assert problems == []


def train(served, iterations, seconds=0.05, *, crowd="alone", **fields):
    """Submit a training that reports its progress; those of one crowd slow each other down."""
    crowd_folder = served.folder / crowd
    crowd_folder.mkdir(exist_ok=True)
    command = [sys.executable, TRAINING, str(iterations), str(seconds), str(crowd_folder)]
    return served.submit(*command, **{"directory": str(ROOT), "duration_s": iterations * seconds, **fields})
