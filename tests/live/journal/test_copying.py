"""Copies of a journal between files: only a journal is read, and only an empty place is written."""

import sqlite3
from contextlib import closing

import pytest

from carpool.live.journal import copying
from carpool.live.journal.store import Store, StoreError
from tests.support.command_line import call


def new_journal(path):
    store = Store(path)
    store.open()
    store.close()
    return path


def text_file(path):
    path.write_text("notes\n")


def empty_file(path):
    path.touch()


def other_database(path):
    with closing(sqlite3.connect(path)) as book:
        book.executescript("CREATE TABLE meta (key, value); INSERT INTO meta VALUES ('version', '1')")


def empty_database(path):
    with closing(sqlite3.connect(path)) as book:
        book.executescript("CREATE TABLE gone (x); DROP TABLE gone")


def link_to_nothing(path):
    path.symlink_to(path.with_name("elsewhere"))


def damaged_journal(path):
    new_journal(path)
    data = bytearray(path.read_bytes())
    data[200:-200] = b"\xff" * (len(data) - 400)
    path.write_bytes(data)


KINDS = (text_file, empty_file, other_database, empty_database, link_to_nothing, damaged_journal)


def contents(folder):
    return {path.name: path.read_bytes() if path.exists() else "link" for path in folder.iterdir()}


@pytest.mark.parametrize("options", [(), ("--backup",)], ids=["move", "backup"])
@pytest.mark.parametrize("side", ["from", "to"])
@pytest.mark.parametrize("make", KINDS)
def test_what_is_not_a_journal_is_refused_and_left_as_it_is(tmp_path, make, side, options):
    make(tmp_path / "other")
    if side == "from":
        places = (tmp_path / "other", tmp_path / "journal.copy")
    else:
        places = (new_journal(tmp_path / "journal.copy"), tmp_path / "other")
    before = contents(tmp_path)
    said = call("journal", "copy", *places, *options)
    assert (said.code, len(said.err.splitlines())) == (2, 1), said
    assert contents(tmp_path) == before


def test_a_copy_that_is_refused_makes_no_file(tmp_path):
    journal = new_journal(tmp_path / "a.db")
    assert call("journal", "copy", journal, tmp_path / "b.db").code == 0
    said = call("journal", "copy", journal, tmp_path / "c.db")
    assert (said.code, "was moved to" in said.err) == (2, True)
    assert not (tmp_path / "c.db").exists()


def test_a_copy_that_fails_leaves_no_file(tmp_path, monkeypatch):
    def fail(*_):
        raise StoreError("the disk is full")

    monkeypatch.setattr(copying, "_compare", fail)
    said = call("journal", "copy", new_journal(tmp_path / "a.db"), tmp_path / "b.db")
    assert (said.code, "the disk is full" in said.err) == (2, True)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("b")] == []


def test_a_journal_is_not_copied_onto_itself_by_a_link(tmp_path):
    (tmp_path / "link.db").symlink_to(new_journal(tmp_path / "a.db"))
    said = call("journal", "copy", tmp_path / "a.db", tmp_path / "link.db")
    assert (said.code, "is the same journal" in said.err) == (2, True)


def test_a_name_with_signs_of_an_address_is_that_file(tmp_path):
    journal = new_journal(tmp_path / "a?b#c%20.db")
    assert call("journal", "copy", journal, tmp_path / "b?.db").code == 0
    assert {path.name for path in tmp_path.iterdir()} == {"a?b#c%20.db", "b?.db"}


def test_an_empty_journal_and_a_new_place_are_filled(tmp_path):
    journal, empty = new_journal(tmp_path / "a.db"), new_journal(tmp_path / "b.db")
    for target in (empty, tmp_path / "c.db"):
        said = call("journal", "copy", journal, target, "--backup")
        assert said.code == 0, said.err
    again = call("journal", "copy", journal, tmp_path / "a text.db")
    assert (again.code, (tmp_path / "a text.db").stat().st_mode & 0o777) == (0, 0o600)
