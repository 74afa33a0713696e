"""The commands of the simulator as users and scripts call them: what they print and write."""

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from carpool import __version__, policies
from carpool.core import events as ev
from carpool.core.codec import decode, encode
from carpool.core.state import State
from carpool.errors import InputError, nearest
from carpool.policies.simple.sjf import Sjf
from carpool.sim import Setup, simulate
from carpool.sim import run as run_module
from tests.support.command_line import COMMAND, HEADER, call, csv_file, environment, everything_in, process

pytestmark = pytest.mark.slow

CONTRACT = {
    "policy", "jobs", "mean_jct_s", "p50_jct_s", "p95_jct_s", "p99_jct_s", "mean_queue_s", "makespan_s",
    "shares", "preemptions", "cpu_s", "decision_mean_cpu_s", "decision_p99_cpu_s", "large", "small",
}  # fmt: skip
PAPER = ("fifo", "sjf", "tiresias", "sjf-ffs", "sjf-bsbf")
OWN_POLICY = '''
from __future__ import annotations

from dataclasses import dataclass

from carpool.policies.base import BasePolicy, option
from carpool.policies.simple.fifo import start_in_order


@dataclass
class Longest(BasePolicy):
    """The longest job first."""

    name = "longest"
    skip: bool = option(True, "let shorter jobs pass")
    patience: int = option(3, "of no use")

    def key(self, job, now):
        return (-job.alone_left(now),)

    def decide(self, view):
        return start_in_order(view, self.skip, "longest")


class Rude(BasePolicy):
    """Two on a GPU, whatever the limit."""

    def key(self, job, now):
        return (job.job.submitted,)

    def decide(self, view):
        from carpool.core.model import Allocation, Decision

        return [Decision(job.job.id, Allocation((0,)), "shove") for job in view.queue.scan(1)]


class Needy(BasePolicy):
    def __init__(self, must):
        self.must = must


class NoPolicy:
    pass
'''


def steady(data: dict) -> dict:
    """Return the summary without the values that differ from run to run."""
    kept = {key: value for key, value in data.items() if key != "cpu_s" and not key.startswith("decision_")}
    return {**kept, "runs": [steady(run) for run in data["runs"]]} if "runs" in data else kept


@pytest.fixture
def own(tmp_path) -> Path:
    path = tmp_path / "my_policies.py"
    path.write_text(OWN_POLICY)
    return path


@pytest.fixture
def three(tmp_path) -> Path:
    """Three jobs for one GPU."""
    rows = ("a,0,generic,1,1,100,100", "b,1,generic,1,1,50,50", "c,2,generic,1,1,70,70")
    return csv_file(tmp_path, *rows, header=HEADER + ",duration_s")


# ---- simulate ------------------------------------------------------------------------------------------------------


def test_the_json_that_scripts_rely_on(tmp_path):
    path = csv_file(tmp_path, "a,0,bert,8,8,1000", "b,1,ncf,1,1024,1000", "c,2,cifar10,2,128,1000")
    options = "--cluster 16x4 --interference 1.5 --seed 3 --jobs-per-gpu 2 --ignore-placement --no-memory-limit --json"
    said = process("simulate", "--policy", "sjf-bsbf", "--workload", path, *options.split())
    assert (said.code, said.err) == (0, "")
    assert said.out.count("\n") == 1
    data = json.loads(said.out)
    assert set(data) >= CONTRACT
    assert (data["policy"], data["jobs"]) == ("sjf-bsbf", 3)
    for part in ("large", "small"):
        assert set(data[part]) >= {"jobs", "mean_jct_s", "mean_queue_s"}
    assert (data["large"]["jobs"], data["small"]["jobs"]) == (1, 2)
    for name in CONTRACT - {"policy", "large", "small"}:
        assert isinstance(data[name], int | float), name
    assert data["cpu_s"] > 0.05, "the whole command, imports included"


