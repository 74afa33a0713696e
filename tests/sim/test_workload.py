"""Workload files: every format, every field, and the message for each mistake."""

import io
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.core.model import Job
from carpool.errors import InputError
from carpool.sim.sources import expand_selection, load_workload, parse_loads, parse_seeds
from carpool.sim.workload import Workload, check_dependencies, check_ids, read, write
from tests.support.command_line import HEADER, csv_file

ALL = f"{HEADER},duration_s,user,can_shrink,exclusive,max_slowdown,priority,after,retries"
DATA = os.environ.get("CARPOOL_DATA")
needs_data = pytest.mark.skipif(DATA is None, reason="CARPOOL_DATA is not set")


def complaint(path: Path, **select: str) -> str:
    with pytest.raises(InputError) as caught:
        read(path, select)
    message = str(caught.value)
    assert "\n" not in message
    return message.replace(str(path.parent) + "/", "")


# ---- our own format ------------------------------------------------------------------------------------------------


def test_the_six_columns_make_a_job_with_defaults(tmp_path):
    path = csv_file(tmp_path, "a,1.5,bert,2,32,100")
    assert read(path).jobs == (Job("a", 1.5, "bert", 2, 32, 100),)


def test_all_optional_columns_are_read(tmp_path):
    path = csv_file(tmp_path, "a,0,bert,1,8,10,,,,,,,,", "b,5,ncf,2,16,20,33.5,eve,false,yes,1.25,-3,a,2", header=ALL)
    plain, full = read(path).jobs
    assert plain == Job("a", 0.0, "bert", 1, 8, 10)
    assert full == Job(
        "b", 5.0, "ncf", 2, 16, 20, "eve", 33.5, False, True, max_slowdown=1.25, priority=-3, after=("a",), retries=2
    )


def test_columns_may_have_any_order_and_unknown_ones_are_ignored(tmp_path):
    path = csv_file(tmp_path, "9,x,7,2,0,bert,a", header="iterations,colour,batch,gpus,submitted_s,model,job")
    assert read(path).jobs == (Job("a", 0.0, "bert", 2, 7, 9),)


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_line_endings_byte_order_marks_blank_lines_and_spaces_are_accepted(tmp_path, ending, mark):
    lines = ["job, submitted_s ,model,gpus,batch,iterations", "", " a , 1 ,bert, 1 ,8,10", "  ", ' "b" ,2,ncf,1,8,10']
    path = tmp_path / "w.csv"
    path.write_bytes(mark + ending.join([*lines, "", ""]).encode())
    jobs = read(path).jobs
    assert [(job.submitted, job.model) for job in jobs] == [(1.0, "bert"), (2.0, "ncf")]
    assert jobs[0].id == "a"


def test_quoted_fields_may_hold_commas(tmp_path):
    assert read(csv_file(tmp_path, '"a,1",0,bert,1,8,10')).jobs[0].id == "a,1"


def test_a_whole_number_may_be_written_as_a_float(tmp_path):
    job = read(csv_file(tmp_path, "a,0,bert,2.0,1e2,1e3")).jobs[0]
    assert (job.gpus, job.batch, job.iterations) == (2, 100, 1000)
    assert type(job.iterations) is int


def test_jobs_come_in_the_order_of_submission_and_ties_in_that_of_the_file(tmp_path):
    path = csv_file(tmp_path, "late,9,ncf,1,8,1", "x,3,ncf,1,8,1", "a,3,ncf,1,8,1", "early,0,ncf,1,8,1")
    workload = read(path)
    assert [job.id for job in workload.jobs] == ["early", "x", "a", "late"]
    assert workload.where("late") == f"{path}:2"
    assert workload.where("early") == f"{path}:5"
    assert workload.where("nobody") == str(path)


