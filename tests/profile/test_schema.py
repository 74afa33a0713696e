"""The profile file: what is saved loads again, what is wrong is refused by name, what is shipped is sound."""

import json
from dataclasses import replace
from importlib import resources
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.model import Job
from carpool.core.perf import AllReduce, FittedModel, Placement, UnknownPair
from carpool.errors import InputError
from carpool.profile.matrix import cells
from carpool.profile.measure.raw import Measurement, MeasurementRequest, Sample, Setting
from carpool.profile.schema import ProfileError, dumps, load, loads, save, shipped
from carpool.profile.values import Demand, FitError, Gpu, Group, GroupJob, Memory, Pair, Point, Profile, TaskProfile

SIX = ["bert", "cifar10", "deepspeech2", "imagenet", "ncf", "yolov3"]
TASK = TaskProfile(0.1, 0.01, AllReduce(0.2, 0.03), AllReduce(0.4, 0.05), 1.5)


def full() -> Profile:
    return Profile(
        name="mine",
        description="a “test”",
        gpu=Gpu("X", 2**34, "580", 8),
        mechanisms={"mps": "daemon of its own"},
        noise="2 %",
        notes=("odd", "odder"),
        tasks={
            "a": replace(
                TASK,
                memory=Memory(10, 2.5, "typed", 1, 2),
                batch_norm=False,
                error=FitError(0.05, 0.2, 10, 1, "crashed", 0.01, 0.02, 0.03),
                source="x.csv",
                demands=(Demand("mps", 8, 0.5), Demand("mps", 64, 0.75)),
            ),
            "b": TASK,
        },
        pairs=(
            Pair("a", 8, "b", 4, "mps", 1.5, 0.98, (1.4, 1.6), (0.9, 1.0), 2, "s"),
            Pair("a", 0, "a", 0, "unknown", 1, 2),
        ),
        groups=(Group((GroupJob("a", 1), GroupJob("a", 1), GroupJob("b", 2)), "mps", (1.0, 2.0, 3.0), "s"),),
        points=(Point("a", 8, 0.2), Point("a", 8, 0.3, 2, 4, 2, 123, "s")),
        raw=(alone(0), alone(1)),
    )


def alone(series: int) -> Measurement:
    setting = Setting("a", 8, 2)
    return Measurement(
        MeasurementRequest("mps", (setting,)), (Sample(setting, 0.25, 0.01, 40, 10**9, 10**8),), 1.5, series
    )


def test_a_full_profile_survives_the_file(tmp_path):
    save(full(), tmp_path / "p.json")
    assert load(tmp_path / "p.json") == full()
    assert load(str(tmp_path / "p.json")) == full()
    assert json.loads((tmp_path / "p.json").read_text())["schema"] == 2


def test_a_measurement_without_a_series_is_of_the_first():
    first, second = json.loads(dumps(full()))["raw"]
    assert "series" not in first, "as in files that know of no series"
    assert second["series"] == 1
    raw = loads(change(["raw", 1, "series"], ...), "p.json").raw
    assert [done.series for done in raw] == [0, 0]


times = st.floats(0, 1e6, allow_subnormal=False)


@pytest.mark.slow
@given(st.dictionaries(st.text(min_size=1), st.tuples(times, st.floats(1e-9, 10), times, times), min_size=1), st.text())
def test_any_tasks_survive_the_file(constants, description):
    tasks = {k: TaskProfile(a, b, AllReduce(c, d), AllReduce(d, c), 1 + b) for k, (a, b, c, d) in constants.items()}
    profile = Profile("p", description, tasks=tasks)
    assert loads(dumps(profile), "p.json") == profile


