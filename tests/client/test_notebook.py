"""A job in a notebook: HTML without what users wrote as markup, and a display that follows the job."""

import sys
import threading
from types import ModuleType

import pytest

from carpool.client.notebook import job_html

pytestmark = pytest.mark.slow


def test_names_and_reasons_are_escaped():
    row = {"job": "1", "name": "<img src=x>", "status": "failed", "reason": "<b>", "on": [], "mates": []}
    text = job_html({**row, "started": 1.0, "progress": 0.5})
    assert "<img" not in text
    assert "<b>)" not in text
    assert "50%" in text


@pytest.fixture
def notebook(monkeypatch):
    """What IPython has for displays: one handle that can be updated."""
    shown, ended = [], threading.Event()

    class Handle:
        def update(self, content):
            shown.append(content)
            if "finished" in content:
                ended.set()

    def display(content, display_id):
        assert display_id
        shown.append(content)
        return Handle()

    module = ModuleType("IPython.display")
    module.HTML, module.display = str, display
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    return shown, ended


def test_the_display_of_a_job_follows_it_to_its_end(connection, notebook):
    shown, ended = notebook
    job = connection.submit(["sleep", "3"], name="watched")
    job._ipython_display_()
    assert "watched" in shown[0]
    assert "finished" not in shown[0]
    assert ended.wait(30)
    assert any("running" in text for text in shown)