@pytest.fixture(scope="module")
def under_two_hash_seeds() -> list[dict[str, dict]]:
    """The runs of all policies by name, from two processes that order their sets differently."""
    names = [word for policy in PAPER for word in ("--policy", policy)]
    world = ("--jobs", 40, "--loads", 3, "--seeds", 1, "--duration-error", 0.3, "--workers", 1)
    found = [json.loads(process("compare", *names, *world, "--json", PYTHONHASHSEED=seed).out) for seed in ("1", "2")]
    return [{run["policy"]: run for run in comparison["runs"]} for comparison in found]


@pytest.mark.parametrize("policy", PAPER)
def test_the_same_options_give_the_same_result(policy, under_two_hash_seeds):
    first, second = (runs[policy] for runs in under_two_hash_seeds)
    assert steady(first) == steady(second)
    assert "cpu_s" in first
    arguments = ("simulate", "--policy", policy, "--jobs", 40, "--load", 3, "--duration-error", 0.3, "--json")
    same, other = (json.loads(call(*arguments, "--seed", seed).out) for seed in (1, 2))
    assert same["mean_jct_s"] == first["mean_jct_s"]
    assert steady(other) != steady(same)


def test_the_command_does_what_the_function_does(three):
    data = json.loads(call("simulate", "--policy", "sjf", "--workload", three, "--cluster", "1x1", "--json").out)
    # sjf: a to 100, b to 150, c to 220
    assert data["mean_jct_s"] == pytest.approx((100 + 149 + 218) / 3)
    assert data["mean_queue_s"] == pytest.approx((0 + 99 + 148) / 3)
    assert data["makespan_s"] == pytest.approx(220)


def test_options_change_the_simulated_world(three):
    def run(*more: object) -> dict:
        said = call("simulate", "--policy", "sjf-ffs", "--workload", three, "--cluster", "1x1", "--json", *more)
        assert said.code == 0, said.err
        return json.loads(said.out)

    assert run("--interference", 2)["makespan_s"] > run("--interference", 1.1)["makespan_s"]
    assert run("--jobs-per-gpu", 1)["shares"] == 0
    assert run("--jobs-per-gpu", 3)["shares"] == 2
    assert run("--load", 0.001)["mean_queue_s"] == 0
    assert run("--launch-s", 9)["mean_jct_s"] > run()["mean_jct_s"]
    assert run("--large-above", 0)["large"]["jobs"] == 3
    assert run("--cluster", "3x1")["shares"] == 0


def test_what_is_believed_does_not_change_what_is_true(three):
    """First fit shares whatever it believes, so its runs are the same; b's place is taken at the moment b ends."""
    same = ("simulate", "--policy", "sjf-ffs", "--workload", three, "--cluster", "1x1", "--json", "--truth", 2)
    knowing, fooled = (json.loads(call(*same, "--belief", belief).out) for belief in (2, 1.5))
    assert steady(fooled) == steady(knowing)


def test_gpu_memory_forbids_and_the_limit_can_be_lifted(tmp_path):
    path = csv_file(tmp_path, "a,0,cifar10,1,512,900", "b,1,cifar10,1,512,900")

    def shares(*more: object) -> int:
        said = call("simulate", "--policy", "sjf-ffs", "--cluster", "1x1", "--workload", path, "--json", *more)
        return json.loads(said.out)["shares"]

    assert shares("--gpu-memory", "80GiB") == 1
    assert shares("--no-memory-limit") == 1
    assert shares("--gpu-memory", "1.5GiB") == 0


def test_tables_are_printed_without_json(three):
    said = call("simulate", "--workload", three, "--cluster", "1x1", "--policy", "sjf-ffs")
    assert said.code == 0
    for part in ("sjf-ffs on", "mean JCT", "makespan", "large (> 4 GPUs)", "generic", "GPU utilisation", "1x1 GPUs"):
        assert part in said.out
    assert "slow-down of sharing 1.5" in said.out


