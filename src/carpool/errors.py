"""Errors that a user can fix: the command line prints them as one line and exits with code 2."""

from collections.abc import Iterable
from difflib import get_close_matches

MOST_SHOWN = 1000
"""Characters of a message."""


def on_one_line(text: str) -> str:
    """Return a message as one short line that is harmless in a terminal, whatever input it quotes. Of a very long one,
    the beginning (the place) and the end (the remedy) are kept."""
    if not text.isprintable():
        text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    half = MOST_SHOWN // 2
    return text if len(text) <= MOST_SHOWN else f"{text[:half]} ... {text[5 - half :]}"


class InputError(ValueError):
    """Wrong input. The message is one line: where the problem is, what it is, and how to fix it."""

    def __init__(self, message: object = "") -> None:
        super().__init__(on_one_line(str(message)))


def nearest(word: str, known: Iterable[str]) -> str:
    """Return a hint for a misspelt name: "did you mean …?", or the list of known names."""
    known = sorted(known)
    close = get_close_matches(word.lower(), [name.lower() for name in known], n=1, cutoff=0.5)
    for name in known:
        if close and name.lower() == close[0]:
            return f"did you mean {name}?"
    return f"known: {', '.join(known) or 'none'}"
