"""A checkpoint folder as one archive and back, for nodes that do not see the service's home. Both ends use it.

The files belong to a job's user, whose processes may still run. They are read with that user's rights, and unpacked as
an untrusted archive, in a folder that only this process can enter.
"""

import gzip
import hashlib
import os
import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import IO

from carpool.errors import InputError
from carpool.live.foreign_files import give_tree
from carpool.live.home import folder_mode
from carpool.live.packing import described, walk, with_rights_of_owner
from carpool.live.unpack import UnsafeArchive, unpack

MOST_FILES = 100_000
READ = 1 << 20


def has_files(folder: Path) -> bool:
    """Return whether a checkpoint folder is there and holds something. Blocks."""
    try:
        with os.scandir(folder) as entries:
            return any(entries)
    except OSError:
        return False


def pack_folder(folder: Path, target: IO[bytes], most_bytes: int) -> None:
    """Write a checkpoint folder as a compressed archive. Raise `InputError` where it cannot be sent. Blocks."""
    try:
        with_rights_of_owner(folder, most_bytes, lambda inside: _pack(inside, folder, target, most_bytes))
    except OSError as error:  # also a file that vanishes or shrinks while it is read
        raise InputError(f"a file cannot be read ({error.strerror or error or 'it changed meanwhile'})") from None


def _pack(folder: Path, known_as: Path, target: IO[bytes], most_bytes: int) -> None:
    """Write the archive of a folder, in which links name it as `known_as`."""
    size = files = 0
    with (
        gzip.GzipFile(fileobj=target, mode="wb", compresslevel=1, mtime=0) as plain,  # the same bytes every time
        tarfile.open(fileobj=plain, mode="w") as archive,
    ):
        for path, name in walk(folder, _fail):
            with described(archive, path, name) as (info, content):
                size, files = size + info.size, files + 1
                if size > most_bytes or files > MOST_FILES:
                    raise InputError(f"it holds more than {most_bytes >> 20} MiB or {MOST_FILES} files")
                if info.issym() and Path(info.linkname).is_relative_to(known_as):  # it will have another place
                    info.linkname = os.path.relpath(info.linkname, (known_as / name).parent)
                archive.addfile(info, content)


def _fail(error: OSError) -> None:
    raise error


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file. Blocks."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(READ):
            found.update(data)
    return found.hexdigest()


def unpack_folder(packed: Path, place: Path, uid: int | None, most_bytes: int) -> None:
    """Replace a checkpoint folder by the contents of an archive, which then belong to `uid`. Raise `InputError` where
    the archive is too large, damaged or unsafe; then the folder stays as it was. Blocks."""
    place.parent.mkdir(mode=folder_mode(), parents=True, exist_ok=True)
    target = Path(tempfile.mkdtemp(prefix=".unpacking-", dir=place.parent))
    try:
        try:
            with packed.open("rb") as file:
                unpack(file, target / "files", most_bytes=most_bytes, most_files=MOST_FILES)
        except InputError as refused:
            unsafe = refused.__cause__
            raise (InputError(f"file {unsafe}") if isinstance(unsafe, UnsafeArchive) else refused) from None
        if uid is not None:
            give_tree(target / "files", uid)
        if place.exists():
            place.rename(target / "before")
        (target / "files").rename(place)
    finally:
        shutil.rmtree(target, ignore_errors=True)
