"""The users that the service knows: their rows, as the HTTP API keeps them, and the uids that their jobs run under."""

from collections.abc import Mapping
from os import getuid as own_uid
from typing import Any

Row = dict[str, Any]


class Users:
    """Rows of users, as the journal has them."""

    def __init__(self, rows: Mapping[str, Row]) -> None:
        self.rows: dict[str, Row] = dict(rows)

    def uid_of(self, user: str) -> int | None:
        """Return the uid that a user's jobs run under; None: that of the service."""
        uid = self.rows.get(user, {}).get("uid") if own_uid() == 0 else None
        return None if uid == 0 else uid

    @property
    def separate(self) -> bool:
        """Whether some user's jobs run under a uid of their own."""
        return any(self.uid_of(user) is not None for user in self.rows)
