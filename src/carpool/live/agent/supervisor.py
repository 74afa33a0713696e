"""The supervisor of an agent: it starts the agent, starts it again when it dies, and passes signals on.

It is a process of its own that does nothing else. The agent dies with it, so that there is never a second one; the
workers of both outlive them until the node's lease is over. What workers leave behind becomes a child of the supervisor
instead of escaping. The agent's settings, which hold its token, go through a pipe and never through an argument.
"""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
AGENT = [sys.executable, "-m", "carpool.live.agent.main"]
"""The command of the agent's process."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0
"""Pauses before an agent is started again."""
STEADY_S = 30.0
"""Seconds after which an agent that dies counts as one that worked."""
REFUSED = 2
"""Exit status of an agent that no service accepts."""


def supervise(settings: Mapping[str, Any]) -> int:
    """Run an agent until it ends by itself or a signal ends it; return the exit status."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    ending = False
    child: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, frame: object) -> None:
        nonlocal ending
        ending = True
        if child is not None:
            with contextlib.suppress(OSError):
                child.send_signal(signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, pass_on)
    pause = FIRST_PAUSE_S
    while True:
        began = time.monotonic()
        child = _start(settings)
        if ending:
            pass_on(signal.SIGTERM, None)
        status = _wait(child)
        if ending or status in (0, REFUSED):
            return max(0, status)
        pause = FIRST_PAUSE_S if time.monotonic() - began > STEADY_S else min(2 * pause, LONGEST_PAUSE_S)
        print(f"carpool agent: the agent ended with status {status}; it is started again", file=sys.stderr, flush=True)
        time.sleep(pause)


def _start(settings: Mapping[str, Any]) -> "subprocess.Popen[bytes]":
    child = subprocess.Popen(AGENT, stdin=subprocess.PIPE)
    assert child.stdin is not None
    with contextlib.suppress(OSError):
        child.stdin.write(json.dumps(dict(settings)).encode())
        child.stdin.close()
    return child


def _wait(child: "subprocess.Popen[bytes]") -> int:
    """Wait for the agent, and collect the status of orphans meanwhile."""
    while True:
        try:
            pid, status = os.waitpid(-1, 0)
        except ChildProcessError:
            return child.returncode or 0
        except InterruptedError:
            continue
        if pid == child.pid:
            child.returncode = os.waitstatus_to_exitcode(status)
            return child.returncode


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent dies."""
    parent = os.getppid()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
