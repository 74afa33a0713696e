"""The system's accounts behind users. A service that runs as root gives every user's jobs that user's own uid; somebody
who has no login on this machine gets a uid of their own from a range that nobody else uses."""

import pwd
from collections.abc import Iterable

FIRST_UID = 7_000_000
"""Above what systems hand out to people (60,000) and to containers (up to 6,000,000 by default)."""


def account(uid: int) -> pwd.struct_passwd:
    """Name, group, home and shell of a uid, whether the system knows it or not."""
    try:
        return pwd.getpwuid(uid)
    except KeyError:
        return pwd.struct_passwd((f"uid{uid}", "x", uid, uid, "", "/", "/bin/sh"))


def uid_for(name: str, taken: Iterable[int | None], before: int | None = None) -> int:
    """The uid of a login name; else the one that the user had `before`, for files and jobs of theirs are there; else
    the next one of our own range."""
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        if before is not None:
            return before
        return max((uid for uid in taken if uid is not None and uid >= FIRST_UID), default=FIRST_UID - 1) + 1