def test_the_same_name_twice_in_after_counts_once(tmp_path):
    path = csv_file(
        tmp_path, "a,0,ncf,1,8,1,", "b,0,ncf,1,8,1,a a", header="job,submitted_s,model,gpus,batch,iterations,after"
    )
    assert read(path).jobs[1].after == ("a",)


# ---- Pollux and Philly ---------------------------------------------------------------------------------------------

POLLUX = "name,time,app,gpus,batch,iters"


def test_the_batch_of_a_pollux_file_is_divided_among_the_gpus(tmp_path):
    path = csv_file(tmp_path, "a,110,bert,3,10,7", "b,120,ncf,1,10,7", "c,130,ncf,16,10,7", header=POLLUX)
    assert [(job.gpus, job.batch) for job in read(path).jobs] == [(3, 4), (1, 10), (16, 1)], "rounded up, at least 1"
    assert read(path).jobs[0] == Job("a", 110.0, "bert", 3, 4, 7, elastic=True)


def test_pollux_durations_are_optional(tmp_path):
    path = csv_file(tmp_path, "a,0,bert,1,10,7,99.5", "b,0,bert,1,10,7,", header=POLLUX + ",dur")
    assert [job.duration_s for job in read(path).jobs] == [99.5, None]


def test_philly_jobs_have_a_duration_and_no_model(tmp_path):
    rows = ("2017-10-09 07:01:55,66.4,1,x", "2017-10-09 06:01:55,0.2,8,y")
    jobs = read(csv_file(tmp_path, *rows, header="timestamp,duration,num_gpus,cluster")).jobs
    assert jobs == (
        Job("philly-3", 0.0, "generic", 8, 1, 1, duration_s=0.2, group="y"),
        Job("philly-2", 3600.0, "generic", 1, 1, 66, duration_s=66.4, group="x"),
    )


def test_philly_times_with_a_zone_are_compared_in_utc(tmp_path):
    rows = ("2017-10-09T09:00:00+02:00,5,1", "2017-10-09T08:00:00Z,5,1")
    jobs = read(csv_file(tmp_path, *rows, header="timestamp,duration,num_gpus")).jobs
    assert [job.submitted for job in jobs] == [0.0, 3600.0]


def test_philly_time_starts_with_the_first_selected_job(tmp_path):
    rows = ("2017-10-09 07:00:00,5,1,x", "2017-10-10 07:00:00,5,1,y", "2017-10-10 07:00:10,5,1,y")
    path = csv_file(tmp_path, *rows, header="timestamp,duration,num_gpus,cluster")
    assert [job.submitted for job in read(path, {"cluster": "y"}).jobs] == [0.0, 10.0]


# ---- selecting -----------------------------------------------------------------------------------------------------

MANY = ("120,1,a,0,bert,1,8,9", "120,2,a,5,bert,1,8,9", "240,1,a,7,bert,1,8,9", "240,1,b,7,bert,1,8,9")


def many(folder: Path) -> Path:
    return csv_file(folder, *MANY, header="n,seed," + POLLUX)


def test_rows_are_selected_by_column(tmp_path):
    path = many(tmp_path)
    assert [job.submitted for job in read(path, {"n": "120", "seed": "2"}).jobs] == [5.0]
    assert len(read(path, {"n": "240.0"}).jobs) == 2, "numbers are compared as numbers"


def test_several_workloads_in_a_file_need_a_selection(tmp_path):
    message = complaint(many(tmp_path))
    assert message.startswith("jobs.csv:3: job 'a' is already in line 2")
    assert "--select n=…,seed=…" in message
    assert "--select" not in complaint(csv_file(tmp_path, "a,0,ncf,1,1,1", "a,0,ncf,1,1,1"))


def test_an_empty_selection_names_the_possible_values(tmp_path):
    assert complaint(many(tmp_path), n="999") == "jobs.csv: no jobs with n=999; n can be 120, 240"
    assert complaint(many(tmp_path), sed="1").startswith("jobs.csv:1: no column 'sed' to select by: did you mean seed?")


