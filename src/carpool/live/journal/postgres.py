"""A journal in a PostgreSQL database, which several services can share: one leads, the others stand by.

The address is that of libpq, `postgresql://user@host/database?option=value`. A password belongs in `~/.pgpass`, in the
file that `PGPASSFILE` or `?passfile=` names, or in `PGPASSWORD`. One in the address works too; it is shown nowhere.

Every call has a deadline on this side, because a server that is stopped, or a network that drops packets, never
answers. The server ends transactions of clients that are silent, because they hold the lock of the leader's row.
"""

import os
import time
from collections.abc import Generator
from typing import Any

from sqlalchemy import URL, Engine, create_engine
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from carpool.errors import InputError

SCHEMES = ("postgresql", "postgres", "postgresql+psycopg")
CONNECT_S = 3
"""Seconds in which a connection must be made."""
ANSWER_S = 10.0
"""Seconds in which the server must have answered a statement."""
LOOK_S = 0.25
"""Seconds between two looks at the time while the server does not answer."""
SETTINGS = {
    "synchronous_commit": "on",  # a commit is durable when it is answered
    "idle_in_transaction_session_timeout": "3s",  # a stopped service keeps no lock
    "statement_timeout": "9s",
    "lock_timeout": "5s",
    "tcp_keepalives_idle": "3",
    "tcp_keepalives_interval": "2",
    "tcp_keepalives_count": "3",
}
"""Settings of every session on the server."""
KEEPALIVES = {"keepalives": "1", "keepalives_idle": "3", "keepalives_interval": "2", "keepalives_count": "3"}
"""Settings of libpq by which this side finds out that the server's machine is gone."""
SECRET = ("password", "sslpassword")
"""Options of an address that must not be shown."""


def is_postgres(text: str) -> bool:
    """Return whether a text is the address of a PostgreSQL database, rather than a file."""
    return text.partition(":")[0].lower() in SCHEMES and "://" in text


class PostgresJournal:
    """A journal in a database. Raises `InputError` for an address that cannot be read."""

    shared = True
    """Several services can have it open."""

    def __init__(self, address: str) -> None:
        url = _parse(address)
        query = {name: value for name, value in url.query.items() if name not in SECRET}
        hidden = [value for name, value in url.query.items() if name in SECRET and isinstance(value, str)]
        given = url.query.get("password")
        self._password = url.password or (given if isinstance(given, str) else None)
        self.has_password = bool(self._password or hidden)
        """Whether the address held a password, which other users of the machine may see in the list of processes."""
        self._secrets = [text for text in (self._password, *hidden) if text]
        self._options = {name: value for name, value in url.query.items() if name in SECRET and name != "password"}
        self._url = URL.create(
            "postgresql+psycopg", url.username, None, url.host, url.port, url.database or url.username, query
        )

    def __str__(self) -> str:
        """Return the address for messages: without password, and without options other than the place."""
        url = self._url
        user = url.username or ",".join(_words(url.query.get("user")))
        hosts = ",".join(_words(url.query.get("host")))
        where = f"{user}@" if user else ""
        port = f":{url.port}" if url.port else ""
        return f"postgresql://{where}{url.host or ''}{port}/{url.database or ''}{f'?host={hosts}' if hosts else ''}"

    def __repr__(self) -> str:
        return f"PostgresJournal({str(self)!r})"

    def take_secrets(self) -> None:
        """Take the password out of this process's environment, so that no other process inherits it."""
        password = os.environ.pop("PGPASSWORD", None)
        if password:
            self._secrets.append(password)
            self._password = self._password or password

    def engine(self) -> Engine:
        connection_class = _connection_class()

        def connect() -> Any:
            given = {name: value for name, value in self._url.query.items() if name not in ("host", "port")}
            given = {name: value for name, value in given.items() if isinstance(value, str)}
            options = " ".join(f"-c {name}={value}" for name, value in SETTINGS.items())
            arguments: dict[str, Any] = {
                "connect_timeout": CONNECT_S,
                "application_name": "carpool",
                **KEEPALIVES,
                **given,
                **self._options,
                "options": f"{options} {given.get('options', '')}".strip(),
                "client_encoding": "utf8",
            }
            url = self._url
            names: dict[str, str | int | None] = {
                "user": url.username,
                "dbname": url.database,
                "password": self._password,
                "host": url.host or ",".join(_words(url.query.get("host"))) or None,
                "port": url.port or ",".join(_words(url.query.get("port"))) or None,
            }
            arguments |= {name: value for name, value in names.items() if value is not None}
            return connection_class.connect(**arguments)

        engine = create_engine(
            "postgresql+psycopg://", creator=connect, hide_parameters=True, pool_pre_ping=True, pool_timeout=CONNECT_S
        )
        engine.dialect.use_insertmanyvalues_wo_returning = True  # many rows in one statement, not one for each
        return engine

    def look(self) -> Engine:
        """Return what reads the database."""
        return self.engine()

    def make(self) -> None:
        """Do nothing: the database exists already."""

    def remove(self) -> None:
        """Do nothing: what is written in a transaction that fails is not there."""

    def prepare(self) -> list[str]:
        """Return notes for the operator: none, because the server maintains its files."""
        return []

    def problem(self) -> str:
        """Return why it must not be written; empty: it may. Whether this service leads is not asked here."""
        return ""

    def reason(self, error: BaseException) -> str:
        """Return why something failed in one line, without statement, parameters and password."""
        text = str(getattr(error, "orig", None) or error).strip()
        line = (text.splitlines() or [type(error).__name__])[0]
        for secret in self._secrets:
            line = line.replace(secret, "***")
        return line


def _parse(address: str) -> URL:
    scheme, _, rest = address.partition("://")
    try:
        if scheme.lower() not in SCHEMES or not rest:
            raise ArgumentError
        return make_url(f"postgresql+psycopg://{rest}")
    except (ArgumentError, ValueError):  # its message may quote the password
        raise InputError(
            "--database: cannot be read; write postgresql://user@host/database, and the password into ~/.pgpass"
        ) from None


def _words(value: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if value is None else (value,) if isinstance(value, str) else value


def _connection_class() -> Any:
    """Return psycopg's connection with a deadline for every answer."""
    try:
        import psycopg
    except ImportError:
        raise InputError("--database: psycopg is not installed: pip install 'carpool[postgres]'") from None

    class SingleCursor(psycopg.Cursor[Any]):
        def executemany(self, query: Any, params_seq: Any, *, returning: bool = False) -> None:
            """Execute a statement for each row. The pipeline that psycopg would use ends with a message after which the
            server no longer measures how long this side is silent. A service that is stopped then would keep the lock
            of the leader's row for ever."""
            for params in params_seq:
                self.execute(query, params)

    class ImpatientConnection(psycopg.Connection[Any]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.cursor_factory = SingleCursor

        def wait(self, gen: Any, *arguments: Any, **options: Any) -> Any:
            options["interval"] = LOOK_S
            return super().wait(self._in_time(gen, time.monotonic() + ANSWER_S), **options)

        def _in_time(self, waiting: Generator[Any, Any, Any], until: float) -> Generator[Any, Any, Any]:
            """Pass on what psycopg waits for, and give the connection up when the time is over."""
            try:
                wanted = next(waiting)
                while True:
                    ready = yield wanted
                    if not ready and time.monotonic() > until:
                        self.pgconn.finish()
                        raise psycopg.OperationalError(f"the database did not answer within {ANSWER_S:.0f} s")
                    wanted = waiting.send(ready)
            except StopIteration as done:
                return done.value

    return ImpatientConnection
