"""`carpool journal`: move the journal of a service from a file to PostgreSQL, or back."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from carpool.errors import InputError
from carpool.live.commands.options import json_option, print_json
from carpool.live.home import Home
from carpool.report.progress import waiting


@click.group("journal", short_help="Move the journal of a service.")
def journal() -> None:
    """Move the journal of a service from a file to PostgreSQL, or back."""


@journal.command(short_help="Copy a journal into an empty place.")
@click.argument("source", metavar="FROM")
@click.argument("target", metavar="TO")
@click.option("--backup", is_flag=True, help="Leave FROM in use: the copy becomes a journal of its own.")
@json_option
def copy(source: str, target: str, backup: bool, as_json: bool) -> None:
    """Copy a journal into an empty place, and compare the two.

    FROM and TO are each a home directory, a file, or postgresql://user@host/database. The service must be stopped. It
    goes on with the copy: FROM is marked as moved, unless --backup is given. TO is new, or a journal without content;
    anything else is refused and left as it is, and so is FROM if it is not a journal or is damaged.
    """
    missing = [name for name in ("sqlalchemy",) if find_spec(name) is None]
    if missing:
        raise InputError("`carpool journal` needs sqlalchemy: pip install 'carpool[live]'")
    from carpool.live.journal.copying import copy_journal

    with ExitStack() as locks:
        places = [locks.enter_context(_place(text, new=text is target)) for text in (source, target)]
        if _is_same(*places):
            raise InputError(f"{target}: is the same journal as FROM; give another place")
        with waiting("copying the journal"):
            counts = asyncio.run(copy_journal(*places, backup=backup))
        home = _home_of(target)
        if home is not None and not backup:
            home.journal_record.unlink(missing_ok=True)  # the journal of this home is in a file again
    if as_json:
        print_json({"from": str(places[0]), "to": str(places[1]), "rows": counts})
        return
    rows = ", ".join(f"{number} {name}" for name, number in counts.items())
    click.echo(f"copied {rows} from {places[0]} to {places[1]}; both are the same")
    if not backup:
        where = f"--database {places[1]}" if home is None else f"--home {home.path} and no --database"
        click.echo(f"serve with {where} from now on; {places[0]} is marked as moved")


def _is_same(source: Any, target: Any) -> bool:
    """Return whether two places are the same, also by links."""
    try:
        return str(source) == str(target) or source.path.samefile(target.path)
    except (AttributeError, OSError):  # one is a database, or is not there
        return False


def _home_of(text: str) -> Home | None:
    """Return the home that a file is the journal of; None: it is another file, or none."""
    path = Path(text)
    if "://" in text or (path.name != "journal.db" and not path.is_dir()):
        return None
    return Home(path if path.is_dir() else path.parent)


@contextmanager
def _place(text: str, *, new: bool) -> Iterator[Any]:
    """Yield the place of a journal; a home is locked, so that no service uses it."""
    from carpool.live.journal.postgres import PostgresJournal, is_postgres
    from carpool.live.journal.sqlite import SqliteJournal

    if is_postgres(text):
        place = PostgresJournal(text)
        place.take_secrets()
        yield place
        return
    if "://" in text:
        kind = text.partition("://")[0]
        raise InputError(f"{kind}://: is not a kind of database that Carpool uses; write postgresql://…, or a file")
    home = _home_of(text)
    path = home.journal if home is not None else Path(text).absolute()
    if not new and not path.is_file():
        raise InputError(f"{path}: there is no such file; give a home directory, a journal.db, or postgresql://…")
    if new and not path.parent.is_dir():
        raise InputError(f"{path.parent}: there is no such directory; make it first")
    if home is None:
        yield SqliteJournal(path)
        return
    home.acquire()
    try:
        yield SqliteJournal(path)
    finally:
        home.release()