def test_selections_expand_to_all_combinations():
    assert expand_selection(None) == [{}]
    assert expand_selection("n=240, seed=2-4") == [{"n": "240", "seed": str(s)} for s in (2, 3, 4)]
    assert len(expand_selection("n=1-3,seed=1-4")) == 12
    assert expand_selection("cluster=a-b") == [{"cluster": "a-b"}]


@pytest.mark.parametrize("text", ["n", "=3", "n=", "n=1,n=2", "n=1-100,seed=1-100"])
def test_malformed_selections_are_refused(text):
    with pytest.raises(InputError, match="--select"):
        expand_selection(text)


def test_lists_of_seeds_and_loads_are_sorted_and_unique():
    assert parse_seeds("1-3,7, 2") == [1, 2, 3, 7]
    assert parse_loads("0.5,1,2,1.0") == [0.5, 1.0, 2.0]


# ---- complaints ----------------------------------------------------------------------------------------------------

WRONG = [
    ("submitted_s", ["-1", "nan", "inf", "-inf", "1e13", "1e999", "x", "", "1,5"]),
    ("gpus", ["0", "-2", "1.5", "nan", "inf", "two", "", "9" * 5000]),
    ("batch", ["0", "-1", "0.5", "1e400", ""]),
    ("iterations", ["0", "2.5", "NaN", "1" + "0" * 400, ""]),
    ("duration_s", ["0", "-3", "nan", "inf", "soon"]),
    ("max_slowdown", ["0.99", "nan", "inf", "x"]),
    ("priority", ["1.5", "high", "nan"]),
    ("retries", ["-1", "0.1", "x"]),
    ("can_shrink", ["maybe"]),
    ("exclusive", ["2"]),
    ("model", ["", "  ", "be\nrt"]),
    ("job", ["", "a\tb"]),
]


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in WRONG for value in values])
def test_a_wrong_value_is_named_with_file_line_field_and_remedy(tmp_path, field, value):
    good = {"job": "b", "submitted_s": "0", "model": "ncf", "gpus": "1", "batch": "8", "iterations": "9"}
    row = {name: good.get(name, "") for name in ALL.split(",")} | {field: f'"{value}"'}
    message = complaint(csv_file(tmp_path, "a,0,ncf,1,8,9,,,,,,,,", ",".join(row.values()), header=ALL))
    last_line = 3 + value.count("\n")
    assert message.startswith(f"jobs.csv:{last_line}: {field}: "), message
    assert any(word in message for word in ("must be", "give a", "remove")), message
    assert len(message) < 160


@pytest.mark.parametrize(("field", "value"), [("timestamp", "yesterday"), ("timestamp", ""), ("duration", "-1")])
def test_wrong_values_in_philly_files_are_named(tmp_path, field, value):
    row = {"timestamp": "2017-10-09 07:00:00", "duration": "5", "num_gpus": "1"} | {field: value}
    path = csv_file(tmp_path, ",".join(row.values()), header=",".join(row))
    assert complaint(path).startswith(f"jobs.csv:2: {field}: ")


