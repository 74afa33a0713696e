"""Tokens, the users they belong to, and the administrator's token file.

A token is 256 random bits. Only its SHA-256 is kept: passwords need a slow, salted hash because they can be guessed,
and a number of that size cannot. `Keyring.who` compares with every digest in constant time. The HTTP gate asks it at
every request; `carpool serve` creates the administrator's token; the service's store holds the users.
"""

import asyncio
import hashlib
import hmac
import os
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from carpool.errors import InputError
from carpool.live.accounts import ADMIN

__all__ = ["ADMIN", "AGENT", "Keyring", "Principal", "admin_token", "digest", "new_token", "read_token"]
TOKEN_BYTES = 32
AGENT = "agent"
"""Role of tokens that speak for a node and may do nothing else."""


@dataclass(frozen=True, slots=True)
class Principal:
    """The user who sent a request."""

    name: str
    admin: bool = False
    node: str = ""
    """The node that an agent's token speaks for; empty: the token belongs to a user or a pilot."""
    pilot: str = ""
    """The pilot that a token belongs to: its ground says for which node it speaks."""
    token_digest: str = field(default="", compare=False, repr=False)
    """Digest of the token that was sent."""

    @property
    def agent(self) -> bool:
        return bool(self.node or self.pilot)

    def may_change(self, owner: str) -> bool:
        """Return whether this user may read the logs of, cancel or change a job of that owner."""
        return self.admin or self.name == owner


def new_token() -> str:
    return secrets.token_urlsafe(TOKEN_BYTES)


def digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


class Keyring:
    """The digests of all valid tokens."""

    def __init__(
        self, admin_digest: str, digests: Mapping[str, str] | None = None, nodes: Mapping[str, str] | None = None
    ) -> None:
        """`nodes`: those names of `digests` that belong to agents, with the nodes that they speak for."""
        self._digests = {ADMIN: admin_digest}
        self._agents: dict[str, Principal] = {}
        """Agents by the digests of their tokens: there may be thousands."""
        self.pilot_of: Callable[[str], str | None] = lambda token: None
        """Returns the pilot that a token was made for: see `carpool.live.grounds.tickets`."""
        self._following: defaultdict[str, set[asyncio.Timeout]] = defaultdict(set)
        """What ends the waits of each user's streams."""
        for name, known in (digests or {}).items():
            self.add(name, known, (nodes or {}).get(name, ""))

    def who(self, token: str) -> Principal | None:
        offered, found = digest(token), None
        for name, known in self._digests.items():  # all of them, so that the time does not reveal which one was close
            if hmac.compare_digest(offered, known):
                found = name
        if found is None:
            pilot = self.pilot_of(token)
            if pilot is not None:
                return Principal(f"{AGENT}:pilot {pilot}", pilot=pilot)
            return self._agents.get(offered)  # the time reveals digests only, which no client can choose
        return Principal(found, found == ADMIN, token_digest=offered)

    def add(self, name: str, known: str, node: str = "") -> None:
        """Accept a token by its digest; `node`: the one that an agent's token speaks for."""
        if node:
            self._agents[known] = Principal(name, node=node)
        else:
            self._digests[name] = known

    def accepts(self, who: Principal) -> bool:
        """Return whether the token that a user sent is still valid: answers that take long ask again."""
        return self._digests.get(who.name) == who.token_digest

    @asynccontextmanager
    async def until_revoked(self, who: Principal) -> AsyncIterator[None]:
        """A wait that `revoke` ends at once, by `TimeoutError`."""
        async with asyncio.timeout(None) as wait:
            self._following[who.name].add(wait)
            try:
                yield
            finally:
                self._following[who.name].discard(wait)
                if not self._following[who.name]:
                    del self._following[who.name]

    def revoke(self, name: str) -> None:
        for wait in self._following.pop(name, ()):
            wait.reschedule(0.0)
        self._digests.pop(name, None)
        self._agents = {known: agent for known, agent in self._agents.items() if agent.name != name}


def admin_token(path: Path) -> str:
    """Return the administrator's token, creating it at the first start. The file is private from the beginning."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        return read_token(path)
    token = new_token()
    with os.fdopen(descriptor, "w") as file:
        file.write(f"{token}\n")
        file.flush()
        os.fsync(file.fileno())
    return token


def read_token(path: Path, other: str = "") -> str:
    """Return the token in a file. A file that others can read is refused: its token may be known.

    `other`: how to get another token, for error messages; empty: that of a service.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; {other or 'set CARPOOL_TOKEN, or ask for a token'}") from None
    with os.fdopen(descriptor) as file:
        mode = os.fstat(file.fileno()).st_mode
        token = file.read(4096).strip()
    if mode & 0o077:
        new = other or "remove the file to get a new token"
        raise InputError(f"{path}: others can read it; run `chmod 600 {path}`, or {new}")
    if len(token) < TOKEN_BYTES or not token.isascii() or not token.isprintable():
        new = other or "remove the file to get a new one at the next start"
        raise InputError(f"{path}: does not hold a token; {new}")
    return token