def test_a_large_group_without_jobs_shows_no_times(three):
    line = next(line for line in call("simulate", "--workload", three).out.splitlines() if line.startswith("large"))
    assert line.split()[-6:] == ["-"] * 6


# ---- --out ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["sjf-bsbf", "tiresias:threshold_gpu_s=600", "fifo"])
def folder(request, tmp_path_factory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("out") / "run"
    arguments = ("--jobs", 80, "--load", 6, "--cluster", "4x4", "--launch-s", 3, "--stop-s", 2, "--out", out)
    said = call("simulate", "--policy", request.param, *arguments)
    assert said.code == 0, said.err
    assert f"written to {out}/" in said.out
    return out, request.param


def test_the_folder_of_a_run(folder):
    names = {"summary.json", "jobs.csv", "events.jsonl", "gantt.png", "jct_cdf.png", "queue_by_model.png"}
    assert everything_in(folder[0]) == names


def test_jobs_and_summary_agree(folder):
    summary = json.loads((folder[0] / "summary.json").read_text())
    with open(folder[0] / "jobs.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert summary["policy"] == folder[1]
    assert len(rows) == summary["jobs"] == 80

    def mean(name: str, some=rows) -> float:
        return sum(float(row[name]) for row in some) / len(some)

    assert mean("jct_s") == pytest.approx(summary["mean_jct_s"], abs=1e-2)
    assert mean("queue_s") == pytest.approx(summary["mean_queue_s"], abs=1e-2)
    large = [row for row in rows if int(row["gpus"]) > 4]
    assert len(large) == summary["large"]["jobs"]
    assert mean("jct_s", large) == pytest.approx(summary["large"]["mean_jct_s"], abs=1e-2)
    assert sum(int(row["joined"]) for row in rows) == summary["shares"]
    assert sum(int(row["preemptions"]) for row in rows) == summary["preemptions"]
    hosts = [row for row in rows if int(row["was_joined"])]
    assert len(hosts) == summary["hosts"]
    for row in rows:
        assert float(row["submitted_s"]) <= float(row["started_s"]) <= float(row["finished_s"])
        assert float(row["jct_s"]) == pytest.approx(float(row["finished_s"]) - float(row["submitted_s"]), abs=2e-3)
        if row["was_joined"] == row["joined"] == "0":
            assert float(row["slowdown"]) == pytest.approx(1.0, abs=1e-3)


def test_the_event_log_replayed_gives_the_same_story(folder):
    lines = (folder[0] / "events.jsonl").read_text().splitlines()
    events = [decode(json.loads(line)) for line in lines]
    assert [json.dumps(encode(event)) for event in events] == lines
    assert [event.at for event in events] == sorted(event.at for event in events)
    policy = policies.make(folder[1])
    _, truth = run_module._models(Setup(cluster="4x4"), 4, run_module.Workload(()))
    state = State(truth, policy.key)
    for event in events:
        state.apply(event)
    assert not state.jobs
    with open(folder[0] / "jobs.csv", newline="") as file:
        for row in csv.DictReader(file):
            record = state.ended[row["job"]]
            assert record.ended == pytest.approx(float(row["finished_s"]), abs=1e-3)
            assert record.first_start == pytest.approx(float(row["started_s"]), abs=1e-3)
            assert record.waited_s == pytest.approx(float(row["queue_s"]), abs=1e-3)
            assert record.preemptions == int(row["preemptions"])
    assert all(decision.why for event in events if isinstance(event, ev.Planned) for decision in event.decisions)


def test_json_and_a_folder_together(tmp_path, three):
    said = call("simulate", "--workload", three, "--json", "--out", tmp_path / "o")
    data = json.loads(said.out)
    assert steady(json.loads((tmp_path / "o" / "summary.json").read_text())) == steady(data)


# ---- compare -------------------------------------------------------------------------------------------------------


def test_a_comparison_as_json_and_as_folder(tmp_path):
    arguments = (
        "compare",
        "--jobs",
        20,
        "--seeds",
        "1-2",
        "--loads",
        "1,4",
        "--policy",
        "fifo",
        "--policy",
        "sjf-bsbf",
    )
    said = process(*arguments, "--json", "--out", tmp_path / "o", "--workers", 2)
    assert (said.code, said.err) == (0, "")
    assert said.out.count("\n") == 1
    data = json.loads(said.out)
    assert len(data["runs"]) == 8
    assert {run["case"] for run in data["runs"]} == {"20 jobs, load 1", "20 jobs, load 4"}
    assert all(set(run) >= CONTRACT for run in data["runs"])
    files = {"comparison.json", "runs.csv", "jct_cdf.png", "queue_by_model.png", "mean_jct.png"}
    assert everything_in(tmp_path / "o") == files
    alone = call(*arguments, "--json", "--workers", 1)
    assert steady(json.loads(alone.out)) == steady(data), "workers change nothing"


def test_a_comparison_runs_what_simulate_runs():
    more = ("--jobs", 25, "--duration-error", 0.5, "--json")
    compared = json.loads(call("compare", "--policy", "sjf", "--seeds", "1-3", "--workers", 1, *more).out)
    for run in compared["runs"]:
        single = json.loads(call("simulate", "--policy", "sjf", "--seed", run["seed"], *more).out)
        assert run["mean_jct_s"] == single["mean_jct_s"]


def test_a_comparison_of_the_papers_five_by_default():
    said = call("compare", "--jobs", 8, "--seeds", "1", "--workers", 1)
    assert said.code == 0, said.err
    assert all(re.search(rf"^{policy} ", said.out, re.MULTILINE) for policy in PAPER)
    assert "(1 seed)" in said.out
    assert "standard error" not in said.out, "there is none of one seed"


def test_several_workloads_of_a_file_are_averaged(tmp_path):
    rows = [f"{n},{seed},j{j},{j},ncf,1,64,{100 * seed}" for n in (2, 3) for seed in (1, 2) for j in range(n)]
    path = csv_file(tmp_path, *rows, header="n,seed,name,time,app,gpus,batch,iters")
    said = call(
        "compare", "--workload", path, "--select", "n=2-3,seed=1-2", "--policy", "sjf", "--workers", 1, "--json"
    )
    data = json.loads(said.out)
    assert [(m["case"], m["seeds"]) for m in data["means"]] == [("n 2, load 1", 2), ("n 3, load 1", 2)]
    assert [run["seed"] for run in data["runs"]] == ["1", "2", "1", "2"]
    assert "ncf" in data["runs"][0]["models"]


def test_a_policy_named_twice_runs_once():
    data = json.loads(call("compare", "--jobs", 5, "--seeds", 1, "--policy", "sjf", "--policy", "sjf", "--json").out)
    assert len(data["runs"]) == 1


# ---- workload ------------------------------------------------------------------------------------------------------


def test_generate_show_convert_and_simulate_belong_together(tmp_path):
    path = tmp_path / "w.csv"
    assert call("workload", "generate", "--jobs", 30, "--seed", 4, "--out", path).code == 0
    assert path.read_text() == call("workload", "generate", "--jobs", 30, "--seed", 4).out
    assert call("workload", "convert", path).out == path.read_text()
    facts = json.loads(call("workload", "show", path, "--json").out)
    assert facts["jobs"] == sum(facts["gangs"].values()) == sum(part["jobs"] for part in facts["models"].values()) == 30
    read, made = (
        json.loads(call("simulate", *options, "--json").out)
        for options in (("--workload", path), ("--jobs", 30, "--seed", 4))
    )
    assert steady({**read, "workload": ""}) == steady({**made, "workload": ""})


def test_show_computes_the_load(tmp_path):
    path = csv_file(tmp_path, "a,0,generic,2,1,9,300", "b,100,generic,1,1,9,400", header=HEADER + ",duration_s")
    facts = json.loads(call("workload", "show", path, "--gpus", 4, "--json").out)
    assert facts["gpu_s"] == 1000
    assert facts["load"] == pytest.approx(1000 / (100 * 4))
    assert (facts["span_s"], facts["mean_run_s"], facts["p50_run_s"]) == (100, 350, 350)
    said = call("workload", "show", path)
    assert "generic" in said.out
    assert "GPU-hours" in said.out


def test_show_of_one_job_has_no_load(tmp_path):
    path = csv_file(tmp_path, "a,0,ncf,1,64,100")
    assert json.loads(call("workload", "show", path, "--json").out)["load"] is None
    assert call("workload", "show", path).code == 0


def test_show_takes_run_times_from_the_profile_it_is_given(tmp_path):
    profile = json.loads((Path(run_module.__file__).parents[1] / "profile/library/t4.json").read_text())
    profile["tasks"] = {"mine": profile["tasks"]["ncf"]}
    for part in ("pairs", "points", "groups"):
        profile.pop(part, None)
    (tmp_path / "mine.json").write_text(json.dumps(profile))
    path = csv_file(tmp_path, "a,0,mine,1,64,100")
    assert call("workload", "show", path, "--profile", tmp_path / "mine.json").code == 0
    said = call("workload", "show", path)
    assert said.code == 2
    assert "model: 'mine' is not in profile t4" in said.err


# ---- policies ------------------------------------------------------------------------------------------------------


def test_the_policies_and_their_options():
    listed = json.loads(call("policies", "--json").out)
    assert list(listed)[:5] == list(PAPER)
    assert listed["fifo"]["options"]["skip"]["default"] is False
    assert listed["sjf"]["options"]["skip"]["default"] is True
    assert listed["tiresias"]["options"]["threshold_gpu_s"]["default"] == 3600
    assert listed["tiresias"]["options"]["restart_s"]["default"] == 30
    shown = call("policies").out
    for name, facts in listed.items():
        assert name in shown
        assert facts["summary"].split()[0] in shown
        assert all(option in shown for option in facts["options"])


def test_options_of_policies():
    made = policies.make("tiresias: threshold_gpu_s=12.5 , restart_s=7")
    assert (made.threshold_gpu_s, made.restart_s) == (12.5, 7.0)
    for text, value in (("true", True), ("No", False), ("1", True), ("0", False)):
        assert policies.make(f"fifo:skip={text}").skip is value
    assert policies.make("sjf").skip is True
    assert policies.make("sjf:").skip is True


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("sfj", "unknown policy 'sfj': did you mean sjf?"),
        ("sjf-bsfb", "did you mean sjf-bsbf?"),
        ("SJF", "did you mean sjf?"),
        ("", "unknown policy ''"),
        ("sjf:skpi=true", "unknown option 'skpi' of policy sjf: did you mean skip?"),
        ("sjf-ffs:x=1", "unknown option 'x' of policy sjf-ffs: it has none"),
        ("sjf:skip", "write it as key=value"),
        ("sjf:skip=maybe", "'maybe' must be true or false"),
        ("sjf:skip=true,skip=false", "is given twice"),
        ("tiresias:restart_s=-1", "must be a number from 0"),
        ("tiresias:restart_s=nan", "must be a number from 0"),
        ("tiresias:restart_s=inf", "must be a number from 0"),
        ("tiresias:restart_s=1e300", "must be a number from 0"),
        ("tiresias:restart_s=soon", "must be a number from 0"),
        ("nowhere.py:P", "policy file nowhere.py does not exist"),
    ],
)
def test_wrong_policies_are_refused(text, part):
    with pytest.raises(InputError) as caught:
        policies.make(text)
    assert part in str(caught.value)


