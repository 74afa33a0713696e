"""The workloads of `bench/unknown.py`, and its table."""

import json
import subprocess
import sys

import pytest

from tests.support import ROOT

BENCH = ROOT / "bench"


@pytest.fixture
def work(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import unknown_work

    return unknown_work


def test_workloads_are_as_the_page_says(work):
    for workload, saturating in work.WORKLOADS.items():
        jobs = work.draw(workload, dict.fromkeys(work.KINDS, 0.01), seed=1)
        assert jobs == work.draw(workload, dict.fromkeys(work.KINDS, 0.01), seed=1)
        assert len({job.name for job in jobs}) == work.JOBS
        assert sum(job.kind in work.SATURATING for job in jobs) == saturating
        for job in jobs:
            assert work.SHORTEST_S - 0.01 <= 0.01 * job.steps <= work.LONGEST_S + 0.01
            assert 0.49 < job.guess_s / (0.01 * job.steps) < 2.01


def test_every_kind_has_a_script_that_takes_its_arguments(work):
    for kind in work.KINDS.values():
        script, *words = kind.command(7, tiny=True)
        text = (work.SCRIPTS / f"{kind.script}.py").read_text()
        assert script.endswith(f"{kind.script}.py")
        assert words[:2] == ["--steps", "7"]
        assert all(f'"{word}"' in text for word in (*words, *kind.arguments) if word.startswith("--"))


def test_the_table_compares_with_exclusive_sjf_and_the_best_other(tmp_path):
    for policy, limit, mean in (("carpool", None, 20.0), ("sjf", 1, 80.0), ("sjf-ffs", 4, 25.0)):
        case = {"workload": "mixed", "policy": policy, "jobs_per_gpu": limit, "mechanism": "mps", "repeat": 0}
        record = {"case": case, "measured": {"mean_jct_s": mean, "makespan_s": 100.0, "failed": []}}
        (tmp_path / f"{policy}-run1.json").write_text(json.dumps(record))
    command = [sys.executable, str(BENCH / "unknown.py"), "--out", str(tmp_path), "--table"]
    rows = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    carpool = next(row for row in rows if "carpool" in row)
    assert "0.25 of sjf" in carpool
    assert "0.80 of best" in carpool


def test_a_case_is_given_up_by_what_the_default_took(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCH))
    import unknown

    slow = unknown.Case("light", "sjf", 1, unknown.MPS)
    assert unknown._enough_s(slow, tmp_path, 2.0) == float("inf")
    for repeat, mean_s in enumerate((20.0, 25.0)):
        case = unknown.Case("light", "carpool", None, unknown.MPS, repeat)
        (tmp_path / f"{case.name}.json").write_text(json.dumps({"measured": {"mean_jct_s": mean_s}}))
        assert unknown._enough_s(case, tmp_path, 2.0) == float("inf")
    assert unknown._enough_s(slow, tmp_path, 2.0) == 50.0

    now = unknown.time.time()
    rows = [{"submitted": now - 100.0, "finished": now - 90.0}, {"submitted": now - 30.0, "finished": None}]
    assert unknown.least_jct_s(rows) == pytest.approx(20.0, abs=1.0)


def test_the_page_has_every_case_that_was_measured():
    page = (ROOT / "docs" / "experiments" / "unknown.md").read_text(encoding="utf-8")
    for path in (ROOT / "docs" / "experiments" / "unknown").glob("machine-*/*-run*.json"):
        record = json.loads(path.read_text())
        rows = [line for line in page.splitlines() if line.startswith(f"| {record['case']['workload']} | `")]
        machine = int(path.parent.name.removeprefix("machine-"))
        least = "at least " if record["measured"].get("given_up") else ""
        figure = f"{least}{record['measured']['mean_jct_s']:.1f}"
        assert any(figure in row.split(" | ")[1 + machine].strip("| ").split(", ") for row in rows), path.name
