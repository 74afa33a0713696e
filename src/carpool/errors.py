"""Errors that a user can fix: the command line prints them as one line and exits with code 2."""

from collections.abc import Iterable
from difflib import get_close_matches


class InputError(ValueError):
    """Wrong input. The message is one line: where the problem is, what it is, and how to fix it."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return a hint for a misspelt name: "did you mean …?", or the list of known names."""
    known = sorted(known)
    close = get_close_matches(word.lower(), [name.lower() for name in known], n=1, cutoff=0.5)
    for name in known:
        if close and name.lower() == close[0]:
            return f"did you mean {name}?"
    return f"known: {', '.join(known) or 'none'}"