def test_a_policy_from_a_file(own, three):
    said = call("simulate", "--policy", f"{own}:Longest", "--workload", three, "--cluster", "1x1", "--json")
    assert said.code == 0, said.err
    data = json.loads(said.out)
    assert data["policy"] == f"{own}:Longest"
    # a to 100, then c to 170, then b to 220
    assert data["mean_jct_s"] == pytest.approx((100 + 168 + 219) / 3)
    assert policies.make(f"{own}:Longest:skip=false,patience=7").patience == 7


def test_a_policy_from_a_file_in_a_comparison(own, three):
    names = ("--policy", f"{own}:Longest", "--policy", "sjf", "--policy", "fifo")
    said = process("compare", *names, "--workload", three, "--cluster", "1x1", "--workers", 2, "--json")
    assert said.code == 0, said.err
    assert json.loads(said.out)["runs"][0]["mean_jct_s"] == pytest.approx((100 + 168 + 219) / 3)


@pytest.mark.parametrize(
    ("rest", "part"),
    [
        ("", "name the class too"),
        (":Longset", "did you mean Longest?"),
        (":Nothing", "known: Longest, Needy, NoPolicy, Rude"),
        (":NoPolicy", "has no method key(); derive it from"),
        (":Needy", "cannot be made: Needy.__init__() missing 1 required positional argument: 'must'"),
        (":Longest:patience=1.5", "'1.5' must be a whole number from 0"),
        (":Longest:impatience=1", "did you mean patience?"),
    ],
)
def test_a_file_without_the_policy_is_refused(own, rest, part):
    with pytest.raises(InputError) as caught:
        policies.make(f"{own}{rest}")
    assert part in str(caught.value)