def test_a_time_before_the_calendar_is_refused(tmp_path):
    path = csv_file(tmp_path, "0001-01-01T00:00:00+14:00,5,1", header="timestamp,duration,num_gpus")
    assert complaint(path).startswith("jobs.csv:2: timestamp: ")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "jobs.csv:1: is empty; expected a header"),
        ("\n\n", "jobs.csv:1: is empty; expected a header"),
        ("job,submitted_s,model,gpus,batch,iterations\n", "jobs.csv: no jobs after the header; add a line"),
        ("job,submitted_s,model,gpus,batch\n", "jobs.csv:1: header lacks iterations; expected at least job, sub"),
        ("name,time,app,gpus,batch\n", "jobs.csv:1: header lacks iters; expected at least name, time"),
        ("timestamp,duration\n", "jobs.csv:1: header lacks num_gpus; expected at least timestamp"),
        ("job,job,model\n", "jobs.csv:1: column 'job' is in the header twice; rename"),
        ("hello\n", "jobs.csv:1: header lacks"),
        (
            "job,submitted_s,model,gpus,batch,iterations\na,0,ncf,1,8\n",
            "jobs.csv:2: has 5 fields, the header has 6; ch",
        ),
        ("job,submitted_s,model,gpus,batch,iterations\na\n", "jobs.csv:2: has 1 field, the header has 6; check"),
        ("job,submitted_s,model,gpus,batch,iterations\na,0,ncf,1,8,9,9\n", "jobs.csv:2: has 7 fields, the header"),
        ('job,submitted_s,model,gpus,batch,iterations\n"a,0,ncf,1,8,9\n', "jobs.csv:2: has 1 field, the header has 6"),
        ("job,submitted_s,model,gpus,batch,iterations\n" + "a" * 200_000, "jobs.csv:2: is not CSV: field larger"),
    ],
)
def test_a_file_that_is_not_a_workload_is_refused(tmp_path, text, expected):
    path = tmp_path / "jobs.csv"
    path.write_text(text)
    assert complaint(path).startswith(expected)


def test_an_unreadable_file_is_named(tmp_path):
    (tmp_path / "binary.csv").write_bytes(bytes(range(256)))
    assert "binary.csv: is not a text file" in complaint(tmp_path / "binary.csv")
    assert "cannot be read" in complaint(tmp_path)
    assert "no such workload file; `carpool workload generate" in complaint(tmp_path / "none.csv")
    assert "cannot be read" in complaint(tmp_path / "binary.csv" / "below.csv")
    assert "cannot be read" in complaint(tmp_path / ("x" * 300 + ".csv"))


def test_an_unknown_workload_is_refused_with_the_nearest_name():
    with pytest.raises(InputError, match="did you mean philly-like"):
        load_workload("philly-lik", {}, None, 1.0, 1, "t4")
    with pytest.raises(InputError, match="unknown workload"):
        load_workload("x" * 5000, {}, None, 1.0, 1, "t4")


# ---- dependencies --------------------------------------------------------------------------------------------------


def jobs_after(**after: str) -> Workload:
    return Workload(tuple(Job(name, 0.0, "ncf", 1, 1, 1, after=tuple(a.split())) for name, a in after.items()))


def test_dependencies_that_can_be_met_are_accepted():
    check_dependencies(jobs_after(a="", b="a", c="a b", d="c"))


@pytest.mark.parametrize(
    ("after", "part"),
    [
        ({"a": "a"}, "circle (a → a); remove one"),
        ({"a": "b", "b": "a"}, "in a circle"),
        ({"x": "", "a": "c x", "b": "a", "c": "b"}, "in a circle"),
        ({"apple": "", "b": "appel"}, "there is no job 'appel' to wait for: did you mean apple?"),
    ],
)
def test_dependencies_that_cannot_be_met_are_refused(after, part):
    with pytest.raises(InputError) as caught:
        check_dependencies(jobs_after(**after))
    assert part in str(caught.value)
    assert "after: " in str(caught.value)


def test_a_circle_of_dependencies_is_named_with_its_line(tmp_path):
    path = csv_file(
        tmp_path,
        "z,0,ncf,1,8,9,",
        "a,0,ncf,1,8,9,b",
        "b,0,ncf,1,8,9,a",
        header="job,submitted_s,model,gpus,batch,iterations,after",
    )
    assert complaint(path).startswith(("jobs.csv:3: after: ", "jobs.csv:4: after: "))


def test_a_long_chain_is_checked_quickly():
    number = 30_000
    jobs = [Job(str(n), 0.0, "ncf", 1, 1, 1, after=(str(n - 1),) if n else ()) for n in range(number)]
    check_dependencies(Workload(tuple(jobs)))  # a pass over all jobs for each link would take minutes


