"""The service's clock: seconds since the epoch that never run backwards and never leap.

It starts from the wall clock and then follows the time since boot, so that somebody who sets the wall clock changes
nothing. A restarted service goes on from its last journalled moment: by the time since boot where the machine is still
up, so that progress is not faked by a wall clock that was set forwards meanwhile, and otherwise by the wall clock,
but never before that moment.
"""

import time
from typing import Protocol

from carpool.live.rank import boot_id


def since_boot() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Clock(Protocol):
    def now(self) -> float: ...


class RealClock:
    def __init__(self) -> None:
        self._base = time.time() - since_boot()

    def now(self) -> float:
        return self._base + since_boot()

    def resume(self, at: float, uptime: float, boot: str, busy: bool) -> None:
        """Go on from a moment of an earlier service: time `at`, when the machine `boot` was up for `uptime`.

        `busy`: something ran then. Where nothing did, no progress can be faked, and the wall clock is trusted again.
        """
        if boot == boot_id() and busy:
            self._base = at - uptime
        elif self.now() < at:
            self._base = at - since_boot()
