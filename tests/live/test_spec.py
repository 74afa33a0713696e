"""The service checks every field of a spec, and its message names the field."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.errors import InputError
from carpool.job_schema import Edge, names
from carpool.live.spec import Spec, expand, from_json, parse

LEAST = {"command": ["true"], "directory": "/tmp"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("command", []),
        ("command", "true"),
        ("command", [""]),
        ("command", ["true", 5]),
        ("command", ["a\0b"]),
        ("command", ["x" * 200_000]),
        ("directory", "relative"),
        ("directory", 5),
        ("gpus", 0),
        ("gpus", True),
        ("gpus", 1.5),
        ("gpus", 10**9),
        ("batch", -1),
        ("iterations", 0),
        ("model", "bert\n"),
        ("name", "\x1b[2J"),
        ("name", "a‮b"),
        ("name", "x" * 201),
        ("env", {"A B": "c"}),
        ("env", {"A": 5}),
        ("env", {"CARPOOL_JOB": "1"}),
        ("env", {"RANK": "1"}),
        ("env", ["A=b"]),
        ("duration_s", float("nan")),
        ("duration_s", float("inf")),
        ("duration_s", "10"),
        ("priority", 10**6 + 1),
        ("exclusive", "yes"),
        ("max_slowdown", 0.5),
        ("after", "12"),
        ("after", ["1\n2"]),
        ("after", ["../1"]),
        ("retries", -1),
        ("can_shrink", 1),
        ("cpus", 0),
        ("memory", "lots"),
        ("memory", 5),
        ("memory", "2GiB"),
        ("array", "0-3"),
        ("grace_s", -1.0),
        ("snapshot", "yes"),
        ("colour", "blue"),
        ("gpu", 1),
    ],
)
def test_a_bad_field_is_named(field, value):
    with pytest.raises(InputError) as raised:
        parse({**LEAST, field: value})
    message = str(raised.value)
    assert field in message
    assert message.isprintable(), "a message must not carry control characters into a terminal"
    assert len(message) < 400


def test_a_misspelt_field_is_guessed():
    with pytest.raises(InputError, match="did you mean gpus"):
        parse({**LEAST, "gpu": 1})


@pytest.mark.parametrize("field", ["command", "directory"])
def test_a_required_field_must_be_given(field):
    with pytest.raises(InputError, match=f"{field}: is missing"):
        parse({key: value for key, value in LEAST.items() if key != field})


@given(
    st.dictionaries(
        st.sampled_from(list(names(Edge.STORED))),
        st.none() | st.integers() | st.text() | st.lists(st.text()) | st.floats(),
    )
)
def test_bad_input_raises_only_input_errors(data):
    try:
        spec = parse(data)
    except InputError:
        return
    assert from_json(spec.to_json()) == spec


def test_a_spec_survives_its_json():
    spec = parse(
        {**LEAST, "env": {"A": "ü"}, "after": ["1"], "memory": 2**31, "max_slowdown": 1.5, "can_shrink": False}
    )
    assert from_json(spec.to_json()) == spec


def test_a_spec_that_release_0_1_stored_is_read():
    old = '{"command":["true"],"directory":"/","time_s":60.0,"after":["3"],"snapshot":false,"array_index":2}'
    assert from_json(old) == Spec(("true",), "/", duration_s=60.0, after=("3",), array_index=2)


def test_an_array_is_one_job_for_each_index():
    specs = expand(Spec(("true",), "/", name="sweep"), "0-2,7")
    assert [(spec.name, spec.array_index) for spec in specs] == [
        ("sweep[0]", 0),
        ("sweep[1]", 1),
        ("sweep[2]", 2),
        ("sweep[7]", 7),
    ]
    for bad in ("", "3-1", "1,1", "0-99999", "a", "-1", "1-", "9" * 30):
        with pytest.raises(InputError, match="array"):
            expand(specs[0], bad)
