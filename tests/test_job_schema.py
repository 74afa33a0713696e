"""One definition of a job: every edge has the same fields with the same ranges, and a new field appears on all."""

import io
import json
import re
from dataclasses import dataclass, fields, make_dataclass

import click
import pytest
from click.testing import CliRunner

from carpool import job_schema
from carpool.core.model import Job
from carpool.errors import InputError
from carpool.field_types import Duration, WholeNumber
from carpool.job_schema import FIELDS, PRIORITY, Edge, Spec, fields_of, job_field, names, on
from carpool.live.commands import job_file
from carpool.live.commands.submit import job_options, submit
from carpool.live.commands.users import user
from carpool.live.http import messages
from carpool.sim import workload

LEAST = {"command": ["true"], "directory": "/"}


@dataclass(frozen=True, slots=True)
class WiderSpec(Spec):
    """The fields of a job, and one more."""

    patience_s: float | None = job_field(Duration(1.0, 1e6), "Time that the job should wait at most.")


WIDER = fields_of(WiderSpec)


# ---- a new field ---------------------------------------------------------------------------------------------------


def test_one_line_adds_an_option_to_submit():
    @click.command()
    @job_options(WIDER)
    def command(**given):
        click.echo(json.dumps(given["patience_s"]))

    assert re.search(
        r"--patience DURATION +Time that the job should wait at most", CliRunner().invoke(command, "--help").output
    )
    assert CliRunner().invoke(command, ["--patience", "2h"]).output == "7200.0\n"


def test_one_line_adds_a_field_to_the_request():
    model = messages.job_request(WIDER)
    assert model(**LEAST, patience_s=60).model_dump(exclude_unset=True)["patience_s"] == 60.0
    schema = model.model_json_schema()["properties"]["patience_s"]
    assert {"type": "number", "minimum": 1.0, "maximum": 1e6} in schema["anyOf"]
    assert schema["description"] == "Time that the job should wait at most."
    with pytest.raises(ValueError, match="must be a number of seconds from 1 to 1e\\+06"):
        model(**LEAST, patience_s=0)


def test_one_line_adds_a_field_to_job_files(tmp_path):
    (tmp_path / "job.yaml").write_text("command: x\npatience: 2h\n")
    assert job_file.read(tmp_path / "job.yaml", WIDER)["patience_s"] == 7200.0
    (tmp_path / "job.toml").write_text('command = "x"\npatience = "never"\n')
    with pytest.raises(InputError, match=r"job.toml: patience: 'never': write a duration such as 90s"):
        job_file.read(tmp_path / "job.toml", WIDER)


def test_one_line_adds_a_field_to_stored_specs():
    values = job_schema.read({**LEAST, "patience_s": 5}, Edge.STORED, among=WIDER)
    assert WiderSpec(**values).patience_s == 5.0


def test_one_line_and_a_core_field_add_a_column(monkeypatch):
    wider_job = make_dataclass("Job", [("patience_s", float | None, None)], bases=(Job,), frozen=True)
    monkeypatch.setattr(workload, "Job", wider_job)
    columns = tuple(on(Edge.COLUMN, WIDER))
    jobs = workload.Workload((wider_job("a", 0.0, "bert", 1, 8, 10, patience_s=99.5),))
    file = io.StringIO()
    workload.write(jobs, file, columns)
    assert file.getvalue() == "job,submitted_s,model,gpus,batch,iterations,patience_s\na,0,bert,1,8,10,99.5\n"
    header, line = (text.split(",") for text in file.getvalue().splitlines())
    row = workload.CsvRow("jobs.csv", {})
    row.values = line
    assert (
        row.job([(header.index(one.name), one, one.attribute or one.name) for one in columns if one.name in header])
        == jobs.jobs[0]
    )


def test_one_line_adds_a_row_to_the_documentation():
    line = next(line for line in job_schema.field_table(WIDER).splitlines() if "patience" in line)
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[:3] == ["`patience`", "`patience_s`", "`patience_s`"]


# ---- the edges agree -----------------------------------------------------------------------------------------------


def test_every_edge_has_the_fields_of_the_schema():
    own = {"words", "home", "as_json", "dry_run", "wait", "clean_env", "desktop"}
    assert {parameter.name for parameter in submit.params} - own == {one.name for one in on(Edge.OPTION)}
    request = {name for name, one in messages.JobRequest.model_fields.items() if not one.deprecated}
    assert request == {one.name for one in on(Edge.REQUEST)}
    stored = {one.name: None for one in on(Edge.STORED)}
    assert set(Spec(("true",), "/").plain()) <= set(stored)
    columns = {one.attribute or one.name for one in on(Edge.COLUMN)}
    derived = {
        "min_accumulation",
        "can_start_ahead",
        "saves",
        "guess",
    }  # the scheduler and what the user gave decide them
    assert columns == {one.name for one in fields(Job)} - derived


def test_the_request_documents_the_ranges_of_the_schema():
    properties = messages.JobRequest.model_json_schema()["properties"]
    for one in on(Edge.REQUEST):
        found = properties[one.name]
        found = found["anyOf"][0] if "anyOf" in found else found
        for key, value in (one.request_type or one.type).json_schema().items():
            assert found[key] == value, one.name


@pytest.mark.parametrize("one", [one for one in FIELDS if isinstance(one.type, WholeNumber)], ids=lambda one: one.name)
def test_every_edge_refuses_what_is_out_of_range(one):
    for value in (one.type.low - 1, one.type.high + 1):
        for read in (one.type.check, one.type.from_file, lambda value: one.type.from_cell(str(value))):
            with pytest.raises(ValueError, match=r"must be|write a size"):
                read(value)


def test_there_is_one_range_of_priorities():
    limits = messages.LimitsRequest.model_json_schema()["properties"]["max_priority"]["anyOf"][0]
    change = messages.PriorityRequest.model_json_schema()["properties"]["priority"]
    for found in (limits, change):
        assert (found["minimum"], found["maximum"]) == (PRIORITY.low, PRIORITY.high)
    with pytest.raises(InputError, match="max-priority: '1000001' must be a whole number"):
        CliRunner().invoke(user, ["add", "eve", "--max-priority", str(PRIORITY.high + 1)], catch_exceptions=False)


# ---- names of release 0.1 ------------------------------------------------------------------------------------------


def test_old_names_are_read_on_every_edge(tmp_path):
    (tmp_path / "old.yaml").write_text("command: x\ntime: 45m\nbatch_size: 64\ngrace: 5s\n")
    found = job_file.read(tmp_path / "old.yaml")
    assert (found["duration_s"], found["batch"], found["grace_s"]) == (2700.0, 64, 5.0)
    assert job_schema.read({"time_s": 60}, Edge.STORED) == {"duration_s": 60.0}
    assert {"--time", "--batch-size"} <= {option for parameter in submit.params for option in parameter.opts}
    assert messages.JobRequest(**LEAST, time_s=60).model_dump(exclude_unset=True)["time_s"] == 60.0
    assert messages.JobRequest.model_fields["time_s"].deprecated
    assert "time_s" not in names(Edge.COLUMN) or names(Edge.COLUMN)["time_s"].name == "duration_s"


def test_a_field_under_two_names_is_refused():
    with pytest.raises(InputError, match="duration_s is given twice, under two names; remove one"):
        job_schema.read({"time_s": 60, "duration_s": 50}, Edge.STORED)
