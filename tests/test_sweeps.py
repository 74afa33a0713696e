"""Parameter sweeps: which jobs they make, and which sweeps are refused."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.errors import InputError
from carpool.field_types import FieldError
from carpool.live.spec import Spec, expand_sweep
from carpool.sweeps import SweepValues, combinations, fill

COMMAND = Spec(command=("python", "train.py", "--lr={lr}", "--seed", "{seed}", '{"json": {}}'), directory="/", name="s")


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("lr=0.1,0.01", ("0.1", "0.01")),
        ("lr=1-4", ("1", "2", "3", "4")),
        ("lr=1,5-6,x", ("1", "5", "6", "x")),
        ("lr=1e-3, -1", ("1e-3", "-1")),
        ("lr=a=b", ("a=b",)),
    ],
)
def test_values_of_an_option(text, values):
    assert SweepValues().from_option(text) == {"lr": values}


@pytest.mark.parametrize("text", ["lr", "lr=", "lr=1,,2", "l r=1", "=1", "lr=1,1", "lr=5-3", "lr=1-99999"])
def test_wrong_options_are_refused(text):
    with pytest.raises(FieldError):
        SweepValues().from_option(text)


def test_values_of_a_file_are_numbers_texts_or_ranges():
    assert SweepValues().from_file({"lr": [0.1, 1e-05], "seed": "1-2", "n": 3}) == {
        "lr": ("0.1", "1e-05"),
        "seed": ("1", "2"),
        "n": ("3",),
    }
    for wrong in ({"lr": []}, {"lr": [True]}, {"lr": [[1]]}, [1], {}, {"a": "1-5000", "b": "1-5000"}):
        with pytest.raises(FieldError):
            SweepValues().check(wrong)


def test_every_combination_is_a_job_with_the_values_in_command_and_name():
    jobs = expand_sweep(COMMAND, {"lr": ("0.1", "0.01"), "seed": ("1", "2", "3")})
    assert [job.array_index for job in jobs] == list(range(6))
    assert jobs[4].command == ("python", "train.py", "--lr=0.01", "--seed", "2", '{"json": {}}')
    assert jobs[4].name == "s[lr=0.01,seed=2]"


def test_a_parameter_that_the_command_does_not_use_is_refused():
    with pytest.raises(InputError, match=r"does not say \{width\}"):
        expand_sweep(COMMAND, {"width": ("1",), "lr": ("1",), "seed": ("1",)})


@given(st.dictionaries(st.sampled_from("abc"), st.lists(st.sampled_from("12345"), min_size=1, unique=True), min_size=1))
def test_the_number_of_jobs_is_the_product(values):
    found = combinations({name: tuple(some) for name, some in values.items()})
    assert len(found) == math.prod(map(len, values.values()))
    assert len({tuple(one.items()) for one in found}) == len(found)


def test_values_are_not_filled_in_twice():
    assert fill("{a} {b} {c}", {"a": "{b}", "b": "2"}) == "{b} 2 {c}"
