"""Whether a worker may run: the pauses that the executor asks for, and the lease of its node.

The wrapper (`rank.py`) calls both when their time comes. It loads this file by its path into a bare interpreter, after
`freezer.py` and `worker_directory.py`, and this file imports no other module of Carpool.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or __package__:
    from carpool.live import freezer
    from carpool.live import worker_directory as files

if not TYPE_CHECKING and not __package__:
    freezer, files = sys.modules["freezer"], sys.modules["worker_directory"]

AGAIN_S = 0.02
"""Seconds before another attempt to stop processes that are not all stopped."""
GATE_S = 0.02
"""Seconds between two looks whether a worker that starts ahead of its turn has made a step."""
LEASE_LOOK_S = 5.0
"""Largest number of seconds between two looks at the node's lease: the machine may have been suspended."""
LOOK_S = 15.0
"""Largest number of seconds between two looks whether the service of a paused worker runs."""


def uptime() -> float:
    """Return the seconds since the machine booted, which no user can set."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Pause:
    """Whether the worker is paused: as the executor's latest request says, unless the service is gone for too long."""

    def __init__(self, directory: files.WorkerDirectory, mark: str) -> None:
        self._directory = directory
        self._by_signals = freezer.SignalFreezer(os.getpid(), mark)
        self.cgroup: freezer.CgroupFreezer | None = None
        """The worker's cgroup, if it has one."""
        self._freezer: freezer.CgroupFreezer | freezer.SignalFreezer = self._by_signals
        self._answer = directory.open_reserved(files.PAUSED, files.PAUSED_BYTES)
        self._request: dict[str, Any] = {}
        self._wanted = self._paused = self._over = self._armed = False
        self._worker = 0
        self._seen = 0
        """Time stamp of the service's last sign of life."""
        self._seen_at = 0.0
        self.due: float | None = None
        """When to call `look` next."""

    @property
    def paused(self) -> bool:
        return self._paused

    def obey(self, worker: int) -> None:
        """Carry out the executor's latest request."""
        try:
            self._request = self._directory.read(files.PAUSE)
            wanted = bool(self._request["paused"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return
        if self._over:
            return
        self._armed = False
        if wanted:
            self._begin(worker)
        else:
            self._go_on()

    def arm(self, request: dict[str, Any], worker: int) -> None:
        """Pause a worker that starts ahead of its turn as soon as it reports a step, whether or not a service runs. A
        request of the executor replaces this one."""
        self._request, self._worker, self._armed = request, worker, True
        self.due = time.monotonic() + GATE_S

    def _begin(self, worker: int) -> None:
        if not self._wanted:
            inside = self.cgroup is not None and self.cgroup.holds(worker)
            self._freezer = self.cgroup if inside and self.cgroup is not None else self._by_signals
        self._wanted, self._paused, self._seen_at = True, False, time.monotonic()
        self._seen = self._sign_of_life()
        self.look()

    def look(self) -> None:
        """Stop what still runs or runs again, and let the worker go on if the service shows no sign of life."""
        if self._armed:
            if not self._directory.has_steps():
                self.due = time.monotonic() + GATE_S
                return
            self._armed = False
            self._begin(self._worker)
            return
        if not self._wanted:
            self.due = None
            return
        now, seen = time.monotonic(), self._sign_of_life()
        patience = float(self._request.get("patience_s", 600.0))
        if seen != self._seen:
            self._seen, self._seen_at = seen, now
        if now - self._seen_at > patience:
            self._go_on(let_go=True)
            self._swap_in()
            return
        try:
            stopped = self._freezer.stop()
        except OSError:  # the cgroup is gone
            self._freezer, stopped = self._by_signals, self._by_signals.stop()
        if stopped and not self._paused:
            self._paused = True
            self._confirm(paused=True)
        self.due = time.monotonic() + (min(LOOK_S, patience / 5) if stopped else AGAIN_S)

    def end(self) -> None:
        """Let the worker go on for good, because it is to stop."""
        self._over, self._armed = True, False
        if self._wanted:
            self._go_on()
            self._swap_in()

    def _go_on(self, *, let_go: bool = False) -> None:
        self._freezer.go_on()
        self._wanted = self._paused = False
        self.due = None
        self._confirm(paused=False, let_go=let_go)

    def _swap_in(self) -> None:
        """Let the worker's memory be moved back to its GPU, in the background; when it resumes, the service does it."""
        command = self._request.get("swap_in")
        if command:
            with contextlib.suppress(OSError):
                os.posix_spawn(command[0], command, {"PATH": os.defpath})

    def _confirm(self, *, paused: bool, let_go: bool = False) -> None:
        data = {"sequence": self._request.get("sequence", 0), "paused": paused, "let_go": let_go}
        with contextlib.suppress(OSError):
            os.pwrite(self._answer, json.dumps(data).encode().ljust(files.PAUSED_BYTES), 0)

    def _sign_of_life(self) -> int:
        """Return the time stamp of the file that the service touches while it runs. Only changes of it count, so that
        a clock that is set does not matter."""
        with contextlib.suppress(OSError, KeyError):
            return os.stat(self._request["alive"]).st_mtime_ns
        return 0


class Lease:
    """How long the workers of this node may run, as the node's agent wrote it down; on one machine there is none.

    The file has two times on the clock `uptime`, `UNTIL SAVE`: when the lease ends, and when the worker should save if
    the lease has not been renewed by then. A file that cannot be read leaves the last known lease in force.
    """

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._until = self._save = 0.0
        self.asked = False
        """The worker was asked to save because the lease was not renewed."""

    def look(self) -> None:
        """Read the latest lease."""
        with contextlib.suppress(OSError, ValueError):
            with open(self._path or "") as file:
                until, save = map(float, file.read(200).split())
            if until > self._until:
                self._until, self._save, self.asked = until, save, False

    @property
    def over(self) -> bool:
        return self._path is not None and uptime() >= self._until

    @property
    def wants_checkpoint(self) -> bool:
        return self._path is not None and not self.asked and uptime() >= self._save

    @property
    def due(self) -> float | None:
        """When to look again, on the monotonic clock."""
        if self._path is None:
            return None
        at = self._until if self.asked else self._save
        return time.monotonic() + min(LEASE_LOOK_S, max(0.01, at - uptime()))
