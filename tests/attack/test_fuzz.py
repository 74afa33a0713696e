"""Every parser of outside input accepts it, or refuses it in one line, in bounded time and memory. See fuzz.py."""

import pytest

from tests.attack.fuzz import ParserFailed, feed, fuzz
from tests.attack.parsers import PARSERS, Parser, forget, seeds_of
from tests.support.effort import cases


@pytest.fixture(autouse=True, scope="module")
def clean():
    yield
    forget()


@pytest.mark.slow
@pytest.mark.parametrize("name", PARSERS)
def test_a_parser_accepts_an_input_or_refuses_it_in_one_line(name):
    """`make attack` tries many more."""
    number, accepted = fuzz(name, seed=1, count=cases(200))
    assert number >= len(seeds_of(name))
    assert accepted, "the valid inputs of the corpus are accepted"


@pytest.mark.parametrize("error", [KeyError("x"), RecursionError("deep"), MemoryError("much")])
def test_any_other_error_is_found(monkeypatch, tmp_path, error):
    def parse(data, folder):
        (folder / "left").touch()
        raise error

    monkeypatch.setitem(PARSERS, "spec", Parser(parse))
    with pytest.raises(ParserFailed, match=type(error).__name__):
        feed("spec", b"", tmp_path)
    assert not list(tmp_path.iterdir())
