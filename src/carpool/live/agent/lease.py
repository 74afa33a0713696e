"""The lease of a node: until when its workers may run without another answer of the service.

The agent writes it and the wrappers read it (`carpool.live.may_run.Lease`), so that a dead, stopped or cut-off agent
extends nothing. It counts from the moment at which the answered request left, on the machine's own clock: the service,
which counts from its answer, is always later.
"""

import contextlib
from pathlib import Path

from carpool.live.clock import since_boot
from carpool.live.home import write_private

SAVE_SHARE = 0.5
"""Share of the lease that is left when workers are asked to save."""


class NodeLease:
    """Writes the lease."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.until = 0.0
        self._length = 0.0

    def load(self) -> float | None:
        """Go on with the lease that an earlier agent of this boot wrote; return how long it was. None: there is none.
        Blocks."""
        with contextlib.suppress(OSError, ValueError):
            until, save = map(float, self._path.read_text()[:200].split())
            length = (until - save) / SAVE_SHARE
            if 0.0 < until <= since_boot() + length:  # one of an earlier boot may end later
                self.until, self._length = until, length
                return length
        return None

    def extend(self, sent_at: float, lease_s: float) -> None:
        """Let workers run until `lease_s` seconds after a request left. A lease never becomes shorter, but the next one
        may: an agent that is started again goes by the length that was granted last. Blocks."""
        until = max(sent_at + lease_s, self.until)
        if lease_s > 0.0 and (until, lease_s) != (self.until, self._length):
            write_private(self._path, f"{until:.3f} {until - SAVE_SHARE * lease_s:.3f}\n", sync=False)
            self.until, self._length = until, lease_s

    @property
    def over(self) -> bool:
        return since_boot() >= self.until