@pytest.mark.parametrize("code", ["raise RuntimeError('two\\nlines')", "def broken(:", "import no_such_module_at_all"])
def test_a_policy_file_that_does_not_load_is_refused(tmp_path, code):
    path = tmp_path / "bad.py"
    path.write_text(code)
    said = call("simulate", "--policy", f"{path}:P")
    assert said.code == 2
    assert said.err.startswith(f"error: policy file {path} does not load: ")
    assert said.err.count("\n") == 1


def test_an_illegal_plan_is_reported_in_one_line(own, three):
    said = call("simulate", "--policy", f"{own}:Rude", "--workload", three, "--cluster", "1x1", "--jobs-per-gpu", 1)
    assert said.code == 2
    assert said.err.startswith(f"error: policy {own}:Rude: GPU 0: 2 jobs on one GPU")
    assert said.err.count("\n") == 1


class FakePoint:
    """An entry point of an installed package."""

    def __init__(self, name: str, what: object) -> None:
        self.name, self.value, self._what = name, f"pkg:{name}", what

    def load(self) -> object:
        if isinstance(self._what, Exception):
            raise self._what
        return self._what


class Shorter(Sjf):
    """A policy of another package."""

    name = "shorter"
    size: str = "s"


@pytest.fixture
def packages(monkeypatch):
    points = [
        FakePoint("shorter", Shorter),
        FakePoint("broken", ImportError("no module")),
        FakePoint("number", 3),
        FakePoint("sjf", Shorter),
    ]
    monkeypatch.setattr(policies.registry, "entry_points", lambda group: points if group == "carpool.policies" else [])


