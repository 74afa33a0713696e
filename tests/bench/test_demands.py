"""`bench/demands.py` on the CPU: models alone and together, written after every measurement."""

import json
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

from carpool.belief.demand import DEMAND_SD, slowdown

pytestmark = pytest.mark.slow

BENCH = Path(__file__).parents[2] / "bench"


def test_pairs_are_measured_and_the_limit_holds(tmp_path):
    options = ["--cpu", "--single", "--seconds", "0.3", "--limit", "100", "--models", "mlp", "lstm"]
    done = subprocess.run(
        [sys.executable, BENCH / "demands.py", "--out", tmp_path, *options], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "demands-cpu.json").read_text())
    assert set(found["models"]) == {"mlp", "lstm"}
    assert found["models"]["mlp"]["batch"] == 256
    measured = [tuple(run["models"]) for run in found["runs"]]
    assert measured == [("mlp",), ("lstm",), ("mlp", "lstm"), ("mlp",), ("lstm",)]
    assert all(job["iteration_s"] > 0 for run in found["runs"] for job in run["jobs"])
    assert "mlp + mlp: no such processes" in (tmp_path / "log-cpu.txt").read_text()


@pytest.mark.parametrize(("mechanism", "limit"), [("mps", 0.12), ("time-slicing", 0.15)])
def test_demands_alone_predict_pairs_never_seen(mechanism, limit, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import demand_fit

    found = demand_fit.judge(demand_fit.FOLDER, mechanism)
    assert found.left_out <= limit
    assert found.shipped <= limit
    assert found.shipped_sd <= DEMAND_SD[mechanism] * 1.1
    demands, _ = demand_fit.read(demand_fit.FOLDER, mechanism)
    form, _ = demand_fit.FORMS[mechanism]
    for own in demands.values():
        for mate in demands.values():
            assert slowdown(own, mate, mechanism) == pytest.approx(form(found.coefficients, own, mate), rel=0.02)


def test_python_is_up_as_quickly_under_the_hook(monkeypatch):
    """The limit is 3 ms by the clock; processor time does not depend on what else the machine does."""
    monkeypatch.syspath_prepend(str(BENCH))
    import watch_starts

    assert median(used for _, used in watch_starts.measure(12)) < 0.003
