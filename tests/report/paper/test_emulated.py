"""Table II's live form in `carpool paper`: its file, its table, wrong input."""

import csv
import re
from dataclasses import replace
from pathlib import Path

import pytest

from carpool.errors import InputError
from carpool.report.paper import assemble, emulated
from carpool.report.paper import config as configuration
from carpool.report.paper.emulated import COLUMNS, LABELS, read_emulated
from tests.support import ROOT

GOOD = dict(zip(COLUMNS, ("fifo", "slurm", "200.0", "204.0", "40.0", "37.0", "0"), strict=True))
SHIPPED = Path(configuration.__file__).parent / "emulated.csv"


def read(folder, *rows):
    """Read a file of rows, each given by how it differs from a good one."""
    path = folder / "mine.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        out = csv.DictWriter(file, COLUMNS)
        out.writeheader()
        out.writerows({**GOOD, **row} for row in rows)
    config = configuration.load()
    return read_emulated(replace(config, physical=replace(config.physical, emulated=path)))


def test_the_table_shows_live_and_simulated_values_beside_those_of_the_paper(tmp_path):
    found = read(tmp_path, {}, {"policy": "sjf", "live_makespan_s": "100.0", "suspended": "3"}, {"policy": "carpool"})
    config = configuration.load()
    sheet = emulated.sheet(found, config, bar=5.0)
    first, second, third = ([cell.text for cell in row] for row in sheet.rows)
    assert first == ["FIFO", "200", "204", "1.00", "1.00", "40", "37", "1.00", "1.00", "0"]
    theirs = config.paper.physical["sjf"][0] / config.paper.physical["fifo"][0]
    assert second[:5] == ["SJF", "100", "204", f"{theirs:.2f}", "0.50"]
    assert second[-1] == "3"
    assert third[3] == "–", "the paper has no such policy"
    assert [(cell.small, cell.kind) for cell in sheet.rows[0] if cell.small] == [("+2.0 %", "close"), ("−7.5 %", "off")]
    assert all(len(row) == len(sheet.header) == sum(span for _, span in sheet.groups) for row in sheet.rows)
    assert all(len(row) == len(sheet.csv_header) for row in sheet.csv_rows)
    assert sheet.title.endswith("on four nodes of a Slurm cluster")


def test_the_shipped_runs_have_every_policy_and_are_described():
    found = read_emulated(configuration.load())
    assert {run.policy for run in found.runs} == set(LABELS)
    section = assemble._emulated(found, configuration.load())
    assert SHIPPED.name in section.text
    assert assemble.EMULATED in section.text
    assert (ROOT / assemble.EMULATED).is_file()
    with open(ROOT / "docs/experiments/emulated.csv", newline="", encoding="utf-8") as file:
        page = {row["policy"].casefold(): row for row in csv.DictReader(file)}
    for run in found.runs:  # the page of the docs shows the same runs
        assert page[run.policy]["makespan s, live"] == f"{run.figures[0][0]:.0f}"
        assert page[run.policy]["mean JCT s, simulated"] == f"{run.figures[1][1]:.0f}"


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([{"policy": "fifi"}], ":2: policy: 'fifi' is not one of the experiment's: did you mean fifo?"),
        ([{"ground": "slurmm"}], ":2: ground: 'slurmm' is not one of the experiment's: did you mean slurm?"),
        ([{"live_makespan_s": "0"}], ":2: live_makespan_s: '0' must be a number of seconds above 0"),
        ([{"suspended": "-1"}], ":2: suspended: '-1' must be a whole number of at least 0"),
        ([{}, {}], ":3: policy: the same run as in line 2"),
        ([], ":2: policy: there are no rows; give the CSV file that bench/emulated.py --rows writes"),
    ],
)
def test_a_bad_file_is_refused_with_line_and_column(tmp_path, rows, problem):
    with pytest.raises(InputError, match=re.escape(problem)):
        read(tmp_path, *rows)
