"""Fits: known constants come back from tables that eq. 7 itself generates.

`test_efficiency` fits the shipped profile again from the real table.
"""

import csv
import json
import math
import os
import random
from pathlib import Path
from statistics import median, quantiles

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.core.perf import AllReduce, Placement, Task
from carpool.profile.fit import fit_memory, fit_task
from carpool.profile.rows import GIB, Run, read_runs
from carpool.profile.schema import ProfileError, load
from tests.support import ROOT
from tests.support.effort import cases

DATA = os.environ.get("CARPOOL_DATA")
with_data = pytest.mark.skipif(not DATA, reason="CARPOOL_DATA is not set: the measurements are not part of the project")

PLACEMENTS = [(1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (4, 2), (8, 2), (8, 4), (12, 4), (16, 4), (32, 8), (64, 16)]
TRUE = Task(0.05, 0.004, AllReduce(0.06, 0.02), AllReduce(0.3, 0.006), 2.2)


def table(task: Task, noise: float = 0.0, accumulations: tuple[int, ...] = (1,)) -> list[Run]:
    rng = random.Random(7)
    return [
        Run("x", batch, s, n, k, task.iteration(batch, s, Placement(n, k)) * (1 + rng.uniform(-noise, noise)))
        for batch in (8, 16, 32, 64, 128, 200)
        for s in accumulations
        for n, k in PLACEMENTS
    ]


def constants(task) -> list[float]:
    return [
        *(task.alpha_s, task.beta_s, task.intra.base_s, task.intra.per_gpu_s),
        *(task.inter.base_s, task.inter.per_gpu_s, task.delta),
    ]


def test_known_constants_come_back_exactly():
    fitted = fit_task(table(TRUE))
    assert constants(fitted) == pytest.approx(constants(TRUE), rel=1e-3)
    assert fitted.error.median < 1e-4
    assert fitted.error.points == 72


def test_known_constants_come_back_from_rows_with_accumulation():
    assert constants(fit_task(table(TRUE, accumulations=(1, 2, 4)))) == pytest.approx(constants(TRUE), rel=1e-3)


def test_noise_of_five_percent_moves_the_prediction_little():
    fitted = fit_task(table(TRUE, noise=0.05)).core()
    for n, k in PLACEMENTS:
        for batch in (8, 64, 200):
            truth = TRUE.iteration(batch, 1, Placement(n, k))
            assert fitted.iteration(batch, 1, Placement(n, k)) == pytest.approx(truth, rel=0.04)


def test_a_few_wild_rows_do_not_pull_the_fit():
    runs = table(TRUE)
    wild = [Run(r.task, r.batch, r.accumulation, r.gpus, r.nodes, r.seconds * 5) for r in runs[::15]]
    spoiled = [w if i % 15 == 0 else r for i, r in enumerate(runs) for w in [wild[i // 15]]]
    fitted = fit_task(spoiled)
    assert fitted.error.median < 0.03
    assert fitted.error.points == len(runs), "no row is left out"


@pytest.mark.slow
@settings(max_examples=cases(12), deadline=None)
@given(
    alpha=st.floats(0.005, 0.3),
    beta=st.floats(1e-4, 0.05),
    intra=st.floats(0.01, 0.3),
    inter=st.floats(0.1, 1.5),
    growth=st.floats(0.001, 0.05),
    delta=st.floats(1.0, 4.0),
)
def test_any_eq7_table_is_fitted_closely_with_legal_constants(alpha, beta, intra, inter, growth, delta):
    fitted = fit_task(table(Task(alpha, beta, AllReduce(intra, growth), AllReduce(inter, growth / 3), delta)))
    assert fitted.error.p90 < 0.01
    assert min(constants(fitted)) >= 0
    assert fitted.delta >= 1


def test_delta_stays_at_one_where_the_rows_ask_for_less():
    slower = Task(0.05, 0.004, AllReduce(0.06, 0.02), AllReduce(0.3, 0.006), 0.6)
    assert fit_task(table(slower)).delta == 1.0


def test_the_fit_is_deterministic():
    assert fit_task(table(TRUE, noise=0.1)) == fit_task(table(TRUE, noise=0.1))


def test_the_recorded_errors_are_those_of_the_shipped_constants():
    runs = table(TRUE, noise=0.3)
    fitted = fit_task(runs)
    off = [
        abs(fitted.core().iteration(r.batch, r.accumulation, Placement(r.gpus, r.nodes)) / r.seconds - 1) for r in runs
    ]
    assert fitted.error.median == pytest.approx(median(off), rel=1e-3)
    assert fitted.error.p90 == pytest.approx(quantiles(off, n=10, method="inclusive")[8], rel=1e-3)
    alone = [error for error, run in zip(off, runs, strict=True) if run.gpus == 1]
    assert fitted.error.median_one_gpu == pytest.approx(median(alone), rel=1e-3)


def test_what_no_row_tells_stays_at_zero():
    alone = fit_task([run for run in table(TRUE) if run.gpus == 1])
    assert (alone.intra, alone.inter, alone.delta) == (AllReduce(0, 0), AllReduce(0, 0), 1)
    assert alone.error.median_one_node is None
    pairs_only = fit_task([run for run in table(TRUE) if run.gpus in (1, 2) and run.nodes == 1])
    assert pairs_only.intra.per_gpu_s == 0
    assert pairs_only.inter == AllReduce(0, 0)


def test_one_gpu_rows_count_although_they_are_few():
    """A table where the rows of several nodes contradict eq. 7: the one-GPU rows must still be met."""
    runs = table(TRUE) + [
        Run("x", b, 1, 8, 4, TRUE.iteration(b, 1, Placement(8, 4)) * (1.3 if b > 32 else 0.8))
        for b in (8, 16, 32, 64, 128, 200)
        for _ in range(100)
    ]
    assert fit_task(runs).error.median_one_gpu < 0.05


def test_one_batch_size_is_refused():
    with pytest.raises(ProfileError, match="task x: rows of one batch size only"):
        fit_task([Run("x", 8, 1, n, 1, 0.1) for n in (1, 2)])


# ---- large batches on one GPU ---------------------------------------------------------------------------------------


def one_gpu(alpha: float, beta: float, knee: float, largest: int, noise: float = 0.0, seed: int = 7) -> list[Run]:
    """Rows of a bent curve (of eq. 3 with a knee of 1), from a 128th of the largest batch on."""
    rng, alone = random.Random(seed), Placement(1, 1)
    task = Task(alpha, beta, AllReduce(0, 0), AllReduce(0, 0), 1.0, knee=knee)
    settings = [(largest // part, s) for part in (128, 32, 8, 4, 2, 1) for s in (1, 2)]
    return [Run("x", b, s, 1, 1, task.iteration(b, s, alone) * (1 + rng.uniform(-noise, noise))) for b, s in settings]


def cost(task: Task, runs: list[Run]) -> float:
    """What the fit minimises, written out once more: squared log errors below 5 %, linear above."""
    logs = (math.log(task.iteration(run.batch, run.accumulation, Placement(1, 1)) / run.seconds) for run in runs)
    return sum(0.05**2 * (math.sqrt(1 + (log / 0.05) ** 2) - 1) for log in logs)


@pytest.mark.parametrize("largest", [2**12, 2**18, 2**21])
@pytest.mark.parametrize("knee", [1.0, 2.0, 4.0])
def test_a_known_curve_comes_back_however_large_its_batches(largest, knee):
    fitted = fit_task(one_gpu(0.003, 0.006 / largest, knee, largest), bend=True)
    assert [fitted.alpha_s, fitted.beta_s, fitted.knee or 1.0] == pytest.approx(
        [0.003, 0.006 / largest, knee], rel=0.01
    )
    assert fitted.error.p90 < 1e-3


@pytest.mark.slow
@settings(max_examples=cases(40), deadline=None)
@given(
    alpha=st.floats(0.001, 0.1),
    slope=st.floats(0.1, 10.0),
    knee=st.sampled_from([1.0, 1.5, 4.0]),
    largest=st.sampled_from([2**7, 2**14, 2**18, 2**21]),
    seed=st.integers(0, 99),
)
def test_a_bend_never_costs_more_than_the_straight_line_nor_than_the_truth(alpha, slope, knee, largest, seed):
    """Both are cases of it. Rounded to six digits, hence the margin."""
    runs = one_gpu(alpha, slope * alpha / largest, knee, largest, 0.05, seed)
    bent, straight = (cost(fit_task(runs, bend=bend).core(), runs) for bend in (True, False))
    assert bent <= straight * (1 + 1e-6)
    truth = Task(alpha, slope * alpha / largest, AllReduce(0, 0), AllReduce(0, 0), 1.0, knee=knee)
    assert bent <= cost(truth, runs) * (1 + 2e-3)
    if knee == 1:
        assert straight <= cost(truth, runs) * (1 + 2e-3)


def write_csv(folder: Path, *rows: str) -> Path:
    path = folder / "t.csv"
    path.write_text("\n".join(["app,placement,nodes,gpus,local_bsz,step_time,sync_time", *rows]) + "\n")
    return path


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("a,1,1,1,8,nan,0", "t.csv: line 3: step_time: 'nan' is not finite"),
        ("a,1,1,1,8,-1,0", "t.csv: line 3: step_time: '-1' is not above 0"),
        ("a,1,1,1,8,fast,0", "t.csv: line 3: step_time: 'fast' is not a number"),
        ("a,1,1,0,8,1,0", "t.csv: line 3: gpus: '0' is not a whole number"),
        ("a,1,1,1,2.5,1,0", "t.csv: line 3: local_bsz: '2.5' is not a whole number"),
        ("a,1,2,1,8,1,0", "t.csv: line 3: nodes: 2 nodes for 1 GPUs"),
        ("a,1,1,1,8,1", "t.csv: line 3: 6 fields, the header has 7"),
        (",1,1,1,8,1,0", "t.csv: line 3: app: empty"),
    ],
)
def test_a_bad_row_is_named(tmp_path, row, message):
    with pytest.raises(ProfileError) as caught:
        read_runs(write_csv(tmp_path, "a,1,1,1,4,0.5,0", row))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_byte_order_mark_is_no_part_of_the_first_column(tmp_path):
    path = write_csv(tmp_path, "a,1,1,1,4,0.5,0", "a,1,1,1,8,0.9,0")
    path.write_text("\ufeff" + path.read_text())
    assert {run.task for run in read_runs(path)} == {"a"}


def test_a_table_without_rows_or_columns_is_refused(tmp_path):
    with pytest.raises(ProfileError, match="no rows below the header"):
        read_runs(write_csv(tmp_path))
    (tmp_path / "t.csv").write_text("app,gpus\n")
    with pytest.raises(ProfileError, match="line 1: no column nodes"):
        read_runs(tmp_path / "t.csv")
    (tmp_path / "t.csv").write_text("\n")
    with pytest.raises(ProfileError, match="empty"):
        read_runs(tmp_path / "t.csv")


def measured(folder: Path, rows: list[tuple[int, int, float]]) -> Path:
    path = folder / "m.json"
    solo = [{"model": "x", "batch": b, "accum": s, "iter_s": 0.1, "mem_gib": gib} for b, s, gib in rows]
    path.write_text(json.dumps({"solo": solo}))
    return path


def test_memory_is_line_plus_context_plus_gradients_with_scaled_slope(tmp_path):
    line = [(b, 1, 1.0 + 0.25 * b) for b in (2, 4, 8)]
    path = measured(tmp_path, [*line, (8, 2, 2.0 + 0.4), (8, 4, 1.5 + 0.4)])
    memory = fit_memory([path], activation_scale=2.0, context_gib=0.7)["x"]
    assert memory.static_bytes == pytest.approx((1.0 + 0.4 + 0.7) * GIB, rel=1e-6)
    assert memory.bytes_per_sample == pytest.approx(0.5 * GIB, rel=1e-5)
    assert memory.gradient_bytes == pytest.approx(0.4 * GIB, rel=1e-6)
    assert "slope × 2" in memory.source
    plain = fit_memory([measured(tmp_path, line)], activation_scale=1.0, context_gib=0)["x"]
    assert (plain.static_bytes, plain.gradient_bytes) == (GIB, 0)
    assert plain.bytes_per_sample == pytest.approx(0.25 * GIB, rel=1e-5)


@given(st.lists(st.tuples(st.integers(1, 512), st.floats(0, 100)), min_size=2, max_size=8, unique_by=lambda p: p[0]))
@settings(max_examples=cases(30), deadline=None)
def test_memory_constants_are_never_negative(tmp_path_factory, points):
    path = measured(tmp_path_factory.mktemp("m"), [(b, 1, gib) for b, gib in points])
    memory = fit_memory([path], context_gib=0)["x"]
    assert memory.static_bytes >= 0
    assert memory.bytes_per_sample >= 0


def test_memory_of_one_batch_is_refused(tmp_path):
    with pytest.raises(ProfileError, match="memory of one batch size only"):
        fit_memory([measured(tmp_path, [(8, 1, 1.0), (8, 2, 1.0)])])


@with_data
def test_every_shipped_task_is_within_seven_percent_of_the_table():
    """Eq. 3, 4, 7 written out once more, over every row of the table, against the shipped file."""
    tasks = json.loads((ROOT / "src/carpool/profile/library/t4.json").read_text())["tasks"]
    errors: dict[str, list[float]] = {name: [] for name in tasks}
    with open(f"{DATA}/pollux/throughput.csv", newline="") as file:
        for row in csv.DictReader(file):
            t, n = tasks[row["app"]], int(row["gpus"])
            compute = t["alpha_s"] + t["beta_s"] * int(row["local_bsz"])
            reach = t["intra"] if row["nodes"] == "1" else t["inter"]
            comm = 0.0 if n == 1 else reach["base_s"] + reach["per_gpu_s"] * (n - 2)
            predicted = (compute ** t["delta"] + comm ** t["delta"]) ** (1 / t["delta"])
            errors[row["app"]].append(abs(predicted / float(row["step_time"]) - 1))
    assert sum(map(len, errors.values())) == 7103
    for name, found in errors.items():
        assert median(found) <= 0.07, name
        assert median(found) == pytest.approx(tasks[name]["error"]["median"], rel=1e-3)
        assert quantiles(found, n=10, method="inclusive")[8] == pytest.approx(tasks[name]["error"]["p90"], rel=1e-3)
        assert len(found) == tasks[name]["error"]["points"]


@with_data
def test_refitting_memory_gives_the_shipped_lines():
    fitted = fit_memory(sorted(Path(DATA, "h200").glob("*.json")), activation_scale=2.0, context_gib=0.7)
    for name, task in load("t4").tasks.items():
        assert fitted[name].static_bytes == pytest.approx(task.memory.static_bytes, rel=1e-4)
        assert fitted[name].bytes_per_sample == pytest.approx(task.memory.bytes_per_sample, rel=1e-4)
