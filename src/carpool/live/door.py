"""The door of a worker's wrapper: the terminal of an interactive job, and commands beside a worker.

The wrapper (`rank.py`) opens it at the start of a job with a terminal, and for any other job when the service asks for
it. It is a unix socket in the worker's directory that only the service's user can open, so it outlives the service as
the wrapper does. A caller sends one request, a line of JSON, and gets lines of JSON. Everything that is kept for a
caller is bounded: a caller that does not read stops its own command and nothing else. `rank.py` loads this file by its
path into a bare interpreter, so it imports no other module of Carpool.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import struct
import termios
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

NAME = "door"
"""Name of the socket in the worker's directory."""
MAX_REQUEST = 4 << 20
"""Bytes that a request may have: a command line may be long."""
MAX_CALLERS = 64
MAX_COMMANDS = 16
"""Commands beside a worker at a time."""
MAX_PENDING = 64 << 10
"""Bytes that wait for a program to read them, and bytes that wait for a caller to read them."""
MAX_TYPISTS = 64
"""Callers whose last number is remembered."""
READ_BYTES = 32 << 10
ROWS, COLUMNS = 24, 80
"""Size of a terminal before the first caller sends that of its window."""
AGAIN_S = 0.5
"""Seconds before another attempt to write to a full disk."""
LEAVE_S = 5.0
"""Seconds that a command has to leave after its caller is gone."""

Become = Callable[[list[str], tuple[int, int, int], bool], int]
"""Starts a process with the rights, the folder and the environment of the worker and returns its pid: the command,
three open files, and whether they are a terminal."""


class Source(Protocol):
    """Something with open files that the door waits for."""

    def interests(self) -> Iterable[tuple[int, int]]:
        """Return open files and what to wait for, as `select.poll` takes it."""

    def ready(self, descriptor: int, events: int) -> None: ...

    def due(self) -> float | None:
        """Return when to call `time_passed`, on the monotonic clock."""

    def time_passed(self) -> None: ...


class SignalPipe:
    """Signals that `select.poll` can wait for, together with open files."""

    def __init__(self, numbers: set[signal.Signals]) -> None:
        self.descriptor, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._got: set[int] = set()
        for number in numbers:
            signal.signal(number, lambda number, frame: self._got.add(number))
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)  # it only wakes, so a full pipe loses nothing
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)

    def take(self) -> set[int]:
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self.descriptor, 4096)) == 4096:
                pass
        got, self._got = self._got, set()
        return got


def open_pty(rows: int, columns: int, owner: tuple[int, int] | None) -> tuple[int, int]:
    """Return both ends of a new terminal, the program's end owned by the user who will use it."""
    master, slave = os.openpty()
    os.set_blocking(master, False)
    if owner is not None:
        os.fchown(slave, *owner)
    os.fchmod(slave, 0o600)
    set_size(master, rows, columns)
    return master, slave


def control(terminal: int) -> None:
    """Make a terminal that of this process's session, so that its keys become signals."""
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)


