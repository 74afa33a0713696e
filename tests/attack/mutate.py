"""Damaged and hostile variants of a valid input: bytes, words and JSON values are changed at random.

The same seed gives the same variants. `fuzz.py` feeds them to every parser.
"""

import json
import random
import re
from typing import Any

NUMBERS = [
    "0", "-1", "1", "2", "1e308", "1e400", "-1e400", "NaN", "Infinity", "-Infinity", "0.1", "1e-320", "-0", "00", "1_0",
    "2147483648", "4294967296", "9223372036854775807", "9223372036854775808", "18446744073709551616", "1e9999999",
    "0x10", "١٢", "²", "1.5h", "-3d", "999999999999d", "1e300TiB", "1 GiB", "9" * 40, "9" * 5000, "0x" + "f" * 9000,
]  # fmt: skip
WORDS = [
    "null", "true", "[]", "{}", '"', "'", ",", ":", "=", "-", "~", "<<", "&a", "*a", "!!python/object:os.system", "%s",
    "#", "---", "...", "|", ">", "@", "`", "$(id)", "nan", "inf", "job", "command", "gpus", "../../etc/passwd", "/",
    "{" * 30, "[" * 30, "", " ", "\0", "\n", "\r\n", "\t", "\x1b[2J", "\u202e", "\ud7ff", "\ufeff",
    "é" * 300, "a" * 5000,
]  # fmt: skip
FIGURES = [0, -1, 1, 2**31, 2**63, 2**64, 10**40, -(2**63), 0.5, -0.0, 1e308, float("nan"), float("inf")]
TEXTS = ["", " ", "x", "\0", "a" * 3000, "../..", "1", "nan", "\ud800"]
LISTS = [[], [[]], [None], [0] * 200, ["x", "x"], [[[[[[1]]]]]]]
VALUES: list[Any] = [None, True, False, *FIGURES, *TEXTS, *LISTS, {}, {"": None}, {"a": {"b": []}}, {"x": 1, "y": 2}]
_WORD = re.compile(rb"-?[0-9][0-9.e+-]*|[A-Za-z_]+|[^\sA-Za-z0-9_]")
LARGEST = 1 << 16
"""Bytes of a variant."""
DEPTHS = tuple(
    opening * 100_000 + closing * 100_000 for opening, closing in ((b"[", b"]"), (b'{"a":', b"}"), (b"(", b")"))
)
"""Inputs that are nested deeper than a recursive parser can follow."""
NINE = [b"%c: &%c [%s]" % (name, name, b",".join([b"*%c" % (name - 1)] * 9)) for name in range(98, 118)]
"""Lines of YAML, each of which names the one before nine times."""
BOMBS = (
    *DEPTHS,
    b"",
    b"\0" * 5000,
    b"\xff\xfe" * 500,
    b"9" * 100_000,
    b"- " * 50_000,
    b"\n".join([b"a: &a [x,x,x,x,x,x,x,x,x]", *NINE]),
    b"a = " + b"[" * 20_000,
    b"a." * 20_000 + b"a = 1",
    b"\x1f\x8b\x08\0\0\0\0\0\0\3",
    b"," * 60_000,
    b'"' + b"x" * 200_000,
)
"""Inputs that every parser gets as they are."""


def variant(source: bytes, others: list[bytes], drawn: random.Random) -> bytes:
    """Return a variant of an input; `others` are inputs of the same kind to take parts from."""
    data = source
    if drawn.random() < 0.6 and (changed := _json_variant(data, drawn)) is not None:
        data = changed
    for _ in range(drawn.choice((0, 1, 1, 2, 3, 8)) if data != source else drawn.choice((1, 1, 2, 3, 8))):
        data = drawn.choice(_CHANGES)(data, others, drawn)
    return data[:LARGEST]


