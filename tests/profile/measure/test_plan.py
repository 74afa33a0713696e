"""What is measured, how long, and how it is written down: plans, windows and the raw file."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.errors import InputError
from carpool.profile.measure.plan import MeasurementPhase, Scope, TaskSource, plan
from carpool.profile.measure.raw import Origin, RawFile, Setting, read
from carpool.profile.measure.timing import UNSURE, Timing, Windows, timing
from tests.support.measurements import MACHINE, measured

# ---- plans ----------------------------------------------------------------------------------------------------------


def sources(**batches):
    return [TaskSource(name, ("run",), "--batch", sizes) for name, sizes in batches.items()]


def test_alone_comes_first_then_pairs_then_the_rest():
    first = plan(sources(a=(8, 64), b=(4, 32)), Scope(groups=1, repeats=1))[0]
    sizes = [len(request.settings) for request in first.requests]
    assert sizes == [1, 1, 2, 2, 2, 1, 1, 1, 1, 3, 4, 1, 1, 2]
    assert [request.run for request in first.requests][-3:] == [1, 1, 1]
    assert first.copies() == {Setting("a", 8): 2, Setting("b", 4): 2}


def test_every_mechanism_and_batch_has_its_phase_and_only_mps_has_groups():
    phases = plan(sources(a=(8, 64), b=(4, 32), c=(1, 2)), Scope(groups=2, alone=(Setting("a", 16),)))
    mechanisms = ["mps", "time-slicing"]
    assert [phase.mechanism for phase in phases] == [*mechanisms, *mechanisms, "mps", *mechanisms]
    assert {setting.batch for setting in phases[2].copies()} == {64, 32, 2}
    groups = [[len(w.settings) for w in phase.requests if len(w.settings) > 2] for phase in phases]
    assert groups == [[3, 4, 4], [], [3, 4, 4], [], [], [], []], "three tasks make one group of three"
    assert phases[4].copies() == {Setting("a", 16): 1}


def test_mates_are_not_measured_beside_each_other():
    one, *mates = sources(mine=(8,), bert=(12,), ncf=(16,))
    phase = plan([one, *(replace(mate, mate_only=True) for mate in mates)], Scope(("mps",), ()))[0]
    pairs = {tuple(s.task for s in request.settings) for request in phase.requests if len(request.settings) == 2}
    assert pairs == {("mine", "mine"), ("mine", "bert"), ("mine", "ncf")}


def pairs_of(phases):
    return [
        request.settings
        for phase in phases
        for request in phase.requests
        if len(request.settings) == 2 and not request.run
    ]


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_every_two_jobs_meet_once_at_all_their_batches(numbers):
    """A task with fewer batches stays at its last, and is still not measured twice."""
    many = sources(**{f"t{i}": tuple(2**n for n in range(number)) for i, number in enumerate(numbers)})
    every = [Setting(one.task, batch) for one in many for batch in one.batches]
    met = [frozenset(pair) for pair in pairs_of(plan(many, Scope(("mps",), groups=2)))]
    assert len(met) == len(set(met))
    assert set(met) == {frozenset((a, b)) for a in every for b in every}


def test_pairs_of_different_batches_come_last_with_every_job_alone_before_and_after():
    scope = Scope(("mps",), repeats=1, alone=(Setting("a", 16),))
    *_, last = plan(sources(a=(8, 64), b=(4, 32)), scope)
    sizes = [len(request.settings) for request in last.requests]
    assert sizes == [1] * 4 + [2] * 4 + [1] * 4 + [2]
    assert [request.run for request in last.requests] == [2] * 4 + [0] * 4 + [3] * 4 + [1]
    assert not pairs_of(plan(sources(a=(8, 64), b=(4, 32)), replace(scope, across=False)))[6:]
    assert not any(len({*pair}) > 1 for pair in pairs_of(plan(sources(a=(8, 64)), replace(scope, across=False))))
    one, mate = sources(mine=(8, 64), bert=(12, 48))
    *_, last = plan([one, replace(mate, mate_only=True)], scope)
    assert {(a.task, b.task) for a, b in pairs_of([last])} == {("mine", "mine"), ("mine", "bert"), ("bert", "mine")}


@pytest.mark.parametrize("batches", [{"a": (8, 64), "b": (4,)}, {"a": (8, 16), "b": (4, 4)}])
def test_nothing_is_in_the_plan_twice(batches):
    """What is left is counted over all phases."""
    phases = plan(sources(**batches), Scope(groups=2, alone=(Setting("a", 16), Setting("a", 8), Setting("a", 16))))
    requests = [request for phase in phases for request in phase.requests]
    assert len(requests) == len(set(requests))


def test_the_plan_is_the_same_every_time():
    many = sources(a=(8,), b=(4,), c=(2,), d=(1,), e=(3,))
    assert plan(many, Scope(groups=3)) == plan(many, Scope(groups=3))
    assert isinstance(plan(many, Scope())[0], MeasurementPhase)


# ---- windows --------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0.001, 1.0), min_size=2, max_size=200), st.integers(0, 5), st.data())
def test_the_mean_is_exact_however_seldom_one_looks(steps, start, data):
    times = [0.0]
    for step in steps:
        times.append(times[-1] + step)
    stamps = [(start + i, t) for i, t in enumerate(times)]
    middle = data.draw(st.lists(st.sampled_from(stamps[1:-1] or [stamps[0]]), unique=True))
    seen = sorted({stamps[0], *middle, stamps[-1]})
    found = timing(seen)
    assert found.iter_s == pytest.approx(times[-1] / len(steps))
    assert found.iterations == len(steps)


def test_the_error_covers_the_truth_nineteen_times_of_twenty():
    drawn, inside = random.Random(3), 0
    for _ in range(400):
        times = [0.0]
        for _ in range(60):
            times.append(times[-1] + drawn.lognormvariate(0, 0.3))
        found = timing(list(enumerate(times)))
        inside += abs(found.iter_s / math.exp(0.045) - 1) <= found.error
    assert 0.90 <= inside / 400 <= 0.98


def test_a_window_ends_when_every_job_is_known_well_enough():
    windows = Windows(least_s=1.0, most_s=3.0, precision=0.02, patience_s=60.0)
    sure, unsure, few = Timing(0.1, 0.01, 30, 1.0), Timing(0.1, 0.05, 30, 1.0), Timing(0.1, 0.01, 2, 1.0)
    assert windows.over(1.0, [sure, sure])
    assert not windows.over(0.9, [sure])
    assert not windows.over(2.9, [sure, unsure])
    assert windows.over(3.0, [sure, unsure])
    assert not windows.over(59.0, [sure, few])
    assert not windows.over(59.0, [sure, None])
    assert windows.over(60.0, [None])


def test_too_few_iterations_say_nothing_of_the_error():
    assert timing([(0, 0.0)]) is None
    assert timing([(0, 0.0), (1, 1.0)]).error == UNSURE


# ---- the raw file ---------------------------------------------------------------------------------------------------


def test_what_was_added_is_read_back_and_a_cut_off_line_is_left_out(tmp_path):
    raw = RawFile(tmp_path / "r.jsonl", MACHINE)
    alone, pair = measured("mps", ("a", 8, 2, 0.1)), measured("mps", ("a", 8, 1, 0.2), ("b", 4, 1, 0.3))
    raw.add(alone)
    raw.add(pair)
    with raw.path.open("a") as file:
        file.write('{"mechanism": "mp')
    contents = read(raw.path)
    found = contents.measurements
    assert contents.machine == MACHINE
    assert found[0] == alone
    assert found[1].request == pair.request
    assert [sample.iter_s for sample in found[1].samples] == [0.2, 0.3]
    again = RawFile(raw.path, MACHINE)
    assert again.has(pair.request)
    assert again.has(replace(pair.request, settings=pair.request.settings[::-1])), "tasks may be named in another order"
    assert not again.has(replace(pair.request, run=1))
    assert not again.has(replace(pair.request, mechanism="time-slicing"))


def test_a_file_of_another_gpu_or_of_nonsense_is_refused(tmp_path):
    RawFile(tmp_path / "r.jsonl", MACHINE)
    with pytest.raises(InputError, match="measured on NVIDIA Test, and this is Other; give another --state"):
        RawFile(tmp_path / "r.jsonl", replace(MACHINE, gpu="Other"))
    RawFile(tmp_path / "u.jsonl", replace(MACHINE, uuid="GPU-1"))
    with pytest.raises(InputError, match=r"another NVIDIA Test \(GPU-1\), .+ this one \(GPU-2\) .+ profiles merge"):
        RawFile(tmp_path / "u.jsonl", replace(MACHINE, uuid="GPU-2"))
    assert RawFile(tmp_path / "u.jsonl", replace(MACHINE, uuid="GPU-1")).machine.uuid == "GPU-1"
    assert RawFile(tmp_path / "r.jsonl", replace(MACHINE, uuid="GPU-1")).machine == MACHINE, (
        "an older file says nothing"
    )
    (tmp_path / "n.jsonl").write_text('{"version": 9}\n')
    with pytest.raises(InputError, match="newer than this Carpool reads"):
        read(tmp_path / "n.jsonl")
    (tmp_path / "n.jsonl").write_text("nonsense\n")
    with pytest.raises(InputError, match="line 1: not a measurement"):
        read(tmp_path / "n.jsonl")


@pytest.mark.parametrize("torn", ['{"mechanism": "mp', '{"task": "a", "command": ["pyth', "{"])
def test_a_torn_line_is_gone_before_the_next_is_written(tmp_path, torn):
    raw = RawFile(tmp_path / "r.jsonl", MACHINE)
    raw.add(measured("mps", ("a", 8, 1, 0.1)))
    with raw.path.open("a") as file:
        file.write(torn)
    RawFile(raw.path, MACHINE).add(measured("mps", ("a", 16, 1, 0.2)))
    assert [done.samples[0].setting.batch for done in RawFile(raw.path, MACHINE).measurements] == [8, 16]


def test_a_torn_first_line_is_written_again_and_a_foreign_file_is_left_alone(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text('{"version": 1, "gp')
    RawFile(path, MACHINE)
    assert read(path).machine == MACHINE
    path.write_text("my diary")
    with pytest.raises(InputError, match="line 1: not a measurement"):
        RawFile(path, MACHINE)
    assert path.read_text() == "my diary"


def test_an_unknown_mechanism_is_refused_by_file_and_line(tmp_path):
    raw = RawFile(tmp_path / "r.jsonl", MACHINE)
    raw.add(measured("mps", ("a", 8, 1, 0.1)))
    raw.path.write_text(raw.path.read_text().replace('"mps"', '"mpx"'))
    with pytest.raises(InputError, match=r"r\.jsonl: line 2\.mechanism: unknown 'mpx'; give mps, time-slicing"):
        read(raw.path)


def origin(folder, text="train()", *arguments, python="python"):
    folder.mkdir(exist_ok=True)
    script = folder / "train.py"
    script.write_text(text)
    return Origin.of((python, str(script), *arguments))


def test_a_task_is_the_same_script_with_the_same_arguments_wherever_it_lies(tmp_path):
    mine = origin(tmp_path / "a", "train()", "--lr", "1")
    assert mine.same(origin(tmp_path / "b", "train()", "--lr", "1", python="/usr/bin/python"))
    assert not mine.same(origin(tmp_path / "b", "train(2)", "--lr", "1"))
    assert not mine.same(origin(tmp_path / "b", "train()", "--lr", "2"))
    module = Origin.of(("python", "-m", "train"))
    assert module.sha256 is None
    assert module.same(module)
    assert not module.same(Origin.of(("python", "-m", "other")))


def test_measurements_of_another_script_are_refused_and_old_files_are_read(tmp_path):
    one, other = origin(tmp_path / "a"), origin(tmp_path / "b", "train(2)")
    old = RawFile(tmp_path / "old.jsonl", MACHINE)
    old.add(measured("mps", ("train", 8, 1, 0.1)))
    taken_up = RawFile(old.path, MACHINE, {"train": one})
    assert taken_up.unsure == ["train"]
    taken_up.add(measured("mps", ("train", 8, 1, 0.1), ("bert", 4, 1, 0.1)))
    taken_up.add(measured("mps", ("train", 16, 1, 0.1)))
    assert read(old.path).origins == {"train": one}
    assert RawFile(old.path, MACHINE, {"train": one, "bert": other}).unsure == ["bert"]
    with pytest.raises(InputError, match=r"old\.jsonl: train was measured there as .*a/train\.py.* --name or --state"):
        RawFile(old.path, MACHINE, {"train": other})
    changed = origin(tmp_path / "a", "train(3)")
    with pytest.raises(InputError, match=r"train was measured there as .*train\.py, which has changed since"):
        RawFile(old.path, MACHINE, {"train": changed})


def test_a_script_without_measurements_may_be_changed(tmp_path):
    path = tmp_path / "r.jsonl"
    RawFile(path, MACHINE, {"train": origin(tmp_path / "a")}).add(measured("mps", ("bert", 8, 1, 0.1)))
    RawFile(path, MACHINE, {"train": origin(tmp_path / "a", "train(2)")})
