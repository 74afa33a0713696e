"""Waiting for a service that is starting, so that `carpool serve &` may be followed by `carpool submit` at once.

A service locks its home before it answers, so a lock whose holder has written no address is that of a service that
starts. A process needs a moment to get that far: until then only its command line tells. `Client.find` calls `wait`.
"""

import os
import time
from collections.abc import Callable
from itertools import pairwise

from carpool.live.freezer import process_stat, process_words
from carpool.live.home import Home

START_S = 60.0
"""Seconds to wait for a service that starts: one with a long journal needs some."""
SAY_S = 1.0
"""Seconds after which it is said what is waited for."""
LOOK_S = 0.1
LOCK_S = 5.0
"""Age of a `carpool serve`, in seconds, by which it has locked its home, also on a busy machine."""
START_TIME = 19
"""Index of a process's start, in clock ticks since the machine started, in what `process_stat` returns."""


def wait(place: Home, say: Callable[[str], None]) -> None:
    """Wait while a service for this home is starting; return at once if none is. `say` is called if it takes long."""
    began, waited, said = time.monotonic(), 0.0, False
    while waited < START_S and is_starting(place, waited):
        if waited > SAY_S and not said:
            say(f"waiting for the service of home {place.path}, which is starting")
            said = True
        time.sleep(LOOK_S)
        waited = time.monotonic() - began


def is_starting(place: Home, waited_s: float = 0.0) -> bool:
    """Return whether a service for this home is starting, or may be: its process is a few seconds old, and older than
    the wait for it. On a busy machine, services of other homes may be started all the time."""
    address, holder = place.read_address(), place.holder()
    if holder is not None:
        return address is None or address.get("pid") != holder
    return any(_is_new_service(name, waited_s) for name in os.listdir("/proc") if name.isdigit())


def _is_new_service(pid: str, least_age_s: float) -> bool:
    """Return whether a process of this user is a `carpool serve`, for whatever home, that has just been started."""
    try:
        own = os.stat(f"/proc/{pid}").st_uid == os.getuid()
    except OSError:  # it has ended
        return False
    fields = process_stat(pid) if own else None
    if fields is None:
        return False
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[START_TIME]) / os.sysconf("SC_CLK_TCK")
    return least_age_s <= age_s < LOCK_S and is_service(list(process_words(pid, "cmdline")))


def is_service(words: list[bytes]) -> bool:
    """Return whether a command line is that of `carpool serve`."""
    pairs = ((word.rpartition(b"/")[2], follows) for word, follows in pairwise(words))
    return any(word in (b"carpool", b"carpool.cli") and follows == b"serve" for word, follows in pairs)