@pytest.mark.usefixtures("packages")
def test_policies_of_installed_packages():
    assert type(policies.make("shorter")) is Shorter
    assert policies.make("shorter:skip=no").skip is False
    assert type(policies.make("sjf")) is Sjf, "the names of built-in policies are taken"
    with pytest.raises(InputError, match="did you mean shorter"):
        policies.make("shortr")
    with pytest.raises(InputError, match=r"policy broken .* does not load: ImportError: no module; fix"):
        policies.make("broken")
    with pytest.raises(InputError, match="is not a class"):
        policies.make("number")
    said = call("policies")
    assert said.code == 0, "one broken package must not hide the other policies"
    assert "A policy of another package." in said.out
    assert "does not load" in said.out
    listed = json.loads(call("policies", "--json").out)
    assert "does not load" in listed["broken"]["error"]
    assert listed["shorter"]["summary"] == "A policy of another package."


# ---- the command itself --------------------------------------------------------------------------------------------


def test_help_and_version():
    assert call("--version").out == f"carpool, version {__version__}\n"
    top = call("--help")
    for group in ((), ("user",), ("group",), ("nodes",), ("service",), ("journal",), ("profiles",), ("workload",)):
        listed = call(*group, "--help").out.partition("\n")[2]
        assert "..." not in listed, f"carpool {' '.join(group)}: a summary does not fit on its line"
    for name in ("simulate", "compare", "workload", "policies", "profiles", "fit"):
        assert f"\n  {name} " in top.out
        said = call(name, "--help")
        assert said.code == 0
        assert "Usage:" in said.out
        assert call(name, "-h").out == said.out
    assert max(len(line) for line in call("simulate", "--help").out.splitlines()) <= 80


