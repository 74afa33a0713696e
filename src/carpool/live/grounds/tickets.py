"""Tickets: how a pilot learns where the service is and which token it has, without an argument or a variable.

A ticket is a private file in the service's home. Its token is made from the home's own key and the pilot's name, so
that the service keeps no list of them: it is good for as long as the ground says that the pilot runs, and for the node
on which it runs.
"""

import hashlib
import hmac
import json
import os
import secrets
from pathlib import Path
from typing import Any

from carpool.errors import InputError
from carpool.live.grounds.base import JoinTicket
from carpool.live.home import read_own_json, write_private

PREFIX = "pilot"


class PilotKey:
    """The key of a home, from which the tokens of its pilots are made."""

    def __init__(self, path: Path) -> None:
        """Read the key, or make one. Blocks."""
        data = read_own_json(path)
        if data is None:
            if path.exists():
                raise InputError(f"{path}: cannot be trusted; remove it, and all nodes of the ground join again")
            data = {"key": secrets.token_hex(32)}
            write_private(path, json.dumps(data))
        self._key = str(data["key"]).encode()
        self.service = hashlib.sha256(b"name " + self._key).hexdigest()[:8]
        """Short name of the home."""

    def token(self, pilot: str) -> str:
        return f"{PREFIX}.{pilot}.{self._proof(pilot)}"

    def pilot_of(self, token: str) -> str | None:
        """Return the pilot that a token was made for; None: it was not made here."""
        words = token.split(".")
        if len(words) != 3 or words[0] != PREFIX or not token.isascii():
            return None
        return words[1] if hmac.compare_digest(words[2], self._proof(words[1])) else None

    def _proof(self, pilot: str) -> str:
        return hmac.new(self._key, pilot.encode(), hashlib.sha256).hexdigest()


def new_pilot() -> str:
    """Return a name for a pilot."""
    return secrets.token_hex(6)


def write_ticket(folder: Path, ticket: JoinTicket) -> Path:
    """Write a ticket where only its user can read it. Blocks."""
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{ticket.pilot}.json"
    write_private(path, json.dumps(ticket.plain()))
    return path


def read_ticket(path: Path) -> JoinTicket:
    """Read a ticket on the node. Raise `InputError` for one that others may have written or read."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; the nodes must see the home of the service") from None
    data = read_own_json(path)
    if mode & 0o077 or not isinstance(data, dict):
        raise InputError(f"{path}: is no private file of this user; the pilot cannot trust it")
    return ticket_from(data)


def ticket_from(data: dict[str, Any]) -> JoinTicket:
    known = {name: data[name] for name in JoinTicket.__slots__ if name in data}
    return JoinTicket(**{**known, "urls": tuple(known["urls"])})


def remove_ticket(folder: Path, pilot: str) -> None:
    """Forget a pilot that has ended. Blocks."""
    (folder / f"{pilot}.json").unlink(missing_ok=True)
