"""Reading a worker's log from the service's side: a piece from an offset on, or the last lines, never the whole file.

A log lies in a directory that its job can write to, so the file is opened without following links and only if it is a
plain file: a service that runs as root must not be talked into reading something else.
"""

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from carpool.errors import InputError

MOST_BYTES = 1 << 20
BLOCK = 1 << 16


@dataclass(frozen=True, slots=True)
class Part:
    data: bytes
    next: int
    """The offset of what follows."""
    last: bool
    """There was nothing behind it."""


def read(path: Path, offset: int = 0, limit: int = MOST_BYTES, tail: int | None = None) -> Part:
    """At most `limit` bytes; with `tail`, only what belongs to the last so many lines. No file yet: nothing."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return Part(b"", 0, True)
    except OSError as error:
        raise InputError(f"the log cannot be read: {error.strerror}") from None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise InputError("the log is not a plain file any more")
        size = found.st_size
        start = min(offset, size)  # a log that became shorter was replaced
        if tail is not None:
            start = max(start, _start_of_last(descriptor, size, tail))
        data = os.pread(descriptor, limit, start)
        return Part(data, start + len(data), start + len(data) >= size)
    finally:
        os.close(descriptor)


def _start_of_last(descriptor: int, size: int, lines: int) -> int:
    """Where the last lines begin, found from the end, within the last megabyte."""
    if not lines:
        return size
    position, wanted = size, lines
    floor = max(0, size - MOST_BYTES)
    first = True
    while position > floor:
        begin = max(floor, position - BLOCK)
        block = os.pread(descriptor, position - begin, begin)
        end = len(block) - 1 if first and block.endswith(b"\n") else len(block)  # the last line's own end is no start
        first = False
        while (found := block.rfind(b"\n", 0, end)) >= 0:
            wanted -= 1
            if not wanted:
                return begin + found + 1
            end = found
        position = begin
    return floor
