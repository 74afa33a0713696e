"""`carpool paper`: the orderings that must hold, the report, the cache, the rules of the verdicts, wrong input."""

import csv
import json
import os
import re
import signal
import subprocess
import time
from collections import Counter
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from statistics import fmean

import pytest

from carpool.report.paper import config as configuration
from carpool.report.paper import figures_model, tables
from carpool.report.paper import plan as planning
from carpool.report.paper.cells import lower, ours, signed
from carpool.report.paper.claims import claims
from carpool.report.paper.drawing import policy_colours, second_of_family
from carpool.report.paper.jobs import thirty_jobs, workload_of
from carpool.report.paper.measured import read_measured
from carpool.report.paper.results import Results, jct_h, model_queue_s, ratio_lower
from carpool.report.paper.runs import execute, key
from carpool.report.paper.schedules import FIRST, SECOND, schedules
from carpool.report.paper.verdicts import ClaimVerdict, combined, equal, every, less
from carpool.report.plots import POLICY_COLOURS
from carpool.sim.generate import pollux_like
from carpool.sim.sweep import Mean
from tests.support import ROOT
from tests.support.command_line import COMMAND, call, environment, process
from tests.support.effort import THOROUGH

pytestmark = pytest.mark.slow

SHIPPED = (resources.files("carpool.report.paper") / "paper.toml").read_text("utf-8")
FIGURES = ("figure1", "figure2", "figure3", "figure4", "figure5", "figure6a", "figure6b", "overhead")
SHEETS = (
    "tableII", "measured", "tableIII_jct", "tableIII_queue", "tableIV_jct", "tableIV_queue", "claims",
    "figure2", "figure3", "figure6a", "figure6b", "overhead", "batchnorm",
)  # fmt: skip
SHARING, EXCLUSIVE = ("sjf-ffs", "sjf-bsbf"), ("fifo", "sjf", "tiresias", "tiresias-16")


@dataclass(frozen=True)
class Quick:
    file: Path
    """The configuration."""
    folder: Path
    interrupted: subprocess.CompletedProcess[str]
    kept: dict[str, int]
    """The files of the cache when the first call was interrupted, with the times they were written."""
    finished: subprocess.CompletedProcess[str]


def one_workload() -> str:
    """The shipped configuration without Pollux's own jobs, on which no verdict is given, and with the policy `pollux`
    deciding every three minutes instead of every minute: a third of the time."""
    head, second, rest = SHIPPED.partition('[[workloads]]\nname = "pollux"\n')
    policy = 'spec = "pollux"'
    assert second
    assert policy in head
    return head.replace(policy, 'spec = "pollux:round_s=180"') + rest[rest.index("\n[") :]


