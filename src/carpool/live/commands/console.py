"""The user's side of a terminal: keys to a job or to a command beside it, its output to the screen.

One thread reads what the service sends and one sends what was typed, so that the user can leave at any time. A terminal
of a job comes back by itself when the connection breaks or the service is started again: output continues after the
last byte that was seen, and keys are numbered, so that none is lost or doubled. The commands in `terminal.py` use it.
"""

import base64
import contextlib
import os
import secrets
import select
import signal
import sys
import termios
import threading
import tty
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from carpool.errors import InputError

PREFIX, LEAVE = 0x1D, ord("d")
"""Keys that leave a terminal: Ctrl-] and then d. Ctrl-] twice is one Ctrl-] for the program."""
END_OF_INPUT = b"\x04"
KEYS_BYTES = 16 << 10
"""Largest piece that is sent at once."""
MAX_WAITING = 256 << 10
"""Bytes that may wait to be sent; more is read when there is room."""
FULL_S = 0.1
"""Seconds before keys are sent again for which there was no room."""

Send = Callable[[dict[str, Any]], bool]
"""Sends keys; returns False if there was no room. Raises `InputError` when there is nothing to type to any more."""


class KeyFilter:
    """Finds the keys that leave the terminal among those that were typed."""

    def __init__(self) -> None:
        self._prefix = False

    def take(self, data: bytes) -> tuple[bytes, bool]:
        """Return the keys for the program, and whether the user leaves."""
        found = bytearray()
        for byte in data:
            if self._prefix:
                self._prefix = False
                if byte == LEAVE:
                    return bytes(found), True
                found += bytes([PREFIX]) if byte == PREFIX else bytes([PREFIX, byte])
            elif byte == PREFIX:
                self._prefix = True
            else:
                found.append(byte)
        return bytes(found), False


class KeySender(threading.Thread):
    """Sends keys in order, each once, in the background."""

    def __init__(self, send: Send, over: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self._send, self._over = send, over
        self._typist, self._number = secrets.token_hex(8), 0
        self._changed = threading.Condition()
        self._waiting = bytearray()
        self._size: tuple[int, int] | None = None
        self._ends = self._stopped = False

    @property
    def has_room(self) -> bool:
        return len(self._waiting) < MAX_WAITING

    def type(self, data: bytes) -> None:
        with self._changed:
            self._waiting += data
            self._changed.notify()

    def resize(self, rows: int, columns: int) -> None:
        with self._changed:
            self._size = rows, columns
            self._changed.notify()

    def end(self) -> None:
        """Tell that nothing more is typed."""
        with self._changed:
            self._ends = True
            self._changed.notify()

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def run(self) -> None:
        try:
            while (keys := self._next()) is not None:
                while not self._send(keys) and not self._stopped:
                    threading.Event().wait(FULL_S)
        except InputError:  # the program has ended; the reader says how
            return
        finally:
            self._over()

    def _next(self) -> dict[str, Any] | None:
        """Wait for something to send; None: there will be nothing more."""
        with self._changed:
            while not (self._waiting or self._size or self._ends or self._stopped):
                self._changed.wait()
            if self._stopped:
                return None
            piece = bytes(self._waiting[:KEYS_BYTES])
            del self._waiting[: len(piece)]
            self._number += 1
            keys: dict[str, Any] = {"typist": self._typist, "number": self._number}
            if piece:
                keys["data"] = base64.b64encode(piece).decode()
            if self._size is not None:
                keys["rows"], keys["columns"] = self._size
                self._size = None
            if self._ends and not self._waiting:
                keys["ends"], self._ends = True, False
            return keys


class Console:
    """This process's own terminal, or the files in its place, while it shows a program that runs elsewhere."""

    def __init__(self, *, terminal: bool, can_leave: bool) -> None:
        """`terminal`: the program has a terminal. `can_leave`: the user may leave it running."""
        self._terminal, self._filter = terminal, KeyFilter() if can_leave else None
        self._raw = terminal and sys.stdin.isatty()
        self._wake_out, self._wake_in = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._resized = True
        self._shown = False
        """Nothing more is to be shown."""
        self._problem: BaseException | None = None

    def run(self, show: Callable[[], None], send: Send) -> bool:
        """Pass keys and output on until `show` returns; return False if the user left."""
        reader = threading.Thread(target=self._show, args=(show,), daemon=True)
        sender = KeySender(send, self._wake)
        with self._prepared():
            reader.start()
            sender.start()
            left = self._pass_keys(sender)
            sender.stop()
        if self._problem is not None:
            raise self._problem
        return not left

    def _show(self, show: Callable[[], None]) -> None:
        try:
            show()
        except BaseException as error:
            self._problem = error
        finally:
            self._shown = True
            self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._wake_in, b"w")

    def _pass_keys(self, sender: KeySender) -> bool:
        """Read keys until everything is shown; return whether the user left."""
        stdin: int | None = 0
        last = b"\n"
        while not self._shown:
            if self._resized:
                self._resized = False
                if self._terminal and (size := window_size()) is not None:
                    sender.resize(*size)
            reading = [self._wake_out, *([stdin] if stdin is not None and sender.has_room else [])]
            ready = select.select(reading, [], [], None if sender.has_room else FULL_S)[0]
            if self._wake_out in ready:
                os.read(self._wake_out, 4096)
            if stdin not in ready:
                continue
            data = _read_keys()
            if not data:
                stdin = None
                if self._terminal:
                    sender.type(END_OF_INPUT if last.endswith(b"\n") else 2 * END_OF_INPUT)
                else:
                    sender.end()
                continue
            last, leaves = self._filter.take(data) if self._filter and self._raw else (data, False)
            sender.type(last)
            if leaves:
                return True
        return False

    @contextlib.contextmanager
    def _prepared(self) -> Iterator[None]:
        """Let every key reach the program, and notice a new size of the window. Everything is put back at the end."""

        def resized(number: int, frame: FrameType | None) -> None:
            self._resized = True
            self._wake()

        before = signal.signal(signal.SIGWINCH, resized)
        settings = termios.tcgetattr(0) if self._raw else None
        try:
            if settings is not None:
                tty.setraw(0, termios.TCSADRAIN)  # what was typed ahead is kept
            yield
        finally:
            if settings is not None:
                termios.tcsetattr(0, termios.TCSADRAIN, settings)
            signal.signal(signal.SIGWINCH, before)


def _read_keys() -> bytes:
    try:
        return os.read(0, KEYS_BYTES)
    except OSError:  # the terminal is gone
        return b""


def window_size() -> tuple[int, int] | None:
    """Return rows and columns of this process's terminal; None: it has none."""
    for descriptor in (1, 0):
        with contextlib.suppress(OSError):
            columns, rows = os.get_terminal_size(descriptor)
            if rows and columns:
                return rows, columns
    return None


def write_out(descriptor: int, data: bytes) -> None:
    """Write all bytes, also to a terminal that takes only some of them at a time."""
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:
            select.select([], [descriptor], [])
