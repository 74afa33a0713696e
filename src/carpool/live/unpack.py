"""Unpack an archive that a client sent, so that no byte lands outside the target directory.

`code_snapshot.Uploads` calls this for every code snapshot. It does not use the extraction filters of `tarfile`, which
Python has only since 3.11.4: every interpreter takes the same path. The target directory is new and belongs to the
service. Files and directories are written first and symbolic links last, so that no write can follow a link of the
archive; a link that would leave the directory is refused, whatever other links it passes through.
"""

import gzip
import os
import shutil
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, cast

from carpool.errors import InputError

LINKS_FOLLOWED = 40
"""Number of links that Linux follows in one path before it gives up."""
PATH_LENGTH = 4096
"""Length of the longest path that Linux accepts."""
MAX_DEPTH = 64
"""Number of directories above a file of an archive."""
MAX_HEADER = 1 << 20
"""Bytes of one header. The reader of archives takes a header of any size into memory."""
LATEST = 2**33
"""Latest time of a file, in seconds since the epoch; other times are replaced by the nearest possible one."""
STEPS = 1_000_000
"""Number of path components that the check of an archive's links looks at before it refuses the archive."""


class UnsafeArchive(ValueError):
    """A member that may not be unpacked."""


def unpack(packed: IO[bytes], target: Path, *, most_bytes: int, most_files: int) -> None:
    """Create `target` and unpack a gzipped tar archive into it: plain files, directories and links that stay inside.

    Raises `InputError` where the archive is larger than the limits, damaged or unsafe. What was written until then
    stays there for the caller to remove.
    """
    target.mkdir(mode=0o700)
    size = files = 0
    unpacked = _Unpacked(target)
    try:
        most = most_bytes + most_files * PATH_LENGTH
        with (
            gzip.GzipFile(fileobj=packed) as plain,
            tarfile.TarFile(fileobj=cast(IO[bytes], _Bounded(plain, most))) as archive,
        ):
            for member in archive:
                size, files = size + abs(member.size), files + 1
                if size > most_bytes or files > most_files:
                    raise InputError(f"snapshot: holds more than {most_bytes >> 20} MiB or {most_files} files")
                unpacked.add(archive, member)
        unpacked.finish()
    except InputError:
        raise
    except Exception as error:  # whatever error the reader raises, the archive is refused
        raise InputError(
            "snapshot: is not an archive that can be unpacked safely; make it with `carpool submit`"
        ) from error


class _Bounded:
    """The unpacked stream of an archive, of which no more than `most` bytes are read."""

    def __init__(self, stream: gzip.GzipFile, most: int) -> None:
        self._stream, self._most = stream, most
        self.tell = stream.tell

    def read(self, number: int = -1) -> bytes:
        if not 0 <= number <= MAX_HEADER or self.tell() + number > self._most + MAX_HEADER:
            raise UnsafeArchive("the archive is larger than it may be")
        return self._stream.read(number)

    def seek(self, position: int, whence: int = 0) -> int:
        if whence != 0 or position > self._most:
            raise UnsafeArchive("the archive is larger than it may be")
        return self._stream.seek(position)


class _Unpacked:
    """The target directory while it is filled."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._folders: dict[str, float] = {}
        self._links: dict[str, str] = {}

    def add(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        """Write a file or a directory; keep a symbolic link for `finish`."""
        name = _inside(member.name)
        if member.isdir():
            (self._target / name).mkdir(parents=True, exist_ok=True)
            self._folders[name] = member.mtime
            return
        if not name or name in self._links:
            raise UnsafeArchive(f"{member.name!a}: has no name, or is there twice")
        (self._target / name).parent.mkdir(parents=True, exist_ok=True)
        if member.isreg():
            self._write(archive, member, name)
        elif member.islnk():
            os.link(self._target / _inside(member.linkname), self._target / name)
        elif member.issym():
            self._links[name] = member.linkname
        else:
            raise UnsafeArchive(f"{member.name!a}: is neither a file, a directory nor a link")

    def finish(self) -> None:
        """Create the symbolic links, and give the directories their times."""
        _check_links(self._links)
        for name, to in self._links.items():
            (self._target / name).symlink_to(to)
        for name, mtime in self._folders.items():
            _set_time(self._target / name, mtime)

    def _write(self, archive: tarfile.TarFile, member: tarfile.TarInfo, name: str) -> None:
        contents = archive.extractfile(member)
        if contents is None:
            raise UnsafeArchive(f"{member.name!a}: has no contents")
        path = self._target / name
        with contents, path.open("xb") as file:
            shutil.copyfileobj(contents, file)
            if file.tell() != member.size:
                raise UnsafeArchive(f"{member.name!a}: is cut off")
            os.fchmod(file.fileno(), _mode(member.mode))
        _set_time(path, member.mtime)


def _inside(name: str) -> str:
    """Return a member's path from the target directory, without `.` and doubled slashes; empty for the directory."""
    parts = _parts(name)
    if name.startswith("/") or ".." in parts:
        raise UnsafeArchive(f"{name!a}: leaves the directory")
    if len(parts) > MAX_DEPTH:
        raise UnsafeArchive("a file is nested too deep")
    return "/".join(parts)


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]


def _set_time(path: Path, mtime: float) -> None:
    """Set the time of a file; an archive may claim times that no file can have."""
    found = min(max(0.0, mtime), LATEST) if mtime == mtime else 0.0
    os.utime(path, (found, found))


def _mode(mode: int) -> int:
    """Return a file's permissions: its owner may read and write it, only its owner may write it, and no bit other than
    these and those to read and execute it is kept."""
    if not mode & 0o100:
        mode &= ~0o111
    return mode & 0o755 | 0o600


def _check_links(links: Mapping[str, str]) -> None:
    """Refuse a link that leaves the directory, following the archive's other links as Linux would."""
    steps = 0
    for name in links:
        for place in _places(name, links):
            steps += 1
            if place is None or len(place) > PATH_LENGTH or steps > STEPS:
                raise UnsafeArchive(f"{name!a}: is a link that leaves the directory, or leads through too many others")


def _places(name: str, links: Mapping[str, str]) -> Iterator[str | None]:
    """Yield the places that a link leads through, from the target directory; None for one outside of it."""
    here: list[str] = []
    ahead = _parts(name)[::-1]
    followed = 0
    while ahead:
        part = ahead.pop()
        if part == "..":
            yield here.pop() if here else None
            continue
        place = f"{here[-1]}/{part}" if here else part
        yield place
        to = links.get(place)
        if to is None:
            here.append(place)
            continue
        followed += 1
        if followed > LINKS_FOLLOWED:
            return
        if to.startswith("/") or len(to) > PATH_LENGTH:
            yield None
        ahead += _parts(to)[::-1]
