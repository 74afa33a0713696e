"""Code snapshots (`submit --snapshot`): the client packs the working directory, the service unpacks the copy.

Later edits then do not change a queued job. The client reads its own files: a service that runs as root is never asked
to read a user's directory. This module states once which files are left out and how large a snapshot may be.
"""

import asyncio
import os
import shutil
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from uuid import uuid4

from carpool.errors import InputError
from carpool.live.packing import described, walk, with_rights_of_owner
from carpool.live.unpack import unpack

LEFT_OUT = frozenset(
    {
        ".git",
        ".hg",
        ".svn",
        "__pycache__",
        ".venv",
        "venv",
        "node_modules",
        ".mypy_cache",
        ".pytest_cache",
        ".ruff_cache",
    }
)
"""Names of directories that are left out at any depth; sockets, pipes and devices are left out, too."""
IGNORE_FILE = ".carpoolignore"
MAX_BYTES = 256 << 20
MAX_FILES = 20_000
MAX_PACKED = MAX_BYTES + (64 << 20)
KEPT_S = 600.0
"""Seconds after which an upload that no job has used is removed."""
MAX_UNUSED, MAX_UNUSED_BYTES = 32, 1 << 30
"""Number and size of one user's uploads that no job has used."""


@dataclass(frozen=True, slots=True)
class Packed:
    files: int
    size: int
    """Bytes before packing."""


def pack(directory: Path, target: IO[bytes]) -> Packed:
    """Write a directory as a compressed archive. Raises `InputError` if it is too large, naming the largest file, if it
    cannot be read, or if it has a link that leaves it."""
    try:
        return _pack(directory, target, _ignored(directory))
    except OSError as error:  # also a file that vanishes or shrinks while it is read
        where = f"{error.filename}: " if error.filename else ""
        why = error.strerror or "a file changed while it was read"
        raise InputError(f"--snapshot: {where}{why}; name it in {IGNORE_FILE}, or submit again") from None


def pack_again(directory: Path, target: IO[bytes]) -> None:
    """Write a snapshot that was unpacked here as an archive, while its job may change it. Raises `InputError` if the
    job made it too large, or unreadable for its own user. Blocks."""
    try:
        with_rights_of_owner(
            directory, MAX_BYTES, lambda inside: _pack(inside, target, LEFT_OUT, skip_links_outside=True)
        )
    except OSError as error:
        raise InputError(f"its code snapshot cannot be read ({error.strerror or error})") from None


def _pack(directory: Path, target: IO[bytes], ignored: frozenset[str], *, skip_links_outside: bool = False) -> Packed:
    files, size, largest = 0, 0, (0, "")
    with tarfile.open(fileobj=target, mode="w:gz", compresslevel=1) as archive:
        for path, relative in walk(directory, _fail, ignored):
            with described(archive, path, relative) as (info, content):
                if _leads_outside(info) and skip_links_outside:
                    continue
                _check_link(info)
                files += 1
                size += info.size
                largest = max(largest, (info.size, relative))
                if size > MAX_BYTES or files > MAX_FILES:
                    raise InputError(
                        f"--snapshot: the directory holds more than {MAX_BYTES >> 20} MiB or {MAX_FILES} files "
                        f"(largest: {largest[1]!a}); name unneeded files in {IGNORE_FILE}, one per line, or submit "
                        "without --snapshot"
                    )
                archive.addfile(info, content)
    return Packed(files, size)


def _check_link(info: tarfile.TarInfo) -> None:
    """Refuse a link that leaves the directory. The service would refuse it, too, but could not name it."""
    if _leads_outside(info):
        raise InputError(
            f"--snapshot: {info.name!a} is a link to {info.linkname!a}, outside the copied directory; name it in "
            f"{IGNORE_FILE}, and give the job the path itself"
        )


def _leads_outside(info: tarfile.TarInfo) -> bool:
    to = os.path.normpath(os.path.join(os.path.dirname(info.name), info.linkname))
    return info.issym() and (os.path.isabs(to) or to.split(os.sep)[0] == os.pardir)


def _ignored(directory: Path) -> frozenset[str]:
    try:
        lines = (directory / IGNORE_FILE).read_text().splitlines()
    except OSError:
        return LEFT_OUT
    except UnicodeDecodeError:
        raise InputError(f"{IGNORE_FILE}: is not a text file; write one name per line") from None
    return LEFT_OUT | {line.strip().rstrip("/") for line in lines if line.strip() and not line.startswith("#")}


def _fail(error: OSError) -> None:
    raise InputError(f"--snapshot: {error.filename}: {error.strerror}; name it in {IGNORE_FILE}, or leave it out")


class Uploads:
    """Unpacked code snapshots of the service, each waiting for the job that names it.

    Uploads without a job are removed after a time, which counts from when this object first saw them.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: dict[str, float] = {}
        self._turns: dict[str, asyncio.Lock] = {}

    def add(self, packed: IO[bytes], user: str) -> str:
        """Unpack an archive and return the name by which its owner may use it once. Blocks."""
        self.path.mkdir(mode=0o700, exist_ok=True)
        self.forget_old()
        self._check_quota(user)
        return self._add(packed, user)

    def turn(self, user: str) -> asyncio.Lock:
        """Return what a user's upload holds from its first byte on, so that one user uploads one archive at a time."""
        return self._turns.setdefault(user, asyncio.Lock())

    def _check_quota(self, user: str) -> None:
        own = [entry for entry in self.path.iterdir() if self._owner(entry.name) == user]
        if len(own) >= MAX_UNUSED or sum(map(tree_size, own)) > MAX_UNUSED_BYTES:
            raise InputError(
                f"snapshot: {len(own)} of your uploads were not used by a job, and {MAX_UNUSED_BYTES >> 20} MiB or "
                f"{MAX_UNUSED} uploads may wait; submit their jobs, or try again in {KEPT_S / 60:.0f} minutes"
            )

    def _owner(self, name: str) -> str:
        try:
            return (self.path / name / "user").read_text()
        except OSError:
            return ""

    def _add(self, packed: IO[bytes], user: str) -> str:
        name = uuid4().hex
        target = Path(tempfile.mkdtemp(prefix=".unpacking-", dir=self.path))
        try:
            unpack(packed, target / "files", most_bytes=MAX_BYTES, most_files=MAX_FILES)
            (target / "user").write_text(user)
            target.rename(self.path / name)
        except BaseException:
            shutil.rmtree(target, ignore_errors=True)
            raise
        return name

    @contextmanager
    def taken(self, name: str, user: str) -> Iterator[Path]:
        """Yield the directory of an upload; it is removed if the caller succeeds."""
        upload = self.path / name
        if not name.isalnum() or self._owner(name) != user:
            raise InputError("snapshot: you have no such upload; upload the directory again")
        yield upload / "files"
        shutil.rmtree(
            upload, ignore_errors=True
        )  # only after success: a refused request may be corrected and sent again

    def forget_old(self) -> None:
        """Remove uploads that no job has used in time, and what an earlier service left half unpacked."""
        try:
            names = {entry.name for entry in self.path.iterdir()}
        except OSError:
            return
        now = time.monotonic()
        self._seen = {name: self._seen.get(name, now) for name in names}
        for name, seen in self._seen.items():
            if now - seen > KEPT_S:
                shutil.rmtree(self.path / name, ignore_errors=True)


def tree_size(path: Path) -> int:
    """Return the bytes of all files below a directory."""
    return sum(os.lstat(os.path.join(folder, name)).st_size for folder, _, names in os.walk(path) for name in names)