def test_the_package_is_the_command_too():
    said = subprocess.run([sys.executable, "-m", "carpool", "--version"], capture_output=True, text=True, check=True)
    assert said.stdout == f"carpool, version {__version__}\n"


def test_every_option_has_a_help_text():
    import click

    from carpool.cli import cli

    def walk(command: click.Command, path: str):
        if isinstance(command, click.Group):
            for name in command.list_commands(click.Context(command)):
                yield from walk(command.get_command(click.Context(command), name), f"{path} {name}")
        for option in command.params:
            if isinstance(option, click.Option):
                yield path, option.name, option.help

    assert [(path, name) for path, name, text in walk(cli, "carpool") if not text] == []


def test_a_misspelt_command_is_corrected():
    said = call("simulat")
    assert said.code == 2
    assert "did you mean simulate?" in said.err


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("brt", "did you mean bert?"),
        ("BERT", "did you mean bert?"),
        ("zzz", "known: bert, ncf"),
        ("", "known: bert, ncf"),
    ],
)
def test_the_nearest_name_is_suggested(word, hint):
    assert nearest(word, ["ncf", "bert"]) == hint


def test_no_name_is_suggested_where_there_are_none():
    assert nearest("x", []) == "known: none"


@pytest.mark.parametrize(
    "arguments", [("workload", "generate", "--jobs", "20000"), ("policies",), ("simulate", "--json")]
)
def test_a_closed_pipe_is_no_error(arguments):
    writer = subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment())
    assert writer.stdout is not None
    writer.stdout.close()
    _, err = writer.communicate(timeout=60)
    assert b"Traceback" not in err
    assert b"Exception ignored" not in err
    assert writer.returncode in (1, 141)


def test_a_terminal_without_greek_letters_shows_question_marks():
    said = process("policies", PYTHONIOENCODING="ascii")
    assert said.code == 0, said.err
    assert "1/? + 1/?" in said.out


def test_heavy_modules_are_not_imported_at_the_start():
    code = "import sys, carpool.cli; carpool.cli.cli.get_command(None, 'simulate'); print(' '.join(sys.modules))"
    out = subprocess.run([COMMAND[0], "-c", code], capture_output=True, text=True, env=environment(), check=True).stdout
    assert not {"numpy", "scipy", "matplotlib", "torch", "rich"} & set(out.split())


def test_the_function_for_scripts():
    """As the documentation shows it."""
    from carpool.profile.schema import load
    from carpool.sim import philly_like

    result = simulate(philly_like(load("t4").core_tasks(), jobs=10), "sjf-bsbf", Setup(cluster="2x8"))
    assert result.summary.jobs == len(result.jobs) == 10


@pytest.mark.skipif("CARPOOL_DATA" not in os.environ, reason="CARPOOL_DATA is not set")
def test_the_whole_philly_trace():
    path = f"{os.environ['CARPOOL_DATA']}/philly/philly.csv"
    data = json.loads(process("simulate", "--policy", "sjf", "--workload", path, "--cluster", "64x8", "--json").out)
    assert data["jobs"] == 82_247
    assert data["mean_jct_s"] == pytest.approx(25284.267, rel=1e-6)
    assert data["cpu_s"] < 15