def set_size(terminal: int, rows: int, columns: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


class Input:
    """Bytes on their way to a program, each once: a caller that does not know whether they arrived sends them again."""

    def __init__(self) -> None:
        self.pending = bytearray()
        self._numbers: dict[str, int] = {}

    def take(self, typist: str, number: int, data: bytes) -> bool:
        """Return whether the bytes with this number are taken, now or before; there may be no room for them."""
        if number <= self._numbers.get(typist, -1):
            return True
        if len(self.pending) + len(data) > MAX_PENDING:
            return False
        self.pending += data
        self._numbers.pop(typist, None)
        self._numbers[typist] = number
        if len(self._numbers) > MAX_TYPISTS:
            del self._numbers[next(iter(self._numbers))]
        return True

    def write(self, descriptor: int) -> None:
        with contextlib.suppress(BlockingIOError):
            written = os.write(descriptor, self.pending[:READ_BYTES])
            del self.pending[:written]


class Terminal:
    """The terminal of a worker. What the program prints goes to the worker's log, and callers read it there."""

    def __init__(self, log: int, idle_s: float, owner: tuple[int, int] | None) -> None:
        self.master, self.slave = open_pty(ROWS, COLUMNS, owner)
        self._log, self._idle_s = log, idle_s
        self._input = Input()
        self._unwritten = b""
        self._again: float | None = None
        """When to write again to a disk that was full."""
        self._used = time.monotonic()
        self.on_output: Callable[[], None] = lambda: None

    @property
    def idle_at(self) -> float:
        """When nothing has been typed or printed for the time that was stated."""
        return self._used + self._idle_s

    def used(self) -> None:
        """Count the time that the terminal is left alone from now on."""
        self._used = time.monotonic()

    def size(self) -> int:
        """Number of bytes of the log."""
        return os.fstat(self._log).st_size

    def interests(self) -> Iterable[tuple[int, int]]:
        wanted = (0 if self._unwritten else select.POLLIN) | (select.POLLOUT if self._input.pending else 0)
        return [(self.master, wanted)] if wanted else []

    def due(self) -> float | None:
        return self._again

    def time_passed(self) -> None:
        self._again = None
        self._keep(b"")

    def ready(self, descriptor: int, events: int) -> None:
        if events & select.POLLOUT:
            self._input.write(self.master)
        if events & (select.POLLIN | select.POLLHUP) and not self._unwritten:
            self._read()

    def _read(self) -> bool:
        try:
            data = os.read(self.master, READ_BYTES)
        except OSError:  # nothing is there, or the program's end is closed
            return False
        self.used()
        self._keep(data)
        return bool(data)

    def _keep(self, data: bytes) -> None:
        """Write to the log. While the disk is full, nothing more is read, so that the program waits."""
        self._unwritten += data
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[os.write(self._log, self._unwritten) :]
        except OSError:
            self._again = time.monotonic() + AGAIN_S
        self.on_output()

    def say(self, sentence: str) -> None:
        """Show a line of the wrapper itself."""
        self._keep(f"\r\n{sentence}\r\n".encode())

    def finish(self) -> None:
        """Write what the program printed before it ended; no process has its end of the terminal open any more."""
        os.close(self.slave)
        self._keep(b"")
        while not self._unwritten and self._read():
            pass

    def typed(self, request: dict[str, Any]) -> dict[str, Any]:
        """Take what a caller typed, or the size of its window."""
        if request.get("rows"):
            set_size(self.master, int(request["rows"]), int(request["columns"]))
            with contextlib.suppress(OSError):  # a program that fills the screen draws it again
                os.killpg(os.tcgetpgrp(self.master), signal.SIGWINCH)
        self.used()
        data = base64.b64decode(request.get("data", ""))
        return {"taken": self._input.take(str(request["typist"]), int(request["number"]), data)}


class Caller:
    """One connection to the door."""

    def __init__(self, connection: socket.socket, door: Door) -> None:
        connection.setblocking(False)
        self._socket, self._door = connection, door
        self._incoming, self.outgoing = bytearray(), bytearray()
        self.watches = self._stale = False
        self.command: SideCommand | None = None
        self._last = False

    def interests(self) -> Iterable[tuple[int, int]]:
        return [(self._socket.fileno(), select.POLLIN | (select.POLLOUT if self.outgoing else 0))]

    def due(self) -> float | None:
        return None

    def time_passed(self) -> None:
        return

    def ready(self, descriptor: int, events: int) -> None:
        try:
            if events & (select.POLLIN | select.POLLHUP | select.POLLERR):
                self._read()
            if events & select.POLLOUT:
                self._write()
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error):
            self.close()  # it is gone, or asks for something that is not understood

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            data = self._socket.recv(READ_BYTES)
            if not data:
                self.close()
                return
            if self.watches or self.command is not None:  # there is nothing more to ask for
                return
            self._incoming += data
            if len(self._incoming) > MAX_REQUEST:
                raise ValueError("the request is too long")
            line, end, _ = self._incoming.partition(b"\n")
            if end:
                self._door.answer(self, json.loads(line))

    def _write(self) -> None:
        with contextlib.suppress(BlockingIOError):
            del self.outgoing[: self._socket.send(self.outgoing[:READ_BYTES])]
        if self.outgoing:
            return
        if self._stale:
            self.show_size()
        elif self._last:
            self.close()

    def say(self, data: dict[str, Any], *, last: bool = False) -> None:
        self.outgoing += json.dumps(data).encode() + b"\n"
        self._last = self._last or last
        with contextlib.suppress(OSError):
            self._write()

    def show_size(self) -> None:
        """Say how long the log is now, or later, if the caller has not read what was said before."""
        self._stale = bool(self.outgoing)
        if not self._stale and self._door.terminal is not None:
            self.say({"size": self._door.terminal.size()})

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()
        self._door.leave(self)
        if self.command is not None:
            self.command.abandon()


