"""The demo runs real PyTorch trainings, one of them a gang, and leaves nothing behind."""

import re
import subprocess

import pytest

from carpool.live.commands import demo
from tests.support.command_line import call

pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'carpool[train]'")


@pytest.mark.slow
def test_the_demo_runs_two_trainings_and_compares(monkeypatch):
    few = (demo.DemoJob("gang", 2, 40, 64, 5), demo.DemoJob("short", 1, 20, 64, 5))
    monkeypatch.setattr(demo, "DOZEN", few)
    monkeypatch.setattr(demo, "PAUSE_S", 0.2)
    said = call("demo")
    assert said.code == 0, said.out + said.err
    assert said.out.count("finished") == 3  # one line for each job, and the summary
    assert "2 of 2 jobs finished" in said.out
    for name in (
        r"achieved, live \(sjf-bsbf\) .* measured",
        "fifo .* simulated",
        "sjf .* simulated",
        "sjf-bsbf .* simulated",
    ):
        assert re.search(name, said.out)
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert "carpool-demo-" not in left
    assert "carpool.live.commands.demo_job" not in left
