"""Pictures, tables, and the folders of runs and comparisons."""

import csv
import json
import re
import struct
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool import policies
from carpool.core import events as ev
from carpool.core.codec import decode
from carpool.core.model import Job
from carpool.core.state import State
from carpool.report import plots
from carpool.report.folders import write_comparison, write_run
from carpool.report.tables import HOURS, comparison_json, comparison_tables, run_tables
from carpool.sim import Setup, simulate
from carpool.sim.run import true_model
from carpool.sim.sweep import SweepCase, run_all
from carpool.sim.timeline import Segment
from carpool.sim.workload import Workload
from tests.support.command_line import everything_in
from tests.support.situations import facts
from tests.support.turns import TakeTurns

# ---- pictures ------------------------------------------------------------------------------------------------------


def size_of(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert data[12:16] == b"IHDR"
    assert data.rstrip()[-8:-4] == b"IEND"
    return struct.unpack(">II", data[16:24])


def test_colours_are_unique_and_policies_keep_theirs():
    five = ["fifo", "sjf", "tiresias", "sjf-ffs", "sjf-bsbf"]
    chosen = plots.colours(five, plots.POLICY_COLOURS)
    assert chosen == {name: plots.POLICY_COLOURS[name] for name in five}
    for names in (["sjf:skip=false", "sjf"], ["sjf", "sjf:skip=false"]):
        both = plots.colours(names, plots.POLICY_COLOURS)
        assert both["sjf"] == plots.POLICY_COLOURS["sjf"], "in any order"
        assert both["sjf:skip=false"] != both["sjf"]
    assert plots.colours(["sjf:skip=false"], plots.POLICY_COLOURS) == {"sjf:skip=false": plots.POLICY_COLOURS["sjf"]}


names = st.sampled_from([*plots.POLICY_COLOURS, "sjf:skip=false", "fifo:skip=true"]) | st.text(max_size=4)


@given(st.lists(names, unique=True, max_size=60))
def test_any_number_of_names_have_different_colours(chosen):
    palette = plots.colours(chosen, plots.POLICY_COLOURS)
    assert list(palette) == chosen
    assert len(set(palette.values())) == len(chosen)
    assert all(len(colour) == 7 and colour[0] == "#" and int(colour[1:], 16) >= 0 for colour in palette.values())
    assert palette == plots.colours(chosen, plots.POLICY_COLOURS)


def test_hundreds_of_models_have_colours():
    assert len(set(plots.colours([f"model{n}" for n in range(300)], plots.MODEL_COLOURS).values())) == 300


@pytest.mark.parametrize("jobs", [1, 2, 30])
def test_the_pictures_of_a_run(tmp_path, jobs):
    load = [Job(f"j{n}", 5.0 * n, f"m{n % 9}", 1 + n % 2, 1, 50, duration_s=50.0) for n in range(jobs)]
    load = [Job(j.id, j.submitted, "generic", j.gpus, 1, 50, duration_s=50.0) for j in load]
    log: list[ev.Event] = []
    result = simulate(load, "sjf-ffs", Setup(cluster="1x4", memory_limit=False), log=log.append)
    write_run(tmp_path, result, log)
    for name in ("gantt.png", "jct_cdf.png", "queue_by_model.png"):
        width, height = size_of(tmp_path / name)
        assert 500 < width < 3000
        assert 300 < height < 3000
    files = {"summary.json", "jobs.csv", "events.jsonl", "gantt.png", "jct_cdf.png", "queue_by_model.png"}
    assert everything_in(tmp_path) == files


def test_the_gantt_chart_shows_shared_gpus(tmp_path):
    """The row of a GPU with two jobs is split: two colours above each other where otherwise there is one."""
    import numpy as np
    from matplotlib.image import imread

    alone = [Segment(0, 0.0, 3600.0, ("a",))]
    shared = [Segment(0, 0.0, 3600.0, ("a", "b"))]
    models = {"a": "bert", "b": "ncf"}
    found = []
    for number, what in enumerate((alone, shared)):
        plots.gantt(tmp_path / f"{number}.png", what, models, 1, "one GPU")
        pixels = np.rint(imread(tmp_path / f"{number}.png")[:, :, :3] * 255).astype(int)
        column = pixels[:, pixels.shape[1] // 3]
        found.append({"#{:02X}{:02X}{:02X}".format(*pixel) for pixel in column})
    assert plots.MODEL_COLOURS["bert"] in found[0]
    assert plots.MODEL_COLOURS["ncf"] not in found[0]
    assert {plots.MODEL_COLOURS["bert"], plots.MODEL_COLOURS["ncf"]} <= found[1]


def test_the_gantt_chart_shows_paused_jobs_pale_and_hatched(tmp_path):
    import numpy as np
    from matplotlib.image import imread

    both = [Segment(0, 0.0, 3600.0, ("a",)), Segment(1, 0.0, 3600.0, ("a",), frozenset("a"))]
    plots.gantt(tmp_path / "g.png", both, {"a": "bert"}, 2, "two GPUs")
    pixels = np.rint(imread(tmp_path / "g.png")[:, :, :3] * 255).astype(int)
    blue, pale = ([int(colour[n : n + 2], 16) for n in (1, 3, 5)] for colour in (plots.BLUE, plots._pale(plots.BLUE)))
    rows = pixels[:, pixels.shape[1] // 4 : pixels.shape[1] // 2]
    is_blue, is_pale = (rows == blue).all(2).mean(1), (rows == pale).all(2).mean(1)
    third = rows.shape[0] // 3
    assert is_blue[:third].max() == 1.0, "a row of a job that computes has one colour"
    assert 0.2 < is_pale.max() < 1.0, "a row of a paused job is pale, with lines through it"
    assert is_pale[:third].max() == 0.0
    assert is_blue[-third:].max() < 0.9


def test_a_run_with_pauses_shows_them_in_all_its_files(tmp_path, capsys):
    jobs = [Job(f"j{n}", 0.0, "generic", 1, 1, 50, duration_s=50.0) for n in range(3)]
    setup = Setup(cluster="1x1", memory_limit=False, jobs_per_gpu=1)
    log: list[ev.Event] = []
    result = simulate(jobs, TakeTurns(20.0), setup, log=log.append)
    write_run(tmp_path, result, log)
    with open(tmp_path / "jobs.csv", newline="") as file:
        rows = {row["job"]: row for row in csv.DictReader(file)}
    assert sum(int(row["pauses"]) for row in rows.values()) == result.summary.pauses > 3
    assert sum(float(row["paused_s"]) for row in rows.values()) == pytest.approx(result.summary.paused_s, abs=0.01)
    assert json.loads((tmp_path / "summary.json").read_text())["residents_max"] == result.summary.residents_max
    replayed = State(true_model(Workload(tuple(jobs)), setup), TakeTurns().key, 1)
    for line in (tmp_path / "events.jsonl").read_text().splitlines():
        replayed.apply(decode(json.loads(line)))
    assert facts(replayed) == facts(result.state), "the log holds every pause and resume"
    run_tables(result.summary, setup)
    assert f"jobs were paused {result.summary.pauses} times" in capsys.readouterr().out


@pytest.mark.parametrize(("columns", "shown"), [("90", False), ("170", True)])
def test_a_comparison_shows_pauses_only_where_there_are_some(columns, shown, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    without = outcomes()
    paused = [replace(one, summary=replace(one.summary, pauses=7, mean_paused_s=3600.0)) for one in without]
    setup = Setup(cluster="1x1", memory_limit=False)
    comparison_tables(without, setup)
    assert "paused" not in capsys.readouterr().out
    comparison_tables(paused, setup)
    table = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert re.search(r" paused\b.*\n.*\n.*fifo .* 7\b", table)
    head = next(line for line in table.splitlines() if "mean JCT" in line)
    assert ("time paused" in head) == ("residents" in head) == shown
    assert ("not shown: residents, time paused" in table) is not shown
    assert max(map(len, table.splitlines()[:5])) <= int(columns)


def test_a_gantt_chart_of_too_many_periods_ends_where_it_is_complete(tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "MOST_BARS", 3)
    periods = [Segment(0, 3600.0 * n, 3600.0 * (n + 1), ("a",)) for n in range(9)]
    assert plots._span(periods[:3], cut=True) == (0.0, 2.0)
    assert plots._span(periods, cut=False) == (0.0, 9.0)
    assert plots._span(periods[5:], cut=False) == (5.0, 9.0), "the axis starts at the first period"
    plots.gantt(tmp_path / "g.png", periods, {"a": "bert"}, 1, "title")
    size_of(tmp_path / "g.png")


def test_pictures_of_almost_empty_runs(tmp_path):
    plots.gantt(tmp_path / "g.png", [], {}, 4, "nothing ran")
    plots.jct_cdf(tmp_path / "c.png", {"fifo": [0.0]})
    plots.queue_by_model(tmp_path / "q.png", {"fifo": {"bert": 0.0}, "sjf": {}})
    plots.mean_jct(tmp_path / "m.png", {"case": {"fifo": (0.0, None)}})
    for name in "gcqm":
        size_of(tmp_path / f"{name}.png")


def test_without_matplotlib_tables_are_written_with_a_note(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(plots, "available", lambda: False)
    log: list[ev.Event] = []
    result = simulate([Job("a", 0.0, "generic", 1, 1, 5, duration_s=5.0)], "fifo", Setup(cluster="1x1"), log=log.append)
    write_run(tmp_path, result, log)
    assert everything_in(tmp_path) == {"summary.json", "jobs.csv", "events.jsonl"}
    assert "pip install 'carpool[plots]'" in capsys.readouterr().err


# ---- comparisons and tables ----------------------------------------------------------------------------------------


def outcomes(policies=("fifo", "sjf")):
    cases = []
    for label, count in (("few", 4), ("many", 8)):
        for seed in (1, 2):
            jobs = tuple(
                Job(f"j{n}", 1.0 * seed, "generic", 1, 1, 50, duration_s=10.0 * (n + seed)) for n in range(count)
            )
            cases.append(SweepCase(label, str(seed), Workload(jobs)))
    return run_all(policies, cases, Setup(cluster="1x1", memory_limit=False), workers=1)


def test_the_folder_of_a_comparison(tmp_path):
    results = outcomes()
    write_comparison(tmp_path, results)
    assert everything_in(tmp_path) == {
        "comparison.json",
        "runs.csv",
        "jct_cdf.png",
        "queue_by_model.png",
        "mean_jct.png",
    }
    for name in ("jct_cdf.png", "queue_by_model.png", "mean_jct.png"):
        size_of(tmp_path / name)
    lines = (tmp_path / "runs.csv").read_text().splitlines()
    assert len(lines) == 1 + len(results)
    first = dict(zip(lines[0].split(","), lines[1].split(","), strict=True))
    assert (first["policy"], first["case"], first["seed"]) == ("fifo", "few", "1")
    assert float(first["mean_jct_s"]) == results[0].summary.mean_jct_s
    assert float(first["small_mean_jct_s"]) == results[0].summary.small.mean_jct_s


def test_means_over_seeds():
    results = outcomes()
    data = comparison_json(results)
    assert len(data["runs"]) == 8
    assert [(m["case"], m["policy"], m["seeds"]) for m in data["means"]] == [
        (case, policy, 2) for case in ("few", "many") for policy in ("fifo", "sjf")
    ]
    own = [o.summary.mean_jct_s for o in results if (o.case, o.policy) == ("many", "sjf")]
    assert data["means"][3]["mean_jct_s"] == pytest.approx(sum(own) / 2)
    assert data["means"][3]["mean_jct_error_s"] == pytest.approx(abs(own[0] - own[1]) / 2)


@pytest.mark.parametrize("width", [80, 200])
def test_a_comparison_fits_the_width_of_the_terminal(monkeypatch, capsys, width):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    long = "tiresias:threshold_gpu_s=100.5,restart_s=3.25"
    comparison_tables(outcomes(("sjf", long)), Setup())
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in "".join(lines), "nothing is cut off"
    assert "sjf" in "".join(lines)
    assert "host slow-down" in " ".join(lines), "as a column, or named below the table"
    assert ("not shown" in "".join(lines)) == (width < 200)


def test_names_are_never_taken_for_markup(capsys):
    odd = "[/b] [red]x[/red] :smile:"
    result = simulate([Job("a", 0.0, "generic", 1, 1, 5, duration_s=5.0)], "fifo", Setup(cluster="1x1"))
    run_tables(replace(result.summary, policy=odd, workload="w[/].csv"), Setup())
    comparison_tables([replace(o, policy=odd) for o in outcomes(("fifo",))], Setup(profile="[/x]"))
    out = capsys.readouterr().out
    assert out.count(odd) == 3
    assert "w[/].csv" in out
    assert "profile [/x]" in out


def test_times_are_shown_in_hours():
    assert HOURS.show(0) == "0.00"
    assert HOURS.show(5400) == "1.50"
    assert HOURS.show(3_600_000) == "1000"


def test_every_built_in_policy_has_its_own_colour():
    missing = [name for name in policies.BUILT_IN if name not in plots.POLICY_COLOURS]
    assert not missing, f"policies without a colour: {missing}; add them to POLICY_COLOURS"
    palette = [plots.POLICY_COLOURS[name] for name in policies.BUILT_IN]
    assert len(set(palette)) == len(palette)
