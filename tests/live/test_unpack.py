"""Archives that a client sent are unpacked completely where they are safe, and refused where they are not."""

import io
import os
import stat
import tarfile
import tempfile
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.errors import InputError
from carpool.live.http import code_snapshot
from carpool.live.unpack import unpack

FILE, FOLDER, LINK, HARD_LINK = tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE


def archive(*members):
    """Return an archive of (name, type, link target or contents) and optionally a mode."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        for name, kind, what, *mode in members:
            info = tarfile.TarInfo(name)
            info.type, info.mtime = kind, 1_000_000_000
            info.mode = mode[0] if mode else 0o644
            if kind == FILE:
                info.size = len(what)
                tar.addfile(info, io.BytesIO(what))
            else:
                info.linkname = what
                tar.addfile(info)
    file.seek(0)
    return file


def unpacked(folder, *members):
    target = folder / "files"
    unpack(archive(*members), target, most_bytes=1 << 20, most_files=100)
    return target


def refused(folder, *members):
    """Return whether the archive is refused; nothing may be written beside the target directory in any case."""
    with pytest.raises(InputError, match="unpacked safely"):
        unpacked(folder, *members)
    return [path.name for path in folder.iterdir()] == ["files"]


# ---- what is safe ----------------------------------------------------------------------------------------------------


def test_a_tree_is_unpacked_as_it_was(tmp_path):
    found = unpacked(
        tmp_path,
        ("./", FOLDER, ""),
        ("./sub", FOLDER, ""),
        ("./sub/train.py", FILE, b"print()"),
        ("deep/without/a/folder.txt", FILE, b"x"),
        ("empty", FILE, b""),
    )
    assert (found / "sub/train.py").read_bytes() == b"print()"
    assert (found / "deep/without/a/folder.txt").read_bytes() == b"x"
    assert (found / "empty").read_bytes() == b""
    assert (found / "sub/train.py").stat().st_mtime == (found / "sub").stat().st_mtime == 1_000_000_000


@pytest.mark.parametrize(
    ("packed", "kept"),
    [(0o644, 0o644), (0o755, 0o755), (0o777, 0o755), (0o000, 0o600), (0o4755, 0o755), (0o2675, 0o644), (0o055, 0o644)],
)
def test_a_file_keeps_sane_permissions_only(tmp_path, packed, kept):
    found = unpacked(tmp_path, ("file", FILE, b"x", packed))
    assert stat.S_IMODE((found / "file").stat().st_mode) == kept


def test_a_folder_without_permissions_can_be_filled(tmp_path):
    found = unpacked(tmp_path, ("sub", FOLDER, "", 0o000), ("sub/file", FILE, b"x"))
    assert (found / "sub/file").read_bytes() == b"x"


def test_links_that_stay_inside_are_kept(tmp_path):
    found = unpacked(
        tmp_path,
        ("latest", LINK, "runs/5"),
        ("runs/5/log", FILE, b"five"),
        ("runs/other", LINK, "../latest/../5/log"),
        ("dangling", LINK, "later/made"),
        ("loop", LINK, "loop"),
        ("again", HARD_LINK, "runs/5/log"),
    )
    assert (found / "latest/log").read_bytes() == (found / "runs/other").read_bytes() == b"five"
    assert os.readlink(found / "dangling") == "later/made"
    assert os.readlink(found / "loop") == "loop"
    assert (found / "again").read_bytes() == b"five"


def test_unpacking_needs_no_extraction_filter(tmp_path, monkeypatch):
    """Python 3.11.0 to 3.11.3 have none."""
    for name in ("data_filter", "tar_filter", "fully_trusted_filter"):
        monkeypatch.delattr(tarfile, name, raising=False)
    monkeypatch.delattr(tarfile.TarFile, "extractall")
    uploads = code_snapshot.Uploads(tmp_path / "uploads")
    (tmp_path / "project").mkdir()
    (tmp_path / "project/train.py").write_text("print()")
    packed = io.BytesIO()
    code_snapshot.pack(tmp_path / "project", packed)
    packed.seek(0)
    with uploads.taken(uploads.add(packed, "alice"), "alice") as files:
        assert (files / "train.py").read_text() == "print()"


# ---- what is not -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "members",
    [
        [("../x", FILE, b"evil")],
        [("/tmp/x", FILE, b"evil")],
        [("a/../../x", FILE, b"evil")],
        [("..", FOLDER, "")],
        [("", FILE, b"evil")],
        [(".", FILE, b"evil")],
        [("link", LINK, "/etc/passwd")],
        [("link", LINK, "..")],
        [("sub/link", LINK, "../../x")],
        [("sub/link", LINK, "missing/../../../x")],
        [("here", LINK, "."), ("up", LINK, "here/../x")],
        [("up", LINK, "here/../x"), ("here", LINK, ".")],
        [("a/b/c", FOLDER, ""), ("a/b/top", LINK, "../.."), ("up", LINK, "a/b/top/..")],
        [("link", LINK, "x/" * 3000)],
        [("link", LINK, "a"), ("link/x", FILE, b"evil")],
        [("link", LINK, "a"), ("link", FILE, b"evil")],
        [("link", FILE, b"good"), ("link", LINK, "a")],
        [("link", LINK, "a"), ("link", FOLDER, "")],
        [("file", FILE, b"good"), ("file", FILE, b"evil")],
        [("file", FILE, b"good"), ("file/x", FILE, b"evil")],
        [("link", HARD_LINK, "/etc/passwd")],
        [("link", HARD_LINK, "../x")],
        [("link", HARD_LINK, "later"), ("later", FILE, b"x")],
        [("soft", LINK, "a"), ("link", HARD_LINK, "soft")],
        [("device", tarfile.CHRTYPE, "")],
        [("device", tarfile.BLKTYPE, "")],
        [("pipe", tarfile.FIFOTYPE, "")],
    ],
)
def test_an_unsafe_archive_is_refused(tmp_path, members):
    assert refused(tmp_path, *members)


def test_more_than_the_limits_is_refused(tmp_path):
    with pytest.raises(InputError, match="holds more than 1 MiB or 100 files"):
        unpacked(tmp_path, ("zeros", FILE, bytes((1 << 20) + 1)))
    (tmp_path / "files").rmdir()
    with pytest.raises(InputError, match="holds more than 1 MiB or 100 files"):
        unpacked(tmp_path, *((f"{number}", FOLDER, "") for number in range(101)))


def test_links_that_cost_much_to_check_are_refused(tmp_path):
    chain = [(f"l{number}", LINK, f"l{number + 1}/" + "x/../" * 700) for number in range(39)]
    assert refused(tmp_path, *chain, *((f"m{number}", LINK, "l0") for number in range(50)))


def test_a_damaged_archive_is_refused(tmp_path):
    whole = archive(("numbers", FILE, b" ".join(b"%d" % (7 * number) for number in range(50_000)))).getvalue()
    half = len(whole) // 2
    broken = whole[:half] + b"\xff" * 100 + whole[half + 100 :]
    for number, packed in enumerate((b"no archive", whole[:half], broken)):
        with pytest.raises(InputError, match="unpacked safely"):
            unpack(io.BytesIO(packed), tmp_path / str(number), most_bytes=1 << 20, most_files=100)


PATHS = st.lists(st.sampled_from(["a", "b", "c", "..", "."]), min_size=1, max_size=4).map("/".join)
MEMBERS = st.one_of(
    st.tuples(PATHS, st.just(FILE), st.just(b"x")),
    st.tuples(PATHS, st.just(FOLDER), st.just("")),
    st.tuples(PATHS, st.sampled_from([LINK, LINK, HARD_LINK]), PATHS),
)


@given(st.lists(MEMBERS, max_size=6))
def test_whatever_an_archive_holds_nothing_leaves_the_folder(members):
    with tempfile.TemporaryDirectory() as folder:
        outside = Path(folder).resolve()
        try:
            found = unpacked(outside, *members)
        except InputError:
            found = outside / "files"
        assert [path.name for path in outside.iterdir()] == ["files"]
        for path in found.rglob("*"):
            assert os.path.realpath(path) == str(found) or os.path.realpath(path).startswith(f"{found}/")


# ---- what made the service answer with an internal error -------------------------------------------------------------


def packed_tar(info: tarfile.TarInfo, contents: bytes = b"", pax: bool = True) -> io.BytesIO:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz", format=tarfile.PAX_FORMAT if pax else tarfile.GNU_FORMAT) as tar:
        info.size = len(contents)
        tar.addfile(info, io.BytesIO(contents))
    file.seek(0)
    return file


@pytest.mark.parametrize("kind", [FILE, FOLDER])
@pytest.mark.parametrize("claim", ["1e308", "inf", "-1e308", "nan", "-1", "99999999999999999999"])
def test_a_time_that_no_file_can_have_is_replaced(tmp_path, kind, claim):
    info = tarfile.TarInfo("x")
    info.type, info.mtime, info.pax_headers = kind, 0, {"mtime": claim}
    unpack(packed_tar(info), tmp_path / "files", most_bytes=1000, most_files=10)
    assert 0 <= (tmp_path / "files" / "x").stat().st_mtime <= 2**33


@pytest.mark.parametrize("kind", [FILE, FOLDER])
def test_deep_folders_are_refused_and_leave_nothing_behind(tmp_path, kind):
    info = tarfile.TarInfo("/".join(["d"] * 2000))
    info.type = kind
    uploads = code_snapshot.Uploads(tmp_path / "uploads")
    with pytest.raises(InputError, match="unpacked safely"):
        uploads.add(packed_tar(info), "alice")
    assert list((tmp_path / "uploads").iterdir()) == []


def test_a_header_that_is_as_large_as_the_memory_is_refused(tmp_path):
    """A few kilobytes that unpack to a header of 200 MiB: the reader would hold all of it in memory."""
    info = tarfile.TarInfo("x")
    info.pax_headers = {"comment": "x" * (200 << 20)}
    bomb = packed_tar(info)
    assert len(bomb.getvalue()) < 1 << 20
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match="unpacked safely"):
            unpack(bomb, tmp_path / "files", most_bytes=1 << 30, most_files=10)
        assert tracemalloc.get_traced_memory()[1] < 50 << 20
    finally:
        tracemalloc.stop()