class SideCommand:
    """A command that runs beside a worker, with the rights and in the environment of its job, for one caller."""

    def __init__(self, name: str, caller: Caller, request: dict[str, Any], door: Door) -> None:
        self.name, self._caller, self._door = name, caller, door
        self._input, self._input_ends = Input(), False
        self._status: int | None = None
        self._kill_at: float | None = None
        self._abandoned = False
        command = [str(word) for word in request["command"]]
        if request.get("rows"):
            self._write_to, slave = open_pty(int(request["rows"]), int(request["columns"]), door.owner)
            self._streams, theirs, terminal = {self._write_to: "stdout"}, (slave, slave, slave), True
        else:
            (stdin, self._write_to), (out, stdout), (err, stderr) = (os.pipe2(os.O_CLOEXEC) for _ in range(3))
            self._streams, theirs, terminal = {out: "stdout", err: "stderr"}, (stdin, stdout, stderr), False
            for descriptor in (self._write_to, out, err):
                os.set_blocking(descriptor, False)
        self._terminal = terminal
        try:
            self.pid = door.become(command, theirs, terminal)
        finally:
            for descriptor in set(theirs):
                os.close(descriptor)

    def interests(self) -> Iterable[tuple[int, int]]:
        room = len(self._caller.outgoing) < MAX_PENDING
        wanted = dict.fromkeys(self._streams, select.POLLIN if room else 0)
        if self._write_to >= 0 and self._input.pending:
            wanted[self._write_to] = wanted.get(self._write_to, 0) | select.POLLOUT
        return [(descriptor, events) for descriptor, events in wanted.items() if events]

    def due(self) -> float | None:
        if self._status is not None:  # processes left behind may keep the files open and print nothing
            return 0.0 if len(self._caller.outgoing) < MAX_PENDING else None
        return self._kill_at

    def time_passed(self) -> None:
        self._end_if_over()
        self._kill_at = None
        self._signal(signal.SIGKILL)

    def ready(self, descriptor: int, events: int) -> None:
        if descriptor == self._write_to and events & (select.POLLOUT | select.POLLERR):
            self._feed()
        if descriptor in self._streams and events & (select.POLLIN | select.POLLHUP):
            self._read(descriptor)
        self._end_if_over()

    def _read(self, descriptor: int) -> bool:
        try:
            data = os.read(descriptor, READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:  # all processes have closed the terminal
            data = b""
        if data:
            self._caller.say({"stream": self._streams[descriptor], "data": base64.b64encode(data).decode()})
            return True
        del self._streams[descriptor]
        if descriptor == self._write_to:
            self._write_to = -1
        os.close(descriptor)
        return False

    def _feed(self) -> None:
        try:
            self._input.write(self._write_to)
        except OSError:  # the program does not read any more
            self._input.pending.clear()
            self._input_ends = True
        if self._input_ends and not self._input.pending and not self._terminal:
            os.close(self._write_to)
            self._write_to = -1

    def typed(self, request: dict[str, Any]) -> dict[str, Any]:
        """Take what the caller's user typed, the size of the window, or the end of the input."""
        if request.get("rows") and self._terminal and self._write_to >= 0:
            set_size(self._write_to, int(request["rows"]), int(request["columns"]))
        if self._write_to < 0 or self._input_ends:
            return {"taken": True}
        data = base64.b64decode(request.get("data", ""))
        taken = self._input.take(str(request["typist"]), int(request["number"]), data)
        if taken and request.get("ends") and not self._terminal:
            self._input_ends = True
            self._feed()
        return {"taken": taken}

    def ended(self, status: int) -> None:
        self._status = status
        if self._abandoned:
            self._close()
        else:
            self._end_if_over()

    def _end_if_over(self) -> None:
        """Tell the caller the exit code once it has read all output. Processes left behind may keep the files open."""
        if self._status is None:
            return
        for descriptor in list(self._streams):
            while len(self._caller.outgoing) < MAX_PENDING and self._read(descriptor):
                pass
        if self._streams and len(self._caller.outgoing) >= MAX_PENDING:
            return
        code = os.waitstatus_to_exitcode(self._status)
        self._caller.say({"exit_code": code if code >= 0 else 128 - code}, last=True)
        self._close()

    def abandon(self) -> None:
        """End the command, because its caller is gone."""
        self._abandoned = True
        if self._status is not None:
            self._close()
        elif self._kill_at is None:
            self._signal(signal.SIGHUP)
            self._signal(signal.SIGCONT)
            self._kill_at = time.monotonic() + LEAVE_S

    def _signal(self, number: int) -> None:
        if self._status is None:
            with contextlib.suppress(OSError):
                os.killpg(self.pid, number)

    def _close(self) -> None:
        for descriptor in {*self._streams, self._write_to} - {-1}:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._streams, self._write_to = {}, -1
        self._door.commands.pop(self.name, None)


class Door:
    """The socket, its callers, and what they use."""

    def __init__(self, directory: int, become: Become, owner: tuple[int, int] | None, signals: set[Any]) -> None:
        self.become, self.owner = become, owner
        self.terminal: Terminal | None = None
        self.commands: dict[str, SideCommand] = {}
        self._callers: set[Caller] = set()
        self._number = 0
        self._signals = SignalPipe(signals)
        self._socket = _listen(directory)

    def has(self, terminal: Terminal) -> None:
        """Show a terminal to callers."""
        self.terminal = terminal
        terminal.on_output = self._show_size

    def attend(self, left: float | None) -> set[int]:
        """Serve callers until a signal comes or the time is over, and return the signals."""
        sources = self._sources()
        waiting, by_descriptor = select.poll(), {}
        waiting.register(self._signals.descriptor, select.POLLIN)
        waiting.register(self._socket.fileno(), select.POLLIN)
        for source in sources:
            for descriptor, events in source.interests():
                waiting.register(descriptor, events)
                by_descriptor[descriptor] = source
        dues = [at - time.monotonic() for source in sources if (at := source.due()) is not None]
        left = min([one for one in (left, *dues) if one is not None], default=None)
        for descriptor, events in waiting.poll(None if left is None else max(0.0, left) * 1000):
            if descriptor in by_descriptor:
                by_descriptor[descriptor].ready(descriptor, events)
            elif descriptor == self._socket.fileno():
                self._accept()
        for source in sources:
            due = source.due()
            if due is not None and due <= time.monotonic():
                source.time_passed()
        return self._signals.take()

    def _sources(self) -> list[Source]:
        found: list[Source] = [*self._callers, *self.commands.values()]
        return [self.terminal, *found] if self.terminal is not None else found

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._socket.accept()
            if len(self._callers) >= MAX_CALLERS:
                connection.close()
                return
            self._callers.add(Caller(connection, self))

    def leave(self, caller: Caller) -> None:
        self._callers.discard(caller)

    def _show_size(self) -> None:
        for caller in [caller for caller in self._callers if caller.watches]:
            caller.show_size()

    def answer(self, caller: Caller, request: dict[str, Any]) -> None:
        """Do what a caller asks for."""
        do = request["do"]
        if do == "watch" and self.terminal is not None:
            caller.watches = True
            caller.show_size()
        elif do == "type" and self.terminal is not None:
            caller.say(self.terminal.typed(request), last=True)
        elif do == "run":
            self._run(caller, request)
        elif do == "type to" and request["command"] in self.commands:
            caller.say(self.commands[request["command"]].typed(request), last=True)
        else:
            caller.say({"error": "there is no such terminal or command; it has ended"}, last=True)

    def _run(self, caller: Caller, request: dict[str, Any]) -> None:
        if len(self.commands) >= MAX_COMMANDS:
            caller.say({"error": f"{MAX_COMMANDS} commands run beside this worker already; end one"}, last=True)
            return
        self._number += 1
        try:
            command = SideCommand(str(self._number), caller, request, self)
        except OSError as error:
            caller.say({"error": f"the command cannot be started now ({error.strerror}); try again"}, last=True)
            return
        self.commands[command.name] = caller.command = command
        caller.say({"command": command.name})

    def reaped(self, pid: int, status: int) -> None:
        """Note that a process has ended."""
        for command in [command for command in self.commands.values() if command.pid == pid]:
            command.ended(status)

    def finish(self) -> None:
        """Keep the last output and close everything. All processes of the worker are gone."""
        if self.terminal is not None:
            self.terminal.finish()
        for command in list(self.commands.values()):
            command.ended(signal.SIGKILL)
        for caller in list(self._callers):
            caller.close()
        self._socket.close()


def _listen(directory: int) -> socket.socket:
    """Return the listening socket. It is reached through the open directory, because paths of sockets are short."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(NAME, dir_fd=directory)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)  # no other user may connect, not even for a moment
    try:
        listening.bind(f"/proc/self/fd/{directory}/{NAME}")
    finally:
        os.umask(mask)
    listening.listen(MAX_CALLERS)
    listening.setblocking(False)
    return listening
