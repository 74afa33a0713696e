"""A user at a terminal: a command in a real pty, what it shows, and keys."""

import fcntl
import os
import pty
import select
import signal
import struct
import termios
import time
from pathlib import Path

from tests.support.command_line import COMMAND, environment

LONGEST_S = 30.0


class Screen:
    """A process in a terminal of its own."""

    def __init__(self, home: Path, *words: str, rows: int = 40, columns: int = 100) -> None:
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
            os.execvpe(COMMAND[0], [*COMMAND, *words], environment(CARPOOL_HOME=str(home), TERM="vt100"))
        self.shown = b""

    def type(self, keys: str) -> None:
        os.write(self.terminal, keys.encode())

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        os.kill(self.pid, signal.SIGWINCH)

    def until(self, text: str) -> str:
        """Wait for a text and return what was shown before it; what follows is looked at next time."""
        until = time.monotonic() + LONGEST_S
        while text.encode() not in self.shown:
            assert time.monotonic() < until, f"{text!r} is not in {self.shown!r}"
            assert self._read(0.5), f"{text!r} is not in {self.shown!r}, and the process has ended"
        before, _, self.shown = self.shown.partition(text.encode())
        return before.decode()

    def _read(self, seconds: float) -> bool:
        if not select.select([self.terminal], [], [], seconds)[0]:
            return True
        try:
            data = os.read(self.terminal, 65_536)
        except OSError:
            return False
        self.shown += data
        return bool(data)

    def end(self) -> int:
        """Return the exit code of the process, which ends by itself."""
        until = time.monotonic() + LONGEST_S
        while self._read(0.5):
            assert time.monotonic() < until, f"it does not end; it shows {self.shown!r}"
        os.close(self.terminal)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
