"""The service's clock: seconds since the epoch that never go backwards and never jump.

It starts from the wall clock and then follows the time since boot, so that setting the wall clock changes nothing. A
restarted service continues from the last time in the journal. If the machine has not rebooted and jobs ran, it adds the
time since boot, so that a changed wall clock does not fake progress. Otherwise it uses the wall clock, but never goes
back before that time.
"""

import time
from typing import Protocol

from carpool.live.may_run import uptime as since_boot
from carpool.live.rank import boot_id

__all__ = ["Clock", "RealClock", "since_boot"]


class Clock(Protocol):
    def now(self) -> float: ...


class RealClock:
    def __init__(self) -> None:
        self._base = time.time() - since_boot()

    def now(self) -> float:
        return self._base + since_boot()

    def resume(self, at: float, uptime: float, boot: str, busy: bool) -> None:
        """Continue from the time `at` of an earlier service, when the machine with boot id `boot` was up for `uptime`.

        `busy`: jobs ran then. If none did, no progress can be faked, and the wall clock is used again.
        """
        if boot == boot_id() and busy:
            self._base = at - uptime
        elif self.now() < at:
            self._base = at - since_boot()
