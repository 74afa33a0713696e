"""The users that the service knows: their rows, as the HTTP API keeps them, and the uids that their jobs run under.

Every row is in the journal and in `users.json` beside it, which is written through before a change is answered. Rows
are numbered, so that the later one of the two counts: a journal that lost its tail neither forgets a user nor restores
a token that was revoked. `requests.py` changes rows, `dispatcher.py` and `recovery.py` ask for uids.
"""

import asyncio
import json
import os
from collections.abc import Mapping
from os import getuid as own_uid
from typing import Any

from carpool.core.model import Limits
from carpool.errors import InputError
from carpool.live.accounts import ADMIN
from carpool.live.home import OWN_JSON_BYTES, Home, read_json, sync_directory, write_private
from carpool.live.service.user_files import UserFiles

Row = dict[str, Any]
VERSION = "version"
"""Field of a row that counts its changes."""


class OwnerUncertain(InputError):
    """It is not certain under which uid a user's jobs run, so they must not start."""


class Users:
    """Rows of users."""

    def __init__(self, rows: Mapping[str, Row], home: Home | None = None) -> None:
        """`home`: where the copy beside the journal is written; None: nowhere."""
        self.rows: dict[str, Row] = dict(rows)
        self.notes: list[str] = []
        """Lines for the operator about the state in which the copy was found."""
        self.changing = asyncio.Lock()
        """Held during a change, because the copy is written as a whole."""
        self.files = UserFiles()
        self._home = home

    @classmethod
    def load(cls, home: Home, journalled: Mapping[str, Row]) -> "Users":
        """Return the later row of every user from the journal and the copy beside it, and write the copy again."""
        copied = read_json(home.users, OWN_JSON_BYTES)
        damaged = home.users.exists() and not isinstance(copied, dict)
        rows = {name: row for name, row in journalled.items() if isinstance(row, dict)}
        for name, row in copied.items() if isinstance(copied, dict) else ():
            if isinstance(row, dict) and (name not in rows or _version(row) > _version(rows[name])):
                rows[name] = row
        users = cls(rows, home)
        if damaged:
            users.notes.append(f"{home.users.name} cannot be read; the users are those of the journal")
        if rows != copied and (rows or damaged):
            try:
                users.write(rows)
            except OSError as error:
                users.notes.append(f"{home.users.name} cannot be written ({error.strerror}); make room and start again")
        return users

    def next_row(self, name: str, row: Mapping[str, Any]) -> Row:
        """Return a row with the number of its change."""
        return {**row, VERSION: _version(self.rows.get(name, {})) + 1}

    def write(self, rows: Mapping[str, Row]) -> None:
        """Write the copy beside the journal; durable on return."""
        if self._home is not None:
            write_private(self._home.users, json.dumps(rows, indent=1))
            sync_directory(self._home.path)

    def restore(self, user: str, uid: int) -> None:
        """Add a user that is only in a job's record, without a token: only the uid is certain."""
        self.rows[user] = self.next_row(user, {"uid": uid, "token_hash": "", "role": "user", "revoked": True})

    def uid_of(self, user: str) -> int | None:
        """Return the uid that a user's jobs run under; None: that of the service. Raise `OwnerUncertain`."""
        doubt = self.doubt(user)
        if doubt:
            raise OwnerUncertain(doubt)
        return None if own_uid() != 0 or user == ADMIN else int(self.rows[user]["uid"])

    def group_of(self, user: str) -> str:
        """Return the group that a user's new jobs belong to; empty: none."""
        found = self.rows.get(user, {}).get("group")
        return found if isinstance(found, str) else ""

    def doubt(self, user: str, recorded: int | None = None) -> str:
        """Return why it is not certain under which uid a user's jobs run; empty: it is. Root must be certain: a job of
        a user whose uid is lost would run as root. `recorded`: the uid under which a job was submitted, if known: its
        user may have been removed since, and another one got the name."""
        if own_uid() != 0 or user == ADMIN:
            return ""
        uid = self.rows.get(user, {}).get("uid")
        if isinstance(uid, int) and not isinstance(uid, bool) and uid > 0:
            if recorded is None or recorded == uid:
                return ""
            return f"it was submitted under uid {recorded}, and user {user} has uid {uid} now"
        return f"user {user} has no uid here, and jobs of users do not run as root; `carpool user add {user}` gives one"

    def lost_limits(self, known: Mapping[str, Limits]) -> dict[str, Limits]:
        """Return the limits in rows that differ from the `known` ones: the journal lost them."""
        rows = {name: row for name, row in self.rows.items() if "max_jobs" in row and "max_gpus" in row}
        wanted = {name: Limits(row["max_jobs"], row["max_gpus"]) for name, row in rows.items()}
        return {name: limits for name, limits in wanted.items() if limits != known.get(name, Limits())}

    @property
    def separate(self) -> bool:
        """Whether some user's jobs run under a uid of their own."""
        return own_uid() == 0 and any(row.get("uid") for row in self.rows.values())


def recorded_uid(user: str, users: Users) -> int:
    """Return the uid to write beside a job, in a file that only the service's user can change."""
    uid = users.uid_of(user)
    return os.getuid() if uid is None else uid


def _version(row: Mapping[str, Any]) -> int:
    found = row.get(VERSION, 0)
    return found if isinstance(found, int) else 0