def _json_variant(data: bytes, drawn: random.Random) -> bytes | None:
    """Change values in a JSON text, or in one line of several; None where it is none."""
    lines = data.split(b"\n")
    whole = drawn.random() < 0.5
    number = 0 if whole else drawn.randrange(len(lines))
    try:
        value = json.loads(data if whole else lines[number])
    except (ValueError, RecursionError):
        return None
    for _ in range(drawn.choice((1, 1, 2, 5))):
        value = _change(value, drawn)
    try:
        changed = json.dumps(value).encode()
    except ValueError:
        return None
    if whole:
        return changed
    return b"\n".join([*lines[:number], changed, *lines[number + 1 :]])


def _change(value: Any, drawn: random.Random) -> Any:
    """Change one place somewhere below a value."""
    if isinstance(value, dict) and value and drawn.random() < 0.9:
        name = drawn.choice(sorted(value))
        how = drawn.random()
        if how < 0.1:
            return {key: inner for key, inner in value.items() if key != name}
        if how < 0.2:
            return {**value, drawn.choice(("", "x", name + "_", name.upper())): value[name]}
        return {**value, name: _change(value[name], drawn)}
    if isinstance(value, list) and value and drawn.random() < 0.9:
        at = drawn.randrange(len(value))
        how = drawn.random()
        if how < 0.1:
            return value[:at] + value[at + 1 :]
        if how < 0.2:
            return value[:at] + [value[at]] * drawn.choice((2, 3, 50)) + value[at:]
        return [*value[:at], _change(value[at], drawn), *value[at + 1 :]]
    if isinstance(value, int | float) and not isinstance(value, bool) and drawn.random() < 0.4:
        return drawn.choice((-value, value + 1, value - 1, value * 1000, str(value)))
    return drawn.choice(VALUES)


def _flip(data: bytes, others: list[bytes], drawn: random.Random) -> bytes:
    if not data:
        return data
    at = drawn.randrange(len(data))
    return data[:at] + bytes([drawn.randrange(256)]) + data[at + 1 :]


def _cut(data: bytes, others: list[bytes], drawn: random.Random) -> bytes:
    first, last = sorted((drawn.randint(0, len(data)), drawn.randint(0, len(data))))
    return data[:first] + data[last:] if drawn.random() < 0.7 else data[:last]


def _repeat(data: bytes, others: list[bytes], drawn: random.Random) -> bytes:
    first = drawn.randint(0, len(data))
    part = data[first : first + drawn.choice((1, 5, 40, 200))]
    return data[:first] + part * drawn.choice((2, 3, 20)) + data[first:]


def _splice(data: bytes, others: list[bytes], drawn: random.Random) -> bytes:
    other = drawn.choice(others)
    return data[: drawn.randint(0, len(data))] + other[drawn.randint(0, len(other)) :]


def _word(data: bytes, others: list[bytes], drawn: random.Random) -> bytes:
    """Replace a word by an interesting one: a number by a number most of the time."""
    found = list(_WORD.finditer(data[:4000]))
    if not found:
        return data
    word = drawn.choice(found)
    pool = NUMBERS if word[0][:1].isdigit() and drawn.random() < 0.8 else NUMBERS + WORDS
    return data[: word.start()] + drawn.choice(pool).encode("utf-8", "surrogatepass") + data[word.end() :]


def _insert(data: bytes, others: list[bytes], drawn: random.Random) -> bytes:
    at = drawn.randint(0, len(data))
    return data[:at] + drawn.choice(NUMBERS + WORDS).encode("utf-8", "surrogatepass") + data[at:]


def _line(data: bytes, others: list[bytes], drawn: random.Random) -> bytes:
    """Move, repeat or remove a line."""
    lines = data.split(b"\n")
    line = lines.pop(drawn.randrange(len(lines)))
    for _ in range(drawn.choice((0, 1, 1, 2, 30))):
        lines.insert(drawn.randint(0, len(lines)), line)
    return b"\n".join(lines)


_CHANGES = (_flip, _cut, _repeat, _splice, _word, _word, _word, _insert, _line)
