"""Reading a worker's log file: a chunk from an offset, or the last lines, never the whole file. For executors.

A log is in a directory that its job can write to. So the file is opened without following links, and only if it is a
regular file: a service that runs as root must not be tricked into reading another file.
"""

import errno
import os
from pathlib import Path

from carpool.channel import open_regular
from carpool.errors import InputError
from carpool.live.executors.base import LogChunk

TAIL_BYTES = 1 << 20
"""Length of the part of a log in which the last lines are looked for."""
BLOCK_BYTES = 1 << 16


def read_log_file(path: Path, offset: int, limit: int, tail: int | None = None) -> LogChunk:
    """Read at most `limit` bytes; with `tail`, only from the last `tail` lines. A file that does not exist is empty."""
    try:
        descriptor = open_regular(path)
    except FileNotFoundError:
        return LogChunk(b"", 0, True)
    except OSError as error:
        raise InputError(f"the log cannot be read: it {_refusal(error)}") from None
    try:
        size = os.fstat(descriptor).st_size
        start = min(offset, size)  # a log that became shorter was replaced
        if tail is not None:
            start = max(start, _start_of_last(descriptor, size, tail))
        data = os.pread(descriptor, limit, start)
        return LogChunk(data, start + len(data), start + len(data) >= size)
    finally:
        os.close(descriptor)


def _refusal(error: OSError) -> str:
    """Return why a log is not read; a link shows as a loop of links."""
    links = error.errno == errno.ELOOP
    return "is not a regular file" if links or not error.errno else f"gives an error ({error.strerror})"


def _start_of_last(descriptor: int, size: int, lines: int) -> int:
    """Return the offset at which the last lines begin, searched backwards through the last `TAIL_BYTES`."""
    if not lines:
        return size
    position, wanted = size, lines
    floor = max(0, size - TAIL_BYTES)
    first = True
    while position > floor:
        begin = max(floor, position - BLOCK_BYTES)
        block = os.pread(descriptor, position - begin, begin)
        end = len(block) - 1 if first and block.endswith(b"\n") else len(block)  # the final line break starts no line
        first = False
        while (found := block.rfind(b"\n", 0, end)) >= 0:
            wanted -= 1
            if not wanted:
                return begin + found + 1
            end = found
        position = begin
    return floor
