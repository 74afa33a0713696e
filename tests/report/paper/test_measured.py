"""The physical experiment in `carpool paper`: its file, its table, the claim that it decides, wrong input."""

import csv
import re
import tomllib
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import pytest

from carpool.errors import InputError
from carpool.report.paper import assemble, measured
from carpool.report.paper import config as configuration
from carpool.report.paper.claims_physical import _beside, fidelity
from carpool.report.paper.measured import COLUMNS, read_measured
from carpool.report.paper.verdicts import ClaimVerdict
from tests.support import ROOT
from tests.support.command_line import call

SHIPPED = Path(configuration.__file__).parent
FIGURES = ("200.0", "204.0", "230.0", "2.5", "40.0", "37.0", "39.0", "1.0", "10.0", "11.2", "10.1", "0.5")
"""Makespan, mean JCT and mean queue: measured, simulated, predicted, spread."""
GOOD = dict(zip(COLUMNS, ("sjf-bsbf", "mps", "2", "3", *FIGURES, "0.51", "0.49"), strict=True))
ALONE = {"mechanism": "time-slicing", "jobs_per_gpu": "1"}


def written(path, *rows):
    """Return a file of rows, each given by how it differs from a good one."""
    with path.open("w", newline="", encoding="utf-8") as file:
        out = csv.DictWriter(file, COLUMNS)
        out.writeheader()
        out.writerows({**GOOD, **row} for row in rows)
    return path


def naming(path):
    config = configuration.load()
    return replace(config, physical=replace(config.physical, measured=path))


def read(tmp_path, *rows):
    return read_measured(naming(written(tmp_path / "gpu.csv", *rows)))


def off(makespan, jct, **more):
    """Return a case whose simulated figures deviate by these per cents."""
    return {"simulated_makespan_s": f"{200 + 2 * makespan}", "simulated_mean_jct_s": f"{40 + 0.4 * jct}", **more}


# ---- the file ------------------------------------------------------------------------------------------------------


def test_the_shipped_file_is_shown_unless_another_is_named(tmp_path, monkeypatch):
    written(tmp_path / "h200.csv", {})
    monkeypatch.chdir(tmp_path)
    found = read_measured(configuration.load())
    assert found.shipped
    with open(SHIPPED / found.file, newline="", encoding="utf-8") as file:
        assert len(found.cases) == len(list(csv.DictReader(file)))
    text = (SHIPPED / "paper.toml").read_text("utf-8")
    for line, shipped in (('measured = "./h200.csv"', False), ('measured = "h200.csv"', True)):
        (tmp_path / "own.toml").write_text(text.replace('measured = "h200.csv"', line, 1), "utf-8")
        assert read_measured(configuration.load(tmp_path / "own.toml")).shipped is shipped
    (tmp_path / "own.toml").write_text(text.replace('measured = "h200.csv"', "", 1), "utf-8")
    assert read_measured(configuration.load(tmp_path / "own.toml")) is None


def test_every_file_that_the_report_reads_is_installed():
    with open(ROOT / "pyproject.toml", "rb") as file:
        patterns = tomllib.load(file)["tool"]["setuptools"]["package-data"]["carpool"]
    data = [path for path in SHIPPED.iterdir() if path.is_file() and path.suffix != ".py"]
    assert {path.suffix for path in data} == {".toml", ".css", ".csv"}
    for path in data:
        name = str(path.relative_to(SHIPPED.parents[1]))
        assert any(fnmatch(name, pattern) for pattern in patterns), name


def with_cell(column, value):
    return ",".join(COLUMNS) + "\n" + ",".join({**GOOD, column: value}.values()) + "\n"