def test_two_jobs_with_one_id_are_refused():
    job = Job("a", 0.0, "ncf", 1, 1, 1)
    check_ids(Workload((job,)))
    with pytest.raises(InputError, match="job 'a' exists twice"):
        check_ids(Workload((job, job)))


# ---- load and writing ----------------------------------------------------------------------------------------------


@given(st.floats(1e-3, 1e3), st.lists(st.floats(0, 1e6), min_size=1, max_size=5))
def test_a_load_changes_only_the_arrivals(load, times):
    jobs = tuple(Job(str(n), time, "ncf", 2, 8, 9, duration_s=7.0) for n, time in enumerate(sorted(times)))
    faster = Workload(jobs, "w").at_load(load)
    for before, after in zip(jobs, faster.jobs, strict=True):
        assert after.submitted == before.submitted / load
        assert (after.id, after.duration_s, after.gpus) == (before.id, 7.0, 2)
    assert faster.source == "w"


names = st.text(st.characters(exclude_categories=("C", "Z")) | st.just(" "), min_size=1, max_size=8).map(str.strip)
ids = names.filter(lambda name: bool(name) and " " not in name)


@st.composite
def workloads(draw) -> Workload:
    named = draw(st.lists(ids, min_size=1, max_size=5, unique=True))
    jobs = []
    for number, name in enumerate(named):
        job = Job(
            id=name,
            submitted=draw(st.floats(0, 1e12)),
            model=draw(names.filter(bool)),
            gpus=draw(st.integers(1, 10**6)),
            batch=draw(st.integers(1, 10**6)),
            iterations=draw(st.integers(1, 10**12)),
            user=draw(names),
            duration_s=draw(st.none() | st.floats(1e-6, 1e12)),
            can_shrink=draw(st.booleans()),
            exclusive=draw(st.booleans()),
            max_slowdown=draw(st.none() | st.floats(1, 1e6)),
            priority=draw(st.integers(-(10**6), 10**6)),
            after=tuple(draw(st.lists(st.sampled_from(named[:number]), unique=True)) if number else ()),
            retries=draw(st.integers(0, 9)),
        )
        jobs.append(job)
    return Workload(tuple(sorted(jobs, key=lambda job: job.submitted)))


@pytest.mark.slow
@given(workloads())
def test_a_written_workload_is_read_again(tmp_path_factory, workload):
    path = tmp_path_factory.mktemp("round") / "w.csv"
    with open(path, "w", newline="", encoding="utf-8") as file:
        write(workload, file)
    assert read(path).jobs == workload.jobs


def test_unused_columns_are_not_written():
    jobs = (Job("a", 3.0, "bert", 1, 8, 9), Job("b", 4.25, "bert", 1, 8, 9, user="eve"))
    file = io.StringIO()
    write(Workload(jobs), file)
    assert (
        file.getvalue() == "job,submitted_s,model,gpus,batch,iterations,user\na,3,bert,1,8,9,\nb,4.25,bert,1,8,9,eve\n"
    )


# ---- the real files ------------------------------------------------------------------------------------------------


@needs_data
def test_the_calibrated_workloads_are_read():
    workload = read(f"{DATA}/calibrated/workloads.csv", {"n": "240", "seed": "3"})
    assert len(workload.jobs) == 240
    assert {job.model for job in workload.jobs} <= {"bert", "cifar10", "deepspeech2", "imagenet", "ncf", "yolov3"}
    assert all(job.duration_s and job.duration_s > 0 for job in workload.jobs)


@pytest.mark.slow
@needs_data
def test_the_philly_trace_survives_a_conversion(tmp_path):
    workload = read(f"{DATA}/philly/philly.csv")
    assert len(workload.jobs) == 82_247
    assert workload.jobs[0].submitted == 0.0
    path = tmp_path / "ours.csv"
    with open(path, "w", newline="", encoding="utf-8") as file:
        write(workload, file)
    assert read(path).jobs == workload.jobs
