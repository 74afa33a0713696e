"""Feed damaged and hostile inputs to every parser that reads what others wrote.

`python -m tests.attack.fuzz --seconds 60 --seed 1`. An input is accepted, or refused with an error that the parser's
callers handle, in one line, within a second and without much memory; see `parsers.py` for the table. The first input
that breaks this is written to a file and named; add it to `corpus/` under the parser's name together with the fix. Exit
code 1: a parser failed.
"""

import argparse
import contextlib
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

from carpool.errors import InputError
from tests.attack.mutate import BOMBS, variant
from tests.attack.parsers import PARSERS, forget, one_line, seeds_of

LONG_S = 10.0
"""Seconds in which an input must be done with; the machine may be busy. A parser that hangs never is."""
MEMORY = 300 << 20
"""Bytes by which this process may grow while a parser runs."""


class ParserFailed(AssertionError):
    """A parser did something else than accept or refuse."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError(f"not done after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def feed(name: str, data: bytes, folder: Path) -> bool:
    """Give one input to a parser; return whether it was accepted. Raise `ParserFailed`."""
    parser = PARSERS[name]
    try:
        with time_limit(LONG_S), warnings.catch_warnings():
            warnings.simplefilter("error")
            parser.parse(data, folder)
    except Exception as error:
        if not isinstance(error, parser.refuses):
            raise ParserFailed(f"{name}: {type(error).__name__}: {error}") from error
        if isinstance(error, InputError):
            check_line(name, error)
        return False
    finally:
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    return True


def check_line(name: str, error: Exception) -> None:
    try:
        one_line(error)
    except AssertionError as wrong:
        raise ParserFailed(f"{name}: {wrong}") from error


def inputs(name: str, drawn: random.Random) -> Iterator[bytes]:
    """Yield inputs without end: those of the corpus, the bombs, then variants."""
    seeds = seeds_of(name)
    yield from seeds
    yield from BOMBS
    while True:
        yield variant(drawn.choice(seeds), seeds, drawn)


def fuzz(name: str, seed: int, count: int | None = None, seconds: float | None = None) -> tuple[int, int]:
    """Feed a number of variants, or for some time; return how many inputs there were and how many were accepted."""
    drawn = random.Random(f"{name} {seed}")
    until = time.monotonic() + (seconds if seconds is not None else 1e9)
    limit = None if count is None else len(seeds_of(name)) + len(BOMBS) + max(1, round(count * PARSERS[name].weight))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    number = accepted = 0
    with tempfile.TemporaryDirectory(prefix="carpool-fuzz-") as folder:
        for data in inputs(name, drawn):
            if number == limit or time.monotonic() > until:
                break
            number += 1
            try:
                accepted += feed(name, data, Path(folder))
            except ParserFailed as error:
                with tempfile.NamedTemporaryFile(prefix=f"carpool-{name}-", delete=False) as kept:
                    kept.write(data)
                raise ParserFailed(f"{error}\nthe input is in {kept.name}") from error
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    if grown > MEMORY:
        raise ParserFailed(f"{name}: needed {grown >> 20} MiB of memory")
    return number, accepted


def main() -> int:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--seconds", type=float, default=60.0, help="for all parsers together")
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--only", choices=sorted(PARSERS))
    given = arguments.parse_args()
    names = [given.only] if given.only else list(PARSERS)
    failed = 0
    try:
        for name in names:
            try:
                number, accepted = fuzz(name, given.seed, seconds=given.seconds / len(names))
                print(f"{name:14} {number:6} inputs, {accepted} accepted, the others refused in one line")
            except ParserFailed as error:
                failed += 1
                print(error)
    finally:
        forget()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