def without_column(column):
    names = [name for name in COLUMNS if name != column]
    return ",".join(names) + "\n" + ",".join(GOOD[name] for name in names) + "\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (with_cell("policy", "fifi"), ":2: policy: 'fifi' is not one of the experiment's: did you mean fifo?"),
        (with_cell("policy", "tiresias-"), ":2: policy: 'tiresias-' is not one of the experiment's: did you mean tire"),
        (with_cell("mechanism", "mpps"), ":2: mechanism: 'mpps' is not a way of sharing a GPU: did you mean mps?"),
        (with_cell("jobs_per_gpu", "two"), ":2: jobs_per_gpu: 'two' must be a whole number of at least 1; fix the row"),
        (with_cell("runs", "0"), ":2: runs: '0' must be a whole number of at least 1"),
        (
            with_cell("measured_mean_jct_s", "many"),
            ":2: measured_mean_jct_s: 'many' must be a number of seconds above 0",
        ),
        (with_cell("simulated_makespan_s", "0"), ":2: simulated_makespan_s: '0' must be a number of seconds above 0"),
        (with_cell("measured_makespan_s", "nan"), ":2: measured_makespan_s: 'nan' must be a number"),
        (with_cell("simulated_mean_jct_s", "inf"), ":2: simulated_mean_jct_s: 'inf' must be a number"),
        (with_cell("measured_makespan_s", ""), ":2: measured_makespan_s: '' must be a number"),
        (
            with_cell("spread_mean_queue_s", "-1"),
            ":2: spread_mean_queue_s: '-1' must be a number of seconds, 0 or above",
        ),
        (with_cell("measured_gpu_busy", "51"), ":2: measured_gpu_busy: '51' must be a share from 0 to 1"),
        (
            with_cell("simulated_gpu_busy", "0,51"),
            ":2: simulated_gpu_busy: more values follow; write numbers with a point",
        ),
        (without_column("spread_mean_jct_s"), ":1: spread_mean_jct_s: this column is missing; give the CSV file that"),
        (
            with_cell("runs", "3") + "\n" + with_cell("runs", "2").splitlines()[1],
            ":4: policy: the same case as in line 2",
        ),
        ("policy,makespan_s,mean_jct_s\nfifo,1,1\n", ":1: mechanism: this column is missing"),
        (",".join(COLUMNS) + "\n", ":2: policy: there are no rows"),
        ("", ":1: policy: this column is missing"),
    ],
)
def test_a_bad_file_is_refused_with_line_and_column(tmp_path, text, problem):
    file = tmp_path / "gpu.csv"
    file.write_text(text, "utf-8")
    with pytest.raises(InputError, match=re.escape(problem)) as caught:
        read_measured(naming(file))
    assert str(caught.value).startswith(str(file))


def test_a_file_that_cannot_be_read_is_one_line_before_anything_runs(tmp_path):
    text = (SHIPPED / "paper.toml").read_text("utf-8")
    own = tmp_path / "own.toml"
    own.write_text(text.replace('measured = "h200.csv"', 'measured = "nowhere.csv"', 1), "utf-8")
    said = call("paper", "--config", own, "--out", tmp_path / "out")
    assert said.code == 2
    assert said.err.strip().endswith(
        "nowhere.csv: cannot be read: No such file or directory; give the CSV file that bench/physical.py --rows writes"
    )
    assert not (tmp_path / "out").exists()
    (tmp_path / "latin.csv").write_bytes(b"policy\n\xe9\n")
    with pytest.raises(InputError, match="cannot be read"):
        read_measured(naming(tmp_path / "latin.csv"))


# ---- the table -----------------------------------------------------------------------------------------------------


def test_the_table_shows_every_case_measured_and_simulated(tmp_path):
    found = read(
        tmp_path,
        {},
        {"policy": "tiresias-11", **ALONE, "measured_gpu_busy": "", "measured_mean_queue_s": "0"},
        {"policy": "carpool", "jobs_per_gpu": "4"},
    )
    sheet = measured.sheet(found, bar=5.0)
    first, second, third = ([cell.text for cell in row] for row in sheet.rows)
    assert first[:3] == ["SJF-BSBF", "MPS, up to 2", "3"]
    assert first[3:6] == ["200.0", "204.0 ± 2.5", "230.0"]
    assert first[6:] == ["40.0", "37.0 ± 1.0", "39.0", "10.0", "11.2 ± 0.5", "51 / 49 %"]
    coloured = [(cell.small, cell.kind) for cell in sheet.rows[0] if cell.small]
    assert coloured[:2] == [("+2.0 %", "close"), ("+15.0 %", "far")]
    assert coloured[2:] == [("−7.5 %", "off"), ("−2.5 %", "close"), ("+12.0 %", "far")]
    assert second[:3] == ["Tiresias, 11 GPU-s", "none", "3"]
    assert second[-1] == "– / 49 %"
    assert sheet.rows[1][10].small == "", "no job waited, so there is no deviation"
    assert third[:3] == ["Carpool", "MPS, up to 4", "3"]
    assert all(len(row) == len(sheet.header) == sum(span for _, span in sheet.groups) for row in sheet.rows)
    line = dict(zip(sheet.csv_header, sheet.csv_rows[0], strict=True))
    assert {name: str(line[name]) for name in COLUMNS} == GOOD
    assert float(line["deviation_%_mean_jct_s"]) == pytest.approx(-7.5)
    assert float(line["predicted_deviation_%_makespan_s"]) == pytest.approx(15.0)


