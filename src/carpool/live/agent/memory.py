"""What an agent keeps over its restarts: its identity, and the highest term that it has obeyed."""

import json
import secrets
from pathlib import Path

from carpool.errors import InputError
from carpool.live.home import read_own_json, write_private


class AgentMemory:
    """The file `agent.json` in the agent's home."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.identity = ""
        self.term = 0
        """0: no service was ever obeyed, so nothing can run here."""

    def load(self) -> None:
        """Read the file, or make a new identity. Raise `InputError` for a file that cannot be trusted. Blocks."""
        data = read_own_json(self._path)
        if data is None and not self._path.exists():
            self.identity = secrets.token_hex(16)
            self._write(self.term)
            return
        try:
            self.identity, self.term = str(data["identity"]), int(data["term"])
        except (KeyError, TypeError, ValueError):
            raise InputError(f"{self._path}: cannot be read; remove the agent's home to join as a new node") from None

    def remember(self, term: int) -> None:
        """Never obey a service of an earlier term again; durable on return. Blocks."""
        if term > self.term:
            self._write(term)
            self.term = term

    def _write(self, term: int) -> None:
        write_private(self._path, json.dumps({"identity": self.identity, "term": term}))
