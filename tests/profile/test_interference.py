"""What `--interference` accepts, and how each wrong text is refused."""

import json
from dataclasses import replace

import pytest

from carpool.core.perf import ConstantInterference
from carpool.profile.interference import read_interference
from carpool.profile.rows import merge_pairs, read_pairs
from carpool.profile.schema import ProfileError
from carpool.profile.values import Pair

GOOD = ",a,b\na,1.5,2.5\nb,1.25,1\n"


def matrix(folder, text: str) -> str:
    path = folder / "xi.csv"
    path.write_text(text)
    return str(path)


def test_a_number_holds_for_everyone():
    assert read_interference(" 1.5 ") == ConstantInterference(1.5)
    assert read_interference("1").pair("x", 1, "y", 1) == 1


def test_a_matrix_says_row_slowed_by_column(tmp_path):
    table = read_interference(matrix(tmp_path, GOOD))
    assert table.pair("a", 1, "b", 1) == 2.5
    assert table.pair("b", 1, "a", 1) == 1.25


def test_rows_may_come_in_any_order_with_blank_lines_and_a_byte_order_mark(tmp_path):
    table = read_interference(matrix(tmp_path, "\ufeff,a,b\n\nb,1.25,1\na, 1.5 ,2.5\n"))
    assert table.pair("a", 1, "b", 1) == 2.5


def test_shipped_tables_by_name_and_mechanism():
    assert read_interference("gavel").pair("bert", 1, "imagenet", 1) == pytest.approx(4.9012)
    assert read_interference("gavel:unknown").pair("bert", 1, "imagenet", 1) == pytest.approx(4.9012)
    mps, turns = read_interference("h200:mps"), read_interference("h200:time-slicing")
    assert mps.pair("bert", 64, "bert", 64) == pytest.approx(1.84, abs=0.01)
    assert turns.pair("bert", 64, "bert", 64) == pytest.approx(2.24, abs=0.01)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0.9", "interference 0.9: a slow-down is a finite number of at least 1"),
        ("-1", "interference -1: a slow-down"),
        ("nan", "interference nan: a slow-down"),
        ("inf", "interference inf: a slow-down"),
        ("", "interference: empty; give a number like 1.5"),
        ("gavle", "interference 'gavle': neither a number, a .csv matrix nor a shipped table; did you mean gavel?"),
        ("h200", "profile h200: pairs of several mechanisms; choose h200:mps or h200:time-slicing"),
        ("h200:mpss", "interference 'h200:mpss': unknown mechanism 'mpss'; give mps, time-slicing, unknown"),
        ("gavel:mps", "profile gavel: no pairs for 'mps'; it has unknown"),
        ("t4", "profile t4: it has no pairs"),
        ("none.csv", "none.csv: no such file"),
        ("none.json", "none.json: no such profile"),
        ("none.json:mps", "none.json: no such profile"),
    ],
)
def test_a_wrong_text_gets_one_line_with_a_remedy(text, message):
    with pytest.raises(ProfileError) as caught:
        read_interference(text)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "xi.csv: empty"),
        (",a,b\na,1.5,2.5\n", "xi.csv: no row for b"),
        (",a,b\na,1.5\nb,1,1\n", "xi.csv: line 2: 1 values for 2 columns"),
        (",a,b\na,1.5,1,1\nb,1,1\n", "xi.csv: line 2: 3 values for 2 columns"),
        (",a,a\na,1,1\n", "xi.csv: line 1: field 3: a appears twice"),
        (",a,\na,1,1\n", "xi.csv: line 1: field 3: empty name"),
        ("a\n", "xi.csv: line 1: no column names"),
        (",a,b\na,1,1\nc,1,1\n", "xi.csv: line 3: field 1: row 'c' is not in the header"),
        (",a,b\na,1,1\na,1,1\n", "xi.csv: line 3: field 1: a second row for a"),
        (",a,b\na,1,0.5\nb,1,1\n", "xi.csv: line 2: b: '0.5' is below 1"),
        (",a,b\na,1,inf\nb,1,1\n", "xi.csv: line 2: b: 'inf' is not finite"),
        (",a,b\na,1,x\nb,1,1\n", "xi.csv: line 2: b: 'x' is not a number"),
        (",a,b\na,1,\nb,1,1\n", "xi.csv: line 2: b: '' is not a number"),
    ],
)
def test_a_wrong_matrix_is_refused_by_line_and_field(tmp_path, text, message):
    with pytest.raises(ProfileError) as caught:
        read_interference(matrix(tmp_path, text))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def solo(model: str, batch: int, accumulation: int) -> dict:
    return {"model": model, "batch": batch, "accum": accumulation, "iter_s": 0.1, "mem_gib": 1.0}


def test_a_measurement_file_tells_its_pairs_batches(tmp_path):
    path = tmp_path / "m.json"
    rows = {
        "solo": [solo("a", 4, 1), solo("a", 8, 1), solo("a", 8, 2), solo("b", 3, 4)],
        "pair": [{"a": "a", "b": "b", "xi_a": 1.5, "xi_b": 0.9, "gain": 1.8}],
        "group": [{"jobs": ["a", "a", "b"], "xi": [1, 2, 3], "gain": 2}],
    }
    path.write_text(json.dumps(rows))
    pairs, groups = read_pairs(path, "mps")
    assert [(p.a, p.batch_a, p.b, p.batch_b, p.xi_a, p.xi_b) for p in pairs] == [("a", 8, "b", 3, 1.5, 0.9)]
    assert [(job.task, job.batch) for job in groups[0].jobs] == [("a", 8), ("a", 8), ("b", 3)]
    assert read_pairs(path, "mps", batches={"a": 1, "b": 2})[0][0].batch_b == 2
    rows["solo"] = []
    path.write_text(json.dumps(rows))
    with pytest.raises(ProfileError, match=r"pair\[0\].batch_a: missing, and no solo rows"):
        read_pairs(path, "mps")


def test_repeated_pairs_become_one_with_an_interval(tmp_path):
    first, second = tmp_path / "1.csv", tmp_path / "2.csv"
    first.write_text(GOOD)
    second.write_text(GOOD.replace("2.5", "3.5"))
    merged = merge_pairs(read_pairs(first, source="1.csv")[0] + read_pairs(second, source="2.csv")[0])
    pair = next(p for p in merged if (p.a, p.b) == ("a", "b"))
    assert (pair.xi_a, pair.interval_a, pair.runs, pair.source) == (3.0, (2.5, 3.5), 2, "1.csv, 2.csv")
    assert (pair.xi_b, pair.interval_b) == (1.25, (1.25, 1.25))
    assert len(merged) == 3


def test_a_pair_named_the_other_way_round_is_the_same():
    one = Pair("a", 8, "b", 4, "mps", 2.0, 1.0, (1.9, 2.1), (0.9, 1.1))
    assert one.turned() == Pair("b", 4, "a", 8, "mps", 1.0, 2.0, (0.9, 1.1), (1.9, 2.1))
    other = Pair("b", 4, "a", 8, "mps", 1.5, 3.0)
    (merged,) = merge_pairs([one, other])
    assert (merged.key, merged.xi_a, merged.xi_b, merged.runs) == (one.key, 2.5, 1.25, 2)
    assert len(merge_pairs([one, replace(other, batch_b=4)])) == 2