def test_the_page_says_where_it_was_measured_and_where_the_raw_data_are(tmp_path):
    own = read(tmp_path, {}, {"policy": "fifo", **ALONE, "runs": "2"})
    section = assemble._measured(own, 5.0)
    assert section.title == "Measured on one GPU"
    assert section.items[0].title.endswith("2 cases, 5 runs")
    assert "gpu.csv" in section.text
    assert assemble.RAW not in section.text
    shipped = assemble._measured(read_measured(configuration.load()), 5.0)
    assert assemble.RAW in shipped.text
    assert (ROOT / assemble.RAW).is_file()
    logical = read(tmp_path, {"mechanism": "logical"})
    assert assemble._measured(logical, 5.0).title == "Measured on logical slots"


# ---- the claims ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "verdict", "shown"),
    [
        (
            [off(4.9, -4.9), off(-1, 2, policy="sjf", **ALONE)],
            ClaimVerdict.REPRODUCED,
            "in 2 of 2 cases: makespan in 2 (−1.0 % to +4.9 %), mean JCT in 2 (−4.9 % to +2.0 %)",
        ),
        (
            [off(4, 4), off(4, -12, policy="sjf", **ALONE)],  # one of both means is not enough
            ClaimVerdict.PARTLY,
            "in 1 of 2 cases: makespan in 2 (+4.0 % to +4.0 %), mean JCT in 1 (−12.0 % to +4.0 %)",
        ),
        (
            [off(4, 6), off(-7, 1, policy="sjf", **ALONE)],
            ClaimVerdict.NOT,
            "in 0 of 2 cases: makespan in 1 (−7.0 % to +4.0 %), mean JCT in 1 (+1.0 % to +6.0 %)",
        ),
    ],
)
def test_the_simulators_fidelity_is_judged_on_every_case(tmp_path, rows, verdict, shown):
    claim = fidelity(configuration.load(), read(tmp_path, *rows))
    assert claim.verdict is verdict
    assert claim.ours == shown
    assert "gpu.csv" in claim.reason
    assert "Every case ran more than once." in claim.reason


def test_the_reason_says_which_cases_ran_once_or_never(tmp_path):
    assert (
        "1 of 2 cases ran only once."
        in fidelity(configuration.load(), read(tmp_path, {}, {"policy": "sjf", "runs": "1", **ALONE})).reason
    )
    claim = fidelity(configuration.load(), None)
    assert claim.verdict is ClaimVerdict.UNTESTED
    assert claim.ours == "–"
    assert "[physical] measured" in claim.reason


def test_measured_gains_compare_the_same_mechanism_and_pairs_only(tmp_path):
    found = read(
        tmp_path,
        {"policy": "tiresias-11", **ALONE, "measured_mean_jct_s": "80"},
        {"policy": "sjf-ffs", "measured_mean_jct_s": "50"},
        {"policy": "sjf-ffs", "mechanism": "time-slicing", "measured_mean_jct_s": "32"},
        {},
        {"mechanism": "time-slicing"},
        {"jobs_per_gpu": "4", "measured_mean_jct_s": "1"},
    )
    said = " Measured on one GPU, other jobs: "
    assert _beside(found, "sjf-ffs", lambda case: case.jct) == (
        f"{said}SJF-BSBF (MPS) 20 % lower than SJF-FFS; SJF-BSBF (time-slicing) 25 % higher than SJF-FFS."
    )
    assert _beside(found, "tiresias", lambda case: case.jct).startswith(
        f"{said}SJF-BSBF (MPS) 50 % lower than Tiresias, 11 GPU-s; SJF"
    )
    alone = read(tmp_path, {})
    assert _beside(alone, "sjf-ffs", lambda case: case.jct) == _beside(None, "sjf-ffs", lambda case: case.jct) == ""