@pytest.fixture(scope="module")
def quick(tmp_path_factory) -> Quick:
    """`carpool paper --quick`, interrupted once on its way and then called again."""
    file = tmp_path_factory.mktemp("paper") / "paper.toml"
    file.write_text(SHIPPED if THOROUGH else one_workload(), "utf-8")
    folder = file.parent / "out"
    arguments = [*COMMAND, "paper", "--quick", "--config", str(file), "--out", str(folder)]
    variables = {name: value for name, value in environment().items() if name != "CARPOOL_DATA"}
    started = subprocess.Popen(arguments, env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    cache = folder / "cache"
    patience = time.monotonic() + 600
    while len(list(cache.glob("*.json"))) < 5 and time.monotonic() < patience:
        time.sleep(0.05)
    started.send_signal(signal.SIGINT)
    out, err = started.communicate(timeout=300)
    kept = {path.name: path.stat().st_mtime_ns for path in cache.glob("*.json")}
    finished = subprocess.run(arguments, env=variables, text=True, capture_output=True, timeout=900, check=False)
    return Quick(file, folder, subprocess.CompletedProcess(arguments, started.returncode, out, err), kept, finished)


@pytest.fixture(scope="module")
def results(quick) -> Results:
    """What the quick run found, read from its cache."""
    config = configuration.load(quick.file, quick=True)
    return Results(config, execute(config, planning.plan(config), quick.folder / "cache", workers=1))


def rows(quick: Quick, name: str) -> list[dict[str, str]]:
    with open(quick.folder / f"{name}.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


# ---- the orderings that must hold ----------------------------------------------------------------------------------


@pytest.mark.parametrize("table", ["III", "IV"])
def test_sharing_policies_queue_less_than_exclusive_ones(quick, table):
    found = {
        row["policy"]: float(row["ours_h"])
        for row in rows(quick, f"table{table}_queue")
        if (row["workload"], row["origin"], row["part"]) == ("calibrated", "generated", "all")
    }
    for sharing in SHARING:
        for exclusive in EXCLUSIVE:
            assert found[sharing] < found[exclusive], (sharing, exclusive)


def test_wise_sharing_is_no_worse_than_first_fit_from_a_slow_down_of_1_5_on(quick):
    found = {(row["slowdown"], row["jobs"], row["policy"]): float(row["mean_jct_h"]) for row in rows(quick, "figure6b")}
    strong = [(xi, jobs) for xi, jobs, policy in found if policy == "sjf-ffs" and xi in ("1.5", "1.75", "2")]
    assert len(strong) == 6
    for xi, jobs in strong:
        assert found[xi, jobs, "sjf-bsbf"] <= found[xi, jobs, "sjf-ffs"], (xi, jobs)


def test_pollux_is_better_at_low_load_than_at_high_load_relative_to_sjf_bsbf(quick):
    found = {
        (row["policy"], int(row["jobs"])): float(row["mean_jct_h"])
        for row in rows(quick, "figure6a")
        if row["workload"] == "calibrated"
    }
    low, high = (found["pollux", jobs] / found["sjf-bsbf", jobs] for jobs in (120, 480))
    assert low < high


# ---- the report ----------------------------------------------------------------------------------------------------


def test_every_table_and_figure_is_there(quick):
    assert quick.finished.returncode == 0, quick.finished.stderr
    for name in FIGURES:
        assert (quick.folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (quick.folder / f"{name}.svg").read_text("utf-8")
    for name in SHEETS:
        assert rows(quick, name), name
    assert f"open {quick.folder / 'paper.html'}" in quick.finished.stdout
    assert not list(quick.folder.glob(".unfinished-*"))


def test_the_page_needs_nothing_from_elsewhere(quick):
    page = (quick.folder / "paper.html").read_text("utf-8")
    links = re.findall(r"(?:src|href)=['\"]([^'\"]*)", page)
    assert all(link.startswith(("data:image/svg+xml;base64,", "#")) for link in links)
    assert sum(link.startswith("data:") for link in links) == len(FIGURES)
    rest = re.sub(r"data:image/svg\+xml;base64,[A-Za-z0-9+/=]+", "", page)
    for word in ("http", "//", "url(", "@import", "<script", "<link"):
        assert word not in rest, word


def test_the_page_shows_every_number_of_the_papers_tables_as_the_papers(quick):
    page = (quick.folder / "paper.html").read_text("utf-8")
    shown = Counter(re.findall(r"<td class='paper(?: starts)?'>([^<]*)</td>", page))
    printed = configuration.load().paper
    wanted = Counter(
        f"{number:.2f}"
        for table in (*printed.jct.values(), *printed.queue.values())
        for policy, triple in table.items()
        for number in triple
        for _ in range(2 if policy == "tiresias" else 1)  # it stands beside both thresholds
    )
    assert not wanted - shown


def test_every_claim_has_a_verdict_and_its_numbers(quick):
    found = rows(quick, "claims")
    assert len(found) >= 20
    for claim in found:
        assert claim["verdict"] in list(ClaimVerdict)
        assert all(claim[name] for name in ("where", "claim", "paper", "ours", "reason"))
    tiresias = [claim for claim in found if "Tiresias" in claim["claim"] and "jobs" in claim["claim"]]
    assert tiresias
    assert all("1 GPU-h" in claim["ours"] and "16 GPU-h" in claim["ours"] for claim in tiresias)


def test_a_policy_has_one_colour_everywhere():
    config = configuration.load()
    colours = policy_colours(config)
    for row in config.policies:
        assert colours[row.name] == POLICY_COLOURS[row.spec.partition(":")[0]]
    assert second_of_family(config) == {"tiresias-16"}


# ---- the cache -----------------------------------------------------------------------------------------------------


def test_an_interrupted_call_writes_no_report_and_names_the_runs_that_it_keeps(quick):
    assert quick.interrupted.returncode == 130
    assert re.search(r"\d+ of \d+ runs are kept in .*; run the same command to continue", quick.interrupted.stderr)
    assert len(quick.kept) >= 5


def test_the_next_call_resumes_an_interrupted_one(quick):
    now = {path.name: path.stat().st_mtime_ns for path in (quick.folder / "cache").glob("*.json")}
    assert quick.kept.items() <= now.items()
    assert len(now) == len(planning.plan(configuration.load(quick.file, quick=True)))


def test_a_second_call_changes_nothing_and_is_instant(quick, monkeypatch):
    monkeypatch.delenv("CARPOOL_DATA", raising=False)
    before = {path: path.stat().st_mtime_ns for path in quick.folder.rglob("*")}
    began = time.process_time()
    said = call("paper", "--quick", "--config", quick.file, "--out", quick.folder, "--json")
    assert time.process_time() - began < 5.0
    assert said.code == 0
    assert len(json.loads(said.out)) == len(rows(quick, "claims"))
    assert {path: path.stat().st_mtime_ns for path in quick.folder.rglob("*")} == before


def test_a_broken_file_in_the_cache_is_made_again(quick, results, tmp_path):
    config = results.config
    run = next(run for run in planning.plan(config) if run.policy == "sjf" and run.setting.jobs == 120)
    path = tmp_path / f"{key(config, run, workload_of(config, run))}.json"
    path.write_text('{"policy": "sjf"', "utf-8")
    outcome = execute(config, [run], tmp_path, workers=1)[run]
    assert outcome.summary.mean_jct_s == results.outcomes[run].summary.mean_jct_s
    assert json.loads(path.read_text("utf-8"))["seed"] == str(run.seed)


def test_the_file_of_a_result_is_named_after_everything_it_depends_on():
    config = configuration.load(quick=True)
    run = planning.plan(config)[0]
    workload = workload_of(config, run)
    names = {key(config, run, workload)}
    other_world = replace(run.setting, setup=replace(run.setting.setup, truth="1.6"))
    names.add(key(config, replace(run, setting=other_world), workload))
    names.add(key(config, replace(run, policy="fifo"), workload))
    names.add(key(config, run, workload.at_load(2.0)))
    assert len(names) == 4


# ---- the parts -----------------------------------------------------------------------------------------------------


def test_a_file_that_the_configuration_names_changes_the_name_of_a_result(tmp_path):
    """A matrix of slow-downs that was mended must not be answered with what the old one gave."""
    matrix = tmp_path / "xi.csv"
    config = configuration.load(quick=True)
    setup = replace(config.setup, truth=str(matrix))
    run = planning.PlannedRun(planning.RunSetting("calibrated", planning.GENERATED, 5, setup), "sjf-bsbf", 1)
    names = []
    for text in ("1.2", "1.9"):
        matrix.write_text(text, "utf-8")
        names.append(key(config, run, workload_of(config, run)))
    assert names[0] != names[1]


def test_a_cluster_may_be_written_with_a_multiplication_sign(tmp_path):
    file = tmp_path / "own.toml"
    file.write_text(SHIPPED.replace('cluster = "16x4"', 'cluster = "16×4"', 1), "utf-8")
    config = configuration.load(file)
    assert planning.overhead(config, 4).setup.cluster == "4x4"
    assert tables.gpus_of(planning.main(config, "calibrated", 240)) == 64


def test_figure_1_is_what_the_model_says():
    sequential, together, partly = (schedule.jcts_s for schedule in schedules(configuration.load()))
    assert sequential == pytest.approx({FIRST: 3600.0, SECOND: 5400.0})
    # the guest ends first: T_B = ξ·L_B, T_A = L_A + ξ·L_B·(1 − 1/ξ)
    assert together == pytest.approx({FIRST: 3600 + 1.3 * 1800 * (1 - 1 / 1.3), SECOND: 1.3 * 1800})
    assert partly == pytest.approx({FIRST: 1800 + 1.3 * 1800, SECOND: 1800 + 1.3 * 1800})


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_thirty_jobs_are_those_of_the_paper(seed):
    jobs = thirty_jobs(configuration.load(), seed).jobs
    assert len(jobs) == 30
    assert sum(job.gpus <= 8 for job in jobs) == 20
    assert sum(job.gpus in (12, 16) for job in jobs) == 10
    assert all(100 <= job.iterations <= 5000 for job in jobs)
    assert [job.submitted for job in jobs] == sorted(job.submitted for job in jobs)


def test_only_batches_of_models_with_batchnorm_cannot_be_split():
    config = configuration.load(quick=True)
    run = planning.PlannedRun(planning.batchnorm(config, 240, False), "sjf-bsbf", 1)
    may = {job.model: job.can_shrink for job in workload_of(config, run).jobs}
    assert {model for model, can in may.items() if not can} == {"cifar10", "imagenet", "deepspeech2", "yolov3"}


def test_keeping_batchnorm_batches_whole_changes_the_schedule(results):
    may, may_not = (planning.batchnorm(results.config, 480, can_shrink) for can_shrink in (True, False))
    assert results.mean(may, "sjf-bsbf", jct_h()) != results.mean(may_not, "sjf-bsbf", jct_h())


def test_a_measured_experiment_changes_only_the_verdict_on_fidelity(results):
    """Whatever it says beside the claims on the paper's own jobs, those are judged by their own runs."""
    measured = read_measured(results.config)
    without, with_it = claims(results, None), claims(results, measured)
    changed = [one.text for one, other in zip(without, with_it, strict=True) if one.verdict != other.verdict]
    assert len(changed) == 1
    assert "of the physical run" in changed[0]
    assert [one.ours for one in without if one.text not in changed] == [
        one.ours for one in with_it if one.text not in changed
    ]


def test_a_reduction_and_its_error_by_hand():
    found = ratio_lower([(1.0, 2.0), (3.0, 4.0)])
    assert found.value == pytest.approx(100 * (1 - 4 / 6))
    assert found.error == pytest.approx(100 * (0.75 - 0.5) / 2)  # half the distance of the two leave-one-out values
    assert ratio_lower([(1.0, 2.0)]) == Mean(50.0, None)


def test_means_are_over_the_seeds_that_were_run(results):
    setting = planning.main(results.config, "calibrated", 240)
    found = results.mean(setting, "sjf", jct_h())
    seeds = [outcome.summary.mean_jct_s / 3600 for outcome in results.of(setting, "sjf").values()]
    assert len(seeds) == 2
    assert found.value == pytest.approx(sum(seeds) / 2)
    assert found.error == pytest.approx(abs(seeds[0] - seeds[1]) / 2)
    assert results.mean(setting, "nobody", jct_h()) is None


def test_a_seed_without_matching_jobs_does_not_count(results):
    """Of thirty jobs none may be a BERT, and of few none large: that is no waiting time of zero."""
    setting = planning.main(results.config, "calibrated", 240)
    runs = {run: outcome for run, outcome in results.outcomes.items() if run.setting == setting}
    for run, outcome in runs.items():
        if run.seed == 2:
            models = {name: part for name, part in outcome.summary.models.items() if name != "bert"}
            none = replace(outcome.summary.large, jobs=0, mean_jct_s=0.0)
            runs[run] = replace(outcome, summary=replace(outcome.summary, models=models, large=none))
    found, first = Results(results.config, runs), results.of(setting, "sjf")[1].summary
    assert found.mean(setting, "sjf", model_queue_s("bert")) == Mean(first.models["bert"].mean_queue_s, None)
    assert found.mean(setting, "sjf", jct_h("large")) == Mean(first.large.mean_jct_s / 3600, None)
    assert found.lower(setting, "sjf-bsbf", "sjf", jct_h("large")).error is None
    assert found.mean(setting, "sjf", model_queue_s("nothing")) is None


# ---- the verdicts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "error", "printed", "verdict"),
    [
        (17.0, 2.0, 17.0, ClaimVerdict.REPRODUCED),
        (25.0, 2.0, 33.0, ClaimVerdict.REPRODUCED),  # within ten points
        (22.0, 2.0, 33.0, ClaimVerdict.PARTLY),
        (4.5, 1.0, 8.0, ClaimVerdict.REPRODUCED),  # within half of it
        (12.5, 1.0, 8.0, ClaimVerdict.PARTLY),  # ten points would be too kind to a small claim
        (4.5, 3.0, 8.0, ClaimVerdict.NOT),  # near, but within two errors of nothing
        (6.0, 2.0, 17.0, ClaimVerdict.PARTLY),  # less, but not as much
        (40.0, 2.0, 17.0, ClaimVerdict.PARTLY),  # more than claimed
        (3.0, 2.0, 17.0, ClaimVerdict.NOT),  # less, but it may be luck
        (-5.0, 2.0, 3.0, ClaimVerdict.NOT),  # near, but in the wrong direction
        (1.0, 2.0, 3.0, ClaimVerdict.NOT),  # near, but not beyond its error
    ],
)
def test_the_rule_for_lower(value, error, printed, verdict):
    assert less(Mean(value, error), printed, 10.0) is verdict
    assert less(None, printed, 10.0) is ClaimVerdict.UNTESTED


def test_the_rules_for_equal_for_every_and_for_several_readings():
    yes, partly, no, unknown = ClaimVerdict.REPRODUCED, ClaimVerdict.PARTLY, ClaimVerdict.NOT, ClaimVerdict.UNTESTED
    assert [equal(Mean(value, 1.0), 40.0, 10.0) for value in (31.0, 59.0, 61.0)] == [yes, partly, no]
    assert every([True, True]) is yes
    assert every([True, False]) is partly
    assert every([True, False, False]) is no
    assert every([True, None]) is unknown
    assert every([True, False, False], least=1) is partly
    assert combined([yes, yes]) is yes
    assert combined([yes, no]) is partly
    assert combined([no, no]) is no
    assert combined([yes, unknown]) is unknown


def test_numbers_are_formatted():
    assert lower(Mean(-12.3, 1.0)) == "12 ± 1 % higher"
    assert lower(Mean(0.01, 0.0), 1) == "0.0 ± 0.0 %"
    assert (signed(-0.2), signed(-3.0), signed(4.0)) == ("0 %", "−3 %", "+4 %")
    assert (signed(-0.04, 1), signed(-0.05001, 1), signed(4.96, 1)) == ("0.0 %", "−0.1 %", "+5.0 %")
    assert [ours(Mean(value, None), printed=1.0).kind for value in (1.08, 0.75, 1.4)] == ["close", "off", "far"]


# ---- the paper itself, and what our documents say of it ------------------------------------------------------------


def test_the_papers_numbers_contradict_each_other():
    """Why some of its numbers are left out or doubted; `docs/explanation/paper.md` cites this test."""
    printed = configuration.load().paper
    small = 2
    assert printed.queue["III"]["pollux"][small] > printed.jct["III"]["pollux"][small], "queues longer than it takes"
    assert "fifo" not in printed.queue["IV"], "printed as a copy of another row"
    against_pollux = [1 - printed.jct[t]["sjf-bsbf"][0] / printed.jct[t]["pollux"][0] for t in ("III", "IV")]
    assert not any(0.27 <= gain <= 0.33 for gain in against_pollux), "the abstract says 27–33 %"
    longest_h = max(makespan for makespan, _ in printed.physical.values()) / 3600
    assert printed.claims["within_hours"] > longest_h, "80 % of jobs within more than the whole run"
    run_h = [printed.jct["III"][name][0] - printed.queue["III"][name][0] for name in ("fifo", "sjf", "tiresias")]
    assert run_h == pytest.approx([0.69] * 3, abs=0.015), "the mean run without sharing"
    jobs = pollux_like(jobs=5000, seed=1).jobs
    assert fmean(job.duration_s for job in jobs) / 3600 < 0.6, "Pollux's own jobs are shorter"
    assert fmean(job.gpus > 4 for job in jobs) > 0.5, "and more than half of them large"


def test_every_test_that_the_document_names_exists():
    root = ROOT
    named = set(re.findall(r"`(test_\w+)`", (root / "docs" / "explanation" / "paper.md").read_text("utf-8")))
    there = {
        name for file in root.glob("tests/**/test_*.py") for name in re.findall(r"def (test_\w+)", file.read_text())
    }
    assert len(named) >= 15
    assert named <= there


# ---- wrong input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ('cluster = "16x4"', "cluster = 16", "world.cluster: 16 must be a text"),
        ('cluster = "16x4"', 'cluster = "16"', "cluster '16': write nodes x GPUs per node"),
        ("hours = 8", "hurs = 8", "world.hours: is missing"),
        ("hours = 8", "hours = 8\nminutes = 1", "world.minutes: no such field"),
        ('spec = "pollux"', 'spec = "polux"', "policies[4].spec: unknown policy 'polux': did you mean pollux?"),
        ('name = "pollux"', 'name = "other"', "none is named 'pollux'"),
        ('seeds = "1-16"', 'seeds = "many"', "seeds: 'many' must be seeds"),
        ("xi = [1.0,", "xi = [0.5,", "figure6b.xi: 0.5 must be at least 1"),
        ("large_gpus = [12, 16]", "large_gpus = [12, 32]", "physical.large_gpus: the cluster 4x4 has only 16 GPUs"),
        ('generator = "pollux-like"', 'generator = "polux-like"', "did you mean pollux-like?"),
        ("sjf = [1.25, 3.50, 0.94]", "sjf = [1.25, 3.50]", "paper.jct.III.sjf: has 2 numbers; give 3"),
        ("points = 10", "points = 200", "verdict.points: 200 must be a number from 0 to 100"),
        ("sjf = [1.25, 3.50, 0.94]", "sjf = [0, 3.50, 0.94]", "paper.jct.III.sjf: 0 must be a number above 0"),
        ("xi = [1.0,", "xi = [nan,", "figure6b.xi[0]: nan must be a number"),
        ('tables = ["gavel"', 'tables = ["gravel"', "figure6b.tables: interference 'gravel': neither a number"),
        ('gpu_memory = "11GB"', 'gpu_memory = "much"', "physical.gpu_memory: "),
        ("[world]", "[world", "is not TOML"),
    ],
)
def test_a_bad_configuration_is_an_error_of_one_line_that_names_its_place(tmp_path, before, after, problem):
    assert before in SHIPPED
    file = tmp_path / "own.toml"
    file.write_text(SHIPPED.replace(before, after, 1), "utf-8")
    said = call("paper", "--config", file, "--out", tmp_path / "out")
    assert said.code == 2
    assert problem in said.err
    assert len(said.err.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_missing_configuration_and_an_unwritable_folder_are_refused(tmp_path):
    said = process("paper", "--config", tmp_path / "nowhere.toml")
    assert said.code == 2
    assert "no such file" in said.err
    taken = tmp_path / "taken"
    taken.write_text("a file", "utf-8")
    said = process("paper", "--quick", "--out", taken)
    assert said.code == 2
    assert "cannot write there" in said.err
    assert len(said.err.strip().splitlines()) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    said = process("paper", "--quick", "--out", closed / "out")
    assert said.code == 2
    assert "cannot write there" in said.err


def test_figure_3_shows_small_and_large_batches_in_different_panels():
    where = "H200, MPS"
    known = [one for one in figures_model.beside_cifar10() if one.where == where]
    assert len({(one.batch, one.mate_batch) for one in known if one.task == "bert"}) == 4
    for (title, shown), size in zip(figures_model._columns(known), (min, max), strict=True):
        assert where in title
        assert [one.task for one in shown] == sorted({one.task for one in known})
        assert {one.mate_batch for one in shown} == {size(one.mate_batch for one in known)}
        assert all(one.batch == size(k.batch for k in known if k.task == one.task) for one in shown)
