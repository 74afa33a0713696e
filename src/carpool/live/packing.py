"""Reading a directory into an archive while the user who owns it may change it.

Root reads with the rights of that user, so that a link in place of a folder shows nothing that the user may not see.
Nothing is waited for: a pipe in place of a file is refused.
"""

import os
import stat
import tarfile
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from carpool.channel import open_regular
from carpool.live.foreign_files import with_rights_of

WAIT_S, LEAST_RATE = 60.0, 8 << 20
"""A directory is given up that is not read after so many seconds and one for each so many bytes: its file system does
not answer."""
MOST_NESTED = 200


def with_rights_of_owner(folder: Path, most_bytes: int, work: Callable[[Path], object]) -> None:
    """Call `work`, which reads at most so much, with a path to a directory and its owner's rights. Raise OSError where
    there is no directory, or it is not read in time. Blocks."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        inside = Path(f"/proc/self/fd/{opened}")  # its owner may not enter those above
        owner = os.fstat(opened).st_uid if os.getuid() == 0 else None
        with_rights_of(owner, lambda: work(inside), WAIT_S + most_bytes / LEAST_RATE)
    finally:
        os.close(opened)


def walk(
    folder: Path, on_error: Callable[[OSError], None], left_out: Container[str] = ()
) -> Iterator[tuple[Path, str]]:
    """Yield the files, links and directories below with their relative paths, in a fixed order; pipes, sockets and
    devices are left out. Raise OSError where directories are nested so deeply that `os.walk` fails.

    `left_out`: names, and relative paths, of what is left out with all that is below.
    """
    top = str(folder)
    for above, folders, names in os.walk(top, onerror=on_error):
        if above.count(os.sep) > top.count(os.sep) + MOST_NESTED:
            raise OSError(0, "folders are nested too deeply", above)
        paths = {name: os.path.normpath(os.path.join(os.path.relpath(above, top), name)) for name in (*folders, *names)}
        kept = {name for name, relative in paths.items() if name not in left_out and relative not in left_out}
        folders[:] = sorted(kept.intersection(folders))
        for name in sorted(kept):
            path = Path(above, name)
            mode = path.lstat().st_mode
            if stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode):
                yield path, paths[name]


@contextmanager
def described(archive: tarfile.TarFile, path: Path, name: str) -> Iterator[tuple[tarfile.TarInfo, IO[bytes] | None]]:
    """Yield a file, link or directory as it goes into an archive, a file together with its content. Raise OSError where
    it is another one meanwhile."""
    if not stat.S_ISREG(path.lstat().st_mode):
        info = archive.gettarinfo(path, arcname=name)
        if not info.issym() and not info.isdir():
            raise OSError(0, "it changed meanwhile", str(path))
        yield _of_nobody(info), None
        return
    with open(open_regular(path), "rb") as file:
        info = archive.gettarinfo(arcname=name, fileobj=file)
        info.type, info.linkname = tarfile.REGTYPE, ""  # a hard link could point outside the directory
        info.size = os.fstat(file.fileno()).st_size
        yield _of_nobody(info), file


def _of_nobody(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info