def change(path: list, value) -> str:
    data = json.loads(dumps(full()))
    spot = data
    for key in path[:-1]:
        spot = spot[key]
    if value is ...:
        del spot[path[-1]]
    else:
        spot[path[-1]] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["schema"], 3, "p.json: schema: 3 is newer than this Carpool reads (2); upgrade"),
        (["schema"], ..., "p.json: schema: is missing; give a whole number"),
        (["schema"], "1", "p.json: schema: '1' must be a whole number"),
        (["name"], 3, "p.json: name: 3 must be a text"),
        (["colour"], "red", "p.json: colour: no such field; known: description"),
        (["gpu", "memory_bytes"], 0, "p.json: gpu.memory_bytes: 0 must be a whole number from 1"),
        (["gpu", "memory_bytes"], 1.5, "p.json: gpu.memory_bytes: 1.5 must be a whole number"),
        (["notes"], ["x", 1], "p.json: notes[1]: 1 must be a text"),
        (["tasks", "a"], [], "p.json: tasks.a: [] must be an object"),
        (["tasks", "a", "alpha_s"], -1, "p.json: tasks.a.alpha_s: -1 must be a number from 0"),
        (["tasks", "a", "beta_s"], ..., "p.json: tasks.a.beta_s: is missing; give a number"),
        (["tasks", "a", "beta_s"], True, "p.json: tasks.a.beta_s: true must be a number"),
        (["tasks", "a", "beta_s"], float("nan"), "p.json: tasks.a.beta_s: nan must be a number"),
        (["tasks", "a", "delta"], 0.9, "p.json: tasks.a.delta: 0.9 must be a number from 1"),
        (["tasks", "a", "delta"], float("inf"), "p.json: tasks.a.delta: inf must be a number"),
        (["tasks", "a", "intra", "base_s"], None, "p.json: tasks.a.intra.base_s: null must be a number"),
        (["tasks", "a", "inter", "extra"], 1, "p.json: tasks.a.inter.extra: no such field"),
        (["tasks", "a", "memory", "source"], ..., "p.json: tasks.a.memory.source: is missing; give a text"),
        (
            ["tasks", "a", "memory", "static_bytes"],
            -5,
            "p.json: tasks.a.memory.static_bytes: -5 must be a whole",
        ),
        (["tasks", "a", "error", "why_left_out"], ..., "p.json: tasks.a.error.why_left_out: missing"),
        (["tasks", "a", "batch_norm"], 1, "p.json: tasks.a.batch_norm: 1 must be true or false"),
        (["pairs", 0, "mechanism"], "magic", "p.json: pairs[0].mechanism: unknown 'magic'; give mps, time-slicing"),
        (["pairs", 1, "xi_a"], 0, "p.json: pairs[1].xi_a: 0 is not a slow-down"),
        (["pairs", 1, "xi_b"], ..., "p.json: pairs[1].xi_b: is missing"),
        (["pairs", 0, "interval_a"], [2, 1], "p.json: pairs[0].interval_a: not an interval"),
        (["groups", 0, "xi"], [1, 2], "p.json: groups[0].xi: 2 values for 3 jobs"),
        (["groups", 0, "jobs"], [], "p.json: groups[0].jobs: 0 jobs; a group has three or more"),
        (["points", 1, "batch"], 0, "p.json: points[1].batch: 0 must be a whole number from 1"),
        (["raw", 1, "series"], -1, "p.json: raw[1].series: -1 must be a whole number from 0"),
        (["raw", 1, "series"], "b", "p.json: raw[1].series: 'b' must be a whole number"),
    ],
)
def test_a_wrong_field_is_named_with_a_remedy(path, value, message):
    with pytest.raises(ProfileError) as caught:
        loads(change(path, value), "p.json")
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_text_that_is_no_profile_is_refused():
    with pytest.raises(ProfileError, match=r"p.json: line 2: not JSON"):
        loads("{\n", "p.json")
    with pytest.raises(ProfileError, match="must be an object"):
        loads("[]", "p.json")
    with pytest.raises(ProfileError, match="name: given twice"):
        loads('{"schema": 1, "name": "a", "name": "b"}', "p.json")
    with pytest.raises(ProfileError, match="has no tasks, pairs"):
        loads('{"schema": 1, "name": "a", "description": ""}', "p.json")
    still = TaskProfile(0, 0, AllReduce(0, 0), AllReduce(0, 0), 1)
    with pytest.raises(ProfileError, match=r"tasks.a.alpha_s: zero"):
        loads(dumps(Profile("p", "", tasks={"a": still})), "p.json")


