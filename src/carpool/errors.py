"""Errors that a person can mend: the command line prints them as one line and exits with code 2."""

from collections.abc import Iterable
from difflib import get_close_matches


class InputError(ValueError):
    """Something a person gave us is wrong. The message is one line: where, what, and what to do."""


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint for a misspelt name: "did you mean …?", or what there is."""
    known = sorted(known)
    close = get_close_matches(word.lower(), [name.lower() for name in known], n=1, cutoff=0.5)
    for name in known:
        if close and name.lower() == close[0]:
            return f"did you mean {name}?"
    return f"known: {', '.join(known) or 'none'}"
