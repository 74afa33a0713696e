"""Files that release 0.1 wrote still load and mean what they meant: logs, snapshots, profiles, workloads, job files.

`data/v0.1/README.md` says how each file was made. `test_home_of_v0_1.py` does the same for a service's home.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from carpool import channel, policies
from carpool.core import codec, snapshot
from carpool.core import events as ev
from carpool.core.model import Allocation, Decision, Job, Limits, Node, Status
from carpool.core.perf import Placement
from carpool.core.state import State
from carpool.live.commands import job_file
from carpool.live.spec import Spec, from_json, parse
from carpool.profile.measure.raw import Setting
from carpool.profile.measure.raw import read as read_raw
from carpool.profile.schema import load
from carpool.sim import Costs, Setup, read, simulate
from carpool.sim.run import _models as models
from carpool.sim.run import cluster_nodes
from carpool.sim.study import RunCache

DATA = Path(__file__).parent / "data" / "v0.1"
ONE_GPU = Placement(1, 1)


def lines(name: str) -> list[dict]:
    return [json.loads(line) for line in (DATA / name).read_text().splitlines()]


# ---- events ---------------------------------------------------------------------------------------------------------

JOB = Job(
    id="7",
    submitted=10.0,
    model="bert",
    gpus=1,
    batch=24,
    iterations=1000,
    user="eve",
    duration_s=77.0,
    can_shrink=False,
    exclusive=True,
    max_slowdown=1.5,
    priority=2,
    after=("3",),
    retries=1,
    min_accumulation=2,
    elastic=True,
    can_checkpoint=False,
)
EVERY_EVENT = (
    ev.NodeJoined(0.0, Node("node0", (0, 1, 2, 3), 16 << 30)),
    ev.Submitted(10.0, JOB),
    ev.Planned(11.0, (Decision("7", Allocation((0, 2), 4, 6), "joins"), Decision("8", None, "suspended"))),
    ev.Started(12.0, "7", 1),
    ev.Started(12.0, "7", 2, 30.0),
    ev.Progressed(13.0, "7", 1, 4.0),
    ev.Observed(14.0, "7", 1, 5.0, 0.25),
    ev.Retuned(15.0, "7", 1, accumulation=8),
    ev.Retuned(15.5, "7", 1, accumulation=16, batch=12, unasked=True),
    ev.Checkpointed(16.0, "7", 1, 6.0),
    ev.Stopped(17.0, "7", 1, 6.5),
    ev.Requeued(18.0, "7", 1),
    ev.Finished(19.0, "7", 1),
    ev.Failed(20.0, "7", 1, "worker 0 ended with exit code 3", True),
    ev.Cancelled(21.0, "7"),
    ev.Held(22.0, "7"),
    ev.Released(23.0, "7"),
    ev.ConstraintsChanged(24.0, "7", can_shrink=True, min_accumulation=4, exclusive=True),
    ev.ConstraintsChanged(24.5, "7"),
    ev.PriorityChanged(25.0, "7", -3),
    ev.PriorityChanged(25.5, "7"),
    ev.LimitsChanged(26.0, "eve", Limits(3, None)),
    ev.MemoryTaken(27.0, 2, 1 << 30),
    ev.NodeLost(28.0, "node0"),
)


def test_an_event_of_each_kind_is_read_with_all_its_fields():
    assert tuple(codec.decode(line) for line in lines("logs/every-event.jsonl")) == EVERY_EVENT


def test_the_log_of_a_simulation_replays_to_its_results():
    setup = Setup(cluster="4x4", truth="1.2")
    workload = read(DATA / "workloads/generated.csv")
    state = State(models(setup, 4, workload)[0], policies.make("carpool:suspend=true").key)
    for line in lines("logs/simulation.jsonl"):
        state.apply(codec.decode(line))
    told = json.loads((DATA / "logs/simulation-summary.json").read_text())
    ended = state.ended.values()
    assert len(ended) == told["jobs"] == 24
    assert sum(record.ended - record.job.submitted for record in ended) / 24 == pytest.approx(told["mean_jct_s"])
    assert (state.shares, state.preemptions) == (told["shares"], told["preemptions"]) == (11, 1)


# ---- snapshots ------------------------------------------------------------------------------------------------------


def restored(name: str, policy: str, setup: Setup) -> tuple[State, State]:
    """The state of a snapshot, and the one that its events lead to."""
    nodes, workload = cluster_nodes(setup), read(DATA / "workloads/generated.csv")
    key = policies.make(policy).key

    def perf():
        return models(setup, len(nodes[0].gpus), workload)[0]

    replayed = State(perf(), key)
    replayed.guesses.trusted = True  # as in that release, whose snapshots know of no guesses
    for line in lines(f"snapshots/{name}-events.jsonl"):
        replayed.apply(codec.decode(line))
    replayed.guesses.trusted = False
    data = json.loads((DATA / f"snapshots/{name}.json").read_text())
    return snapshot.restore(data, perf(), key), replayed


LEARNED = Setup(cluster="2x4", truth="gavel", belief="learned:probe=1.2", report_error=0.05, gpu_memory=10 << 30)
ELASTIC = Setup(cluster="2x4", memory_limit=False)


@pytest.mark.parametrize(("name", "policy", "setup"), [("learned", "sjf-ffs", LEARNED), ("elastic", "pollux", ELASTIC)])
def test_a_snapshot_is_the_state_that_its_events_lead_to(name, policy, setup):
    state, replayed = restored(name, policy, setup)
    assert json.loads(json.dumps(snapshot.encode(state))) == json.loads(json.dumps(snapshot.encode(replayed)))


def test_a_snapshot_keeps_shared_gpus_accumulation_limits_and_belief():
    state, _ = restored("learned", "sjf-ffs", LEARNED)
    jobs = state.jobs
    assert {name: jobs[name].accumulation for name in ("ncf-22", "ncf-23", "ncf-24")} == {
        "ncf-22": 32,
        "ncf-23": 1,
        "ncf-24": 32,
    }
    assert [record.job.id for record in state.jobs_on(0)] == ["yolov3-1", "ncf-22"]
    assert [record.job.id for record in state.jobs_on(5)] == ["cifar10-2", "cifar10-6"]
    assert state.limits == {"user1": Limits(20, 40), "user2": Limits(21, None), "": Limits(22, None)}
    assert jobs["yolov3-1"].gpus_since == 13.0
    assert jobs["yolov3-1"].job.duration_s == 15013.500055167238
    assert (jobs["cifar10-2"].seq, jobs["cifar10-2"].pace_version) == (1, 8)
    assert (state.now, state.needs_decision, state.belief_version) == (609.9775969969651, True, 21)
    assert state.perf.version == 21
    assert len(state.perf.episodes) == 14


def test_a_snapshot_keeps_priorities_holds_and_dependencies():
    state, _ = restored("learned", "sjf-ffs", LEARNED)
    jobs = state.jobs
    assert jobs["cifar10-9"].shape.priority == 7
    assert next(iter(state.queue)) is jobs["cifar10-9"]
    assert jobs["imagenet-14"].status is Status.HELD
    assert jobs["imagenet-14"].on_hold
    assert jobs["waits"].status is Status.BLOCKED
    assert jobs["waits"].waits_for == ("cifar10-9",)
    assert len(list(state.queue)) == 9


def test_a_snapshot_keeps_what_was_chosen_for_elastic_jobs():
    state, _ = restored("elastic", "pollux", ELASTIC)
    jobs = state.jobs
    assert (jobs["ncf-10"].status, jobs["ncf-10"].accumulation, jobs["ncf-10"].batch) == (Status.STARTING, 2, 32768)
    assert (jobs["yolov3-1"].gpus, jobs["yolov3-1"].batch, jobs["yolov3-1"].attempt) == ((0, 2), 8, 2)
    assert jobs["yolov3-1"].pace_valid_until == 589.7253708082492


# ---- workloads ------------------------------------------------------------------------------------------------------


def test_a_workload_with_every_column():
    def job(name, at, model="bert", **more):
        return Job(name, at, model, **{"gpus": 1, "batch": 24, "iterations": 1000, **more})

    assert read(DATA / "workloads/own.csv").jobs == (
        job("plain", 0.0),
        job("timed", 1.5, "generic", batch=1, iterations=60, duration_s=60.25, user="alice"),
        job("whole", 2.0, "yolov3", gpus=2, batch=8, can_shrink=False, exclusive=True, priority=3, user="bob"),
        job("picky", 3.0, "imagenet", gpus=4, batch=64, max_slowdown=1.25, priority=-2, retries=2, elastic=True),
        job("last", 4.0, "ncf", batch=32768, after=("plain", "timed"), can_checkpoint=False, duration_s=12.0),
    )
    assert read(DATA / "workloads/own-least.csv").jobs == (job("a", 0.0), job("b", 5.0, gpus=2))


def test_workloads_in_the_columns_of_pollux_and_philly():
    assert read(DATA / "workloads/pollux.csv", {"n": "2", "seed": "1"}).jobs == (
        Job("ds2", 110.0, "deepspeech2", 6, 54, 2264, duration_s=3396.0, elastic=True),
        Job("ncf", 200.0, "ncf", 1, 32768, 1548, duration_s=46.44, elastic=True),
    )
    assert read(DATA / "workloads/philly.csv").jobs == (
        Job("philly-2", 0.0, "generic", 1, 1, 66, duration_s=66.0, group="a"),
        Job("philly-3", 120.0, "generic", 4, 1, 2952, duration_s=2951.5, group="b"),
    )


def test_a_generated_workload_gives_the_same_simulation():
    told = json.loads((DATA / "logs/simulation-summary.json").read_text())
    log = []
    setup = Setup(cluster="4x4", truth="1.2", costs=Costs(launch_s=3.0, stop_s=5.0))
    result = simulate(read(DATA / "workloads/generated.csv"), "carpool:suspend=true,pause=false", setup, log=log.append)
    then = without_reasons(codec.decode(line) for line in lines("logs/simulation.jsonl"))
    # 0.1 let a job finish that was suspended in the instant in which a mate ended, with most of its work not done.
    wrong = then.index(ev.Finished(810.389084966737, "cifar10-2", 1))
    assert without_reasons(log)[:wrong] == then[:wrong]
    assert len(then[:wrong]) > 50
    assert result.summary.mean_jct_s > told["mean_jct_s"]


def without_reasons(log):
    """The events without the texts that explain decisions: those may be reworded."""
    return [
        replace(event, decisions=tuple(replace(decision, why="") for decision in event.decisions))
        if isinstance(event, ev.Planned)
        else event
        for event in log
    ]


# ---- profiles -------------------------------------------------------------------------------------------------------


def test_a_profile_of_schema_2():
    path = DATA / "profiles/schema-2.json"
    profile = load(path)
    bert = profile.core_tasks()["bert"]
    assert set(profile.tasks) == {"bert", "ncf"}
    assert bert.iteration(12, 1, ONE_GPU) == pytest.approx(0.0301090453)
    assert bert.memory(12) == 4667576203
    pair = next(pair for pair in profile.pairs if pair.a != pair.b)
    assert (len(profile.pairs), pair.mechanism, pair.xi_a, pair.xi_b) == (20, "mps", 0.972, 0.997)
    assert [job.task for job in profile.groups[0].jobs] == ["cifar10", "deepspeech2", "yolov3"]
    assert profile.kappa["mps"].kappa == 0.364
    assert {setting.accumulation for done in profile.raw for setting in done.request.settings} == {1, 2, 4}
    setup = Setup(cluster="1x2", profile=str(path), truth=f"{path}:mps")
    assert simulate(read(DATA / "workloads/own-least.csv"), "sjf-bsbf", setup).summary.jobs == 2


def test_a_profile_of_schema_1():
    profile = load(DATA / "profiles/schema-1.json")
    bert = profile.core_tasks()["bert"]
    assert profile.gpu.name == "NVIDIA H200"
    assert (len(profile.tasks), len(profile.pairs), len(profile.groups)) == (6, 84, 12)
    assert bert.iteration(12, 1, ONE_GPU) == pytest.approx(0.037171708)
    assert bert.memory(12) == 4454506892


def test_a_measured_profile_and_its_raw_file():
    profile = load(DATA / "profiles/measured.json")
    assert set(profile.tasks) == {"ncf", "cifar10"}
    assert len(profile.pairs) == 4
    assert profile.core_tasks()["ncf"].iteration(8, 2, ONE_GPU) == pytest.approx(0.04045934)
    raw = read_raw(DATA / "profiles/measured.raw.jsonl")
    assert raw.machine.gpu == "CPU"
    assert set(raw.origins) == {"ncf", "cifar10"}
    assert len(raw.measurements) == len(profile.raw) == 10
    assert Setting("ncf", 8, 2) in {setting for done in raw.measurements for setting in done.request.settings}


# ---- what users write -----------------------------------------------------------------------------------------------

FULL = Spec(
    command=("python", "train.py", "--lr", "0.1", "--tag", "two words"),
    directory=str(DATA / "job_files/code"),
    gpus=2,
    batch=64,
    iterations=20000,
    model="imagenet",
    name="resnet",
    env={"SEED": "3", "MODE": "fast"},
    duration_s=5400.0,
    priority=4,
    exclusive=True,
    max_slowdown=1.5,
    after=("3", "5"),
    retries=2,
    can_shrink=True,
    cpus=2,
    memory=4 << 30,
    grace_s=45.0,
)


@pytest.mark.parametrize("name", ["full.yaml", "full.toml"])
def test_a_job_file_with_every_field(name):
    fields = job_file.read(DATA / "job_files" / name)
    assert fields.pop("array") == "0-3"
    assert parse(fields) == FULL


def test_a_job_file_with_plain_numbers():
    fields = job_file.read(DATA / "job_files/short.yml")
    assert fields.pop("array") == "2"
    spec = parse(fields)
    assert (spec.command, spec.duration_s, spec.grace_s, spec.after) == (("sleep", "5"), 7200.0, 10.0, ("4",))


def test_specs_as_the_journal_keeps_them():
    full = from_json((DATA / "spec.json").read_text())
    assert full == replace(FULL, directory="/srv/work/code", array_index=3, snapshot=True)
    assert from_json((DATA / "spec-least.json").read_text()) == Spec(("sleep", "5"), "/srv/work")


# ---- the rest -------------------------------------------------------------------------------------------------------


def test_the_channel_of_a_running_worker():
    worker = DATA / "home/jobs/11/attempt-1/rank-0"
    control, report = channel.read_control(worker), channel.read_report(worker)
    assert (control.sequence, control.accumulation, control.stop, control.can_shrink) == (2, 2, False, True)
    assert (report.attempt, report.iteration, report.seconds, report.accumulation) == (1, 1184, 0.02, 2)
    assert (report.checkpoint, report.control, report.out_of_memory) == (1175, 2, 1)
    assert (report.shrinking, report.status) == (channel.Shrinking.CERTIFIED, channel.WorkerStatus.RUNNING)
    assert (report.peak_memory, report.reserved_memory, report.note) == (3 << 30, 4 << 30, "batch norm: none")


def test_the_cache_of_a_study_opens():
    """Its runs are made again, because they depend on the code; the file is neither refused nor rewritten."""
    path = DATA / "study-cache.jsonl"
    before = path.read_bytes()
    assert RunCache(path).find("d5866a64836d18e38dfa1825")["mean_jct_s"] == 11080.893227107792
    assert path.read_bytes() == before
