"""System accounts of Carpool's users. A service that runs as root runs each user's jobs under that user's uid. A user
without a login on this machine gets a uid from a range of Carpool's own."""

import pwd
from collections.abc import Iterable

ADMIN = "admin"
"""Name of the administrator, whose jobs run as the service's own user."""
FIRST_UID = 7_000_000
"""First uid of Carpool's own range, above those for logins (60,000) and containers (6,000,000 by default)."""


def account(uid: int) -> pwd.struct_passwd:
    """Return name, group, home and shell of a uid, also of one that the system does not know."""
    try:
        return pwd.getpwuid(uid)
    except KeyError:
        return pwd.struct_passwd((f"uid{uid}", "x", uid, uid, "", "/", "/bin/sh"))


def uid_for(name: str, taken: Iterable[int | None], before: int | None = None) -> int:
    """Return the uid of a login name; else the one that the user had `before`, which owns their files; else the next
    uid of Carpool's range."""
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        if before is not None:
            return before
        return max((uid for uid in taken if uid is not None and uid >= FIRST_UID), default=FIRST_UID - 1) + 1
