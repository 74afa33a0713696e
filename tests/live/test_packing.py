"""Directories of users are packed while the users change them: nothing leaks, and nothing hangs."""

import io
import os
import signal
import tarfile
from pathlib import Path

import pytest

from carpool.errors import InputError
from carpool.live import checkpoint_archive
from carpool.live.checkpoint_archive import pack_folder
from carpool.live.http import code_snapshot
from carpool.live.http.code_snapshot import pack, pack_again
from tests.live.test_foreign_files import place
from tests.support.folders import nest

__all__ = ["place"]
ALICE = 7_000_101
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can take the rights of other users")


def pack_checkpoint(folder: Path, target) -> None:
    pack_folder(folder, target, 1 << 30)


@pytest.fixture(params=[pack_again, pack_checkpoint], ids=["snapshot", "checkpoint"])
def packed(request):
    def packed(folder: Path) -> dict[str, bytes | None]:
        target = io.BytesIO()
        request.param(folder, target)
        target.seek(0)
        with tarfile.open(fileobj=target) as archive:
            found = {info.name: archive.extractfile(info) for info in archive if not info.issym()}
            return {name: None if file is None else file.read() for name, file in found.items()}

    return packed


@pytest.fixture
def within_seconds():
    """End a test that waits for a pipe."""

    def over(*_):
        raise TimeoutError("it waits")

    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def folder(place):
    (place / "folder" / "sub").mkdir(parents=True)
    (place / "folder" / "sub" / "file").write_text("hers")
    return place / "folder"


class Swapped(type(Path())):
    """A path at which there was a regular file when it was looked at."""

    def lstat(self):
        return os.lstat(__file__)


def walk_over(monkeypatch, *paths) -> None:
    """Let packing find these paths, as it does where they are replaced while it walks."""
    for module in (code_snapshot, checkpoint_archive):
        monkeypatch.setattr(module, "walk", lambda *_: iter(paths))


@as_root
def test_a_link_in_place_of_a_folder_shows_nothing_that_its_user_may_not_see(place, folder, packed, monkeypatch):
    (place / "secrets").mkdir()
    (place / "secrets" / "file").touch(mode=0o600)
    (place / "secrets" / "file").write_text("root's")
    (folder / "sub").rename(place / "sub.old")
    (folder / "sub").symlink_to(place / "secrets")
    walk_over(monkeypatch, (folder / "sub" / "file", "sub/file"))
    assert packed(folder) == {"sub/file": b"root's"}, "root's own directory is read as root"
    os.chown(folder, ALICE, ALICE)
    with pytest.raises(InputError, match="Permission denied"):
        packed(folder)


@pytest.mark.usefixtures("within_seconds")
@pytest.mark.parametrize("owner", [None, pytest.param(ALICE, marks=as_root)])
def test_a_pipe_in_place_of_a_file_is_refused_and_not_waited_for(folder, packed, monkeypatch, owner):
    if owner:
        os.chown(folder, owner, owner)
    os.mkfifo(folder / "sub" / "pipe", mode=0o644)
    walk_over(monkeypatch, (Swapped(folder / "sub" / "pipe"), "sub/pipe"))
    with pytest.raises(InputError, match="not a regular file"):
        packed(folder)


@pytest.mark.usefixtures("within_seconds")
def test_a_list_of_ignored_files_counts_when_the_user_packs_and_not_again(folder):
    (folder / "data").write_text("large")
    (folder / ".carpoolignore").write_text("data\n")
    target = io.BytesIO()
    assert pack(folder, target).files == 3, "the list itself, and sub with its file"
    (folder / ".carpoolignore").unlink()
    os.mkfifo(folder / ".carpoolignore")
    (folder / "out").symlink_to("/dev/zero")
    target = io.BytesIO()
    pack_again(folder, target)
    target.seek(0)
    with tarfile.open(fileobj=target) as archive:
        assert sorted(archive.getnames()) == ["data", "sub", "sub/file"], "the link is left out"


def test_folders_nested_too_deeply_are_said(folder, packed):
    nest(folder, 300)
    with pytest.raises(InputError, match="nested too deeply"):
        packed(folder)
