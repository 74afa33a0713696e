"""Opening the journal of a service: the lead first, then the home, and whether the two belong together.

A journal in a file is protected by the lock of its home. A journal in a database is shared by several services: the one
that leads locks the home, and a service that stands by touches nothing there. `open_service` calls `open_journal`.
"""

import contextlib
import json
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

from carpool.errors import InputError
from carpool.live.errors import Unavailable
from carpool.live.home import Home, read_json, write_private
from carpool.live.journal.leadership import LeaderState
from carpool.live.journal.reader import JournalReader
from carpool.live.journal.schema import HOMED, IDENTITY, MACHINE, MOVED
from carpool.live.journal.sqlite import SqliteJournal
from carpool.live.journal.store import Commit, Store
from carpool.live.service.config import ServiceConfig
from carpool.live.service.reserve import DiskReserve

MACHINE_ID = Path("/etc/machine-id")
Waiting = Callable[[LeaderState], None]


async def open_journal(config: ServiceConfig, store: Store, waiting: Waiting) -> None:
    """Take the lead and lock the home; afterwards the store can write. `waiting`: called if another service leads."""
    home = config.home
    if store.place.shared:
        store.open()
        _check_home(config, store)  # at once, and not when the service is needed
        await store.lead(waiting)
        _check_home(config, store)
        home.create()
        home.acquire(store.identity)
        _free_reserve(home, store)
        write_private(home.journal_record, json.dumps({"id": store.identity, "database": str(store.place)}))
        here = {HOMED: str(home.path)} | ({MACHINE: machine()} if config.runs_here else {})
        await store.write(Commit(meta=here))
        return
    home.create()
    home.acquire()
    _free_reserve(home, store)
    if record := _record(home):
        raise InputError(
            f"home {home.path}: its journal is in {record.get('database')}; give --database, "
            f"or move it back with `carpool journal copy`"
        )
    store.open()
    _check_not_moved(store, store.meta())
    await store.lead()


def _free_reserve(home: Home, store: Store) -> None:
    """Free the room that is kept for a start, if the disk is full."""
    if note := DiskReserve(home.reserve).free_if_full():
        store.notes.append(note)


def _check_home(config: ServiceConfig, store: Store) -> None:
    """Refuse a home that belongs to another journal, and a machine that cannot see the workers of the jobs."""
    home = config.home
    # A first leader writes the id, then the record, then the place of the home: so the record is read twice.
    before, meta, after = _record(home), store.meta(), _record(home)
    _check_not_moved(store, meta)
    if before and before.get("id") != meta.get(IDENTITY):
        raise InputError(f"home {home.path}: belongs to the journal in {before.get('database')}; give another --home")
    if not after and HOMED in meta:
        raise InputError(
            f"home {home.path}: the journal in {store.place} has its files in {meta[HOMED]}, which must be a directory "
            "that all its services share; give it as --home"
        )
    if not after and _has_own_journal(home, meta.get(IDENTITY, "")):
        raise InputError(
            f"home {home.path}: has a journal of its own; move it first: "
            f"`carpool journal copy {home.journal} {store.place}`"
        )
    elsewhere = meta.get(MACHINE)
    if config.runs_here and elsewhere and elsewhere != machine() and not config.machine_is_gone:
        raise InputError(
            f"{store.place}: its jobs run on machine {elsewhere}, and --executor local can take over on that machine "
            "only; if it is gone for good, add --machine-is-gone"
        )


def _record(home: Home) -> dict[str, str]:
    """Return which shared journal a home belongs to; empty: none."""
    found = read_json(home.journal_record)
    return found if isinstance(found, dict) else {}


def _check_not_moved(store: Store, meta: Mapping[str, str]) -> None:
    if MOVED in meta:
        raise InputError(f"journal {store.place}: was moved to {meta[MOVED]}; serve from there")


def _has_own_journal(home: Home, identity: str) -> bool:
    """Return whether a home has a journal in a file that was not moved to the journal with this id."""
    if not home.journal.exists():
        return False
    reader = JournalReader(SqliteJournal(home.journal))
    try:
        with contextlib.suppress(Unavailable):
            found = reader.meta()
            return MOVED not in found or found.get(IDENTITY) != identity
        return True
    finally:
        reader.close()


def machine() -> str:
    """Return what tells this machine from others."""
    with contextlib.suppress(OSError):
        found = MACHINE_ID.read_text().strip()
        if found:
            return found
    return socket.gethostname()