def test_a_missing_profile_names_the_nearest(tmp_path):
    with pytest.raises(ProfileError, match=r"gavell: no such profile \(did you mean gavel\?\)"):
        load("gavell")
    with pytest.raises(ProfileError, match="cannot read it"):
        load(tmp_path)
    (tmp_path / "b.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ProfileError, match="not a text file"):
        load(tmp_path / "b.json")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    target = tmp_path / "p.json"
    target.write_text("old")

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.replace", refuse)
    with pytest.raises(InputError, match=r"p.json: cannot write there: Permission denied"):
        save(full(), target)
    assert target.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["p.json"]
    with pytest.raises(InputError, match="cannot write there"):
        save(full(), tmp_path / "no" / "p.json")


def test_a_profile_becomes_the_core_model():
    profile = full()
    core = profile.core_tasks()["a"]
    assert (core.memory_static, core.memory_per_sample) == (10, 2.5)
    assert core.iteration(8, 1, Placement(1, 1)) == pytest.approx(0.18)
    mps = profile.interference("mps")
    assert mps.pair("a", 8, "b", 4) == 1.5
    assert mps.pair("b", 4, "a", 8) == 1.0, "a ξ below 1 is noise"
    with pytest.raises(UnknownPair):
        mps.pair("a", 8, "a", 8)
    assert profile.interference("unknown").pair("a", 1, "a", 1) == 1.5, "both halves of a job beside its like count"


def test_the_mechanism_must_be_clear():
    with pytest.raises(ProfileError, match="several mechanisms; choose mine:mps or mine:unknown"):
        full().interference(None)
    with pytest.raises(ProfileError, match="no pairs for 'time-slicing'; it has mps, unknown"):
        full().interference("time-slicing")
    with pytest.raises(ProfileError, match="has no pairs"):
        replace(full(), pairs=()).interference(None)


def test_the_nearest_batch_counts():
    pairs = (Pair("a", 8, "b", 8, "mps", 1.1, 1.2), Pair("a", 64, "b", 64, "mps", 2.1, 2.2))
    found = Profile("p", "", pairs=pairs).interference(None)
    assert found.pair("a", 10, "b", 8) == 1.1
    assert found.pair("b", 50, "a", 64) == 2.2


def test_shipped_files_are_small_sound_and_speak_of_no_machine():
    assert shipped() == ["gavel", "h200", "t4"]
    for name in shipped():
        text = (resources.files("carpool.profile") / "library" / f"{name}.json").read_text(encoding="utf-8")
        assert len(text.encode()) < 250_000
        assert load(name).name == name
        assert dumps(load(name)) == text, "only `carpool fit` writes shipped files"
        assert "/work" not in text
        assert "/tmp" not in text


def test_t4_holds_six_tasks_within_seven_percent():
    profile = load("t4")
    assert sorted(profile.tasks) == SIX
    assert profile.gpu.gpus_per_node == 4
    for name, task in profile.tasks.items():
        assert task.error.median <= 0.07, name
        assert task.error.left_out == 0
        assert task.batch_norm == (name not in ("bert", "ncf"))
        assert task.memory.static_bytes > task.memory.context_bytes + task.memory.gradient_bytes
        assert task.memory.static_bytes + task.memory.bytes_per_sample < profile.gpu.memory_bytes


def test_h200_holds_every_pair_of_six_tasks_at_two_batches_under_both_mechanisms():
    profile = load("h200")
    assert profile.pair_mechanisms() == ["mps", "time-slicing"]
    assert len(profile.groups) == 20
    for mechanism in profile.pair_mechanisms():
        table, known = profile.interference(mechanism), cells(profile, mechanism)
        kinds = {kind for both in known for kind in both}
        assert len(kinds) == 12
        assert known.keys() == set(product(kinds, kinds))
        for a in SIX:
            for b in SIX:
                assert table.pair(a, 1, b, 1) >= 1
    mps, turns = profile.interference("mps"), profile.interference("time-slicing")
    assert mps.pair("imagenet", 100, "imagenet", 100) < 1.4 < 1.5 < turns.pair("imagenet", 100, "imagenet", 100)


def test_gavel_holds_every_pair_and_runs_in_the_core():
    model = FittedModel(load("t4").core_tasks(), load("gavel").interference(None), node_gpus=4)
    jobs = [Job(name, 0.0, name, 1, 8, 10) for name in SIX]
    slow = {(a.id, b.id): model.slowdown(a, 1, [(b, 1)]) for a in jobs for b in jobs}
    assert slow["ncf", "imagenet"] == pytest.approx(6.0432)
    assert slow["imagenet", "ncf"] == pytest.approx(1.9802)
    assert min(slow.values()) >= 1
