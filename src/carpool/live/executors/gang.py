"""A gang on this machine as its files show it: directories, records of its wrappers, exits, and what they add up to.

Used by the local executor; nothing here waits or starts anything.
"""

import contextlib
import json
import os
import re
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from carpool import channel
from carpool.live import rank as wrapper
from carpool.live.executors.base import Ended, Key, Outcome, Slot
from carpool.live.executors.processes import Identity, boot_id
from carpool.live.home import write_private

OUT_OF_MEMORY = re.compile(rb"CUDA out of memory|CUDA error: out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED")
"""What the last lines of a script without the training library say when GPU memory ran out."""
TAIL_BYTES = 16_384
KILLED = 137
"""The exit code of a worker whose wrapper was killed: the kernel killed it too."""
GANG, BROKEN = "gang.json", "broken.json"


@dataclass(slots=True)
class Rank:
    """One worker under its wrapper."""

    directory: Path
    identity: Identity | None = None
    exit: dict[str, Any] | None = None
    gone: bool = False
    """The wrapper has ended and nothing is left of the worker."""

    def look(self) -> None:
        """Read what the wrapper has recorded."""
        self.identity = Identity.of(read_json(self.directory / wrapper.RECORD)) or self.identity
        found = read_json(self.directory / wrapper.EXIT)
        self.exit = found if isinstance(found, dict) else None

    @property
    def alive(self) -> bool:
        return self.identity is not None and self.identity.alive()

    @property
    def rebooted(self) -> bool:
        return self.identity is not None and self.identity.boot != boot_id()

    @property
    def code(self) -> int | None:
        return self.exit.get("code") if self.exit else None

    def report(self) -> channel.Report | None:
        return channel.read_report(self.directory)


@dataclass(slots=True)
class Gang:
    key: Key
    directory: Path
    slots: tuple[Slot, ...]
    ranks: list[Rank] = field(default_factory=list)
    leases: list[int] = field(default_factory=list)
    stop: str = ""
    """How it was asked to stop last; empty: it was not."""
    broken: str = ""
    """Which worker's death ended it, and how that one ended."""
    broken_code: int | None = None
    control: channel.Control = field(default_factory=channel.Control)

    @property
    def launched(self) -> bool:
        return (self.directory / wrapper.GO).exists()

    def say(self, control: channel.Control) -> None:
        self.control = control
        for rank in self.ranks:
            with contextlib.suppress(OSError):  # a worker that cannot be told is stopped by signal all the same
                channel.write_control(rank.directory, control)

    def signal(self) -> None:
        """Tell the wrappers to look at how they are to stop."""
        for rank in self.ranks:
            if rank.identity is not None and not rank.gone:
                rank.identity.signal(signal.SIGTERM)

    def first_death(self) -> Rank | None:
        """A worker that ended otherwise than well."""
        return next((rank for rank in self.ranks if rank.gone and not self._left_well(rank)), None)

    def _left_well(self, rank: Rank) -> bool:
        if rank.code == 0 or (self.stop and rank.code == channel.EXIT_STOPPED):
            return True
        report = rank.report() if self.stop else None
        return (
            report is not None and report.status is channel.WorkerStatus.STOPPED
        )  # it saved, then its libraries fell over

    def ended(self) -> Ended:
        """What became of it, once all ranks are gone."""
        job, attempt = self.key
        reports = [report for rank in self.ranks if (report := rank.report()) and report.attempt == attempt]
        saved = [report.checkpoint for report in reports if report.checkpoint >= 0]
        done = float(max(saved)) if saved else None
        codes = [rank.code for rank in self.ranks]
        outcome, reason = self._judge(reports)
        bad = self.broken_code or next((code for code in codes if code), None)
        if bad is None and outcome is Outcome.FAILED and None in codes:
            bad = KILLED
        exit_code = 0 if outcome is Outcome.FINISHED else bad
        alone = any(report.needs_alone for report in reports)
        return Ended(job, attempt, outcome, reason, exit_code, done, alone)

    def _judge(self, reports: list[channel.Report]) -> tuple[Outcome, str]:
        codes = [rank.code for rank in self.ranks]
        if all(code == 0 for code in codes) and (not self._was_pushed() or _through(reports)):
            return Outcome.FINISHED, ""
        if any(rank.exit is None and rank.rebooted for rank in self.ranks):
            return Outcome.LOST, "the machine restarted"
        if any(rank.exit and rank.exit.get("never") for rank in self.ranks):
            return Outcome.LOST, "the service was gone before the gang was complete"
        short = any(report.status is channel.WorkerStatus.OUT_OF_MEMORY or report.needs_alone for report in reports)
        if not self.stop and (short or any(self._cried(rank) for rank in self.ranks if rank.code)):
            return Outcome.OUT_OF_MEMORY, "out of GPU memory"
        if self.stop and not self.broken:
            return Outcome.STOPPED, ""
        saved = any(report.status is channel.WorkerStatus.STOPPED for report in reports)
        if saved and all(code in (0, channel.EXIT_STOPPED) for code in codes):
            return Outcome.LOST, "stopped on a request that nobody remembers"
        return Outcome.FAILED, self.broken or self._epitaph()

    def _was_pushed(self) -> bool:
        """Was a worker told by a signal to leave? Then an exit code of 0 does not mean that it was through."""
        return any(rank.exit and rank.exit.get("stage") in ("ending", "killed") for rank in self.ranks)

    def _cried(self, rank: Rank) -> bool:
        with contextlib.suppress(OSError), (rank.directory / "stderr.log").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            return OUT_OF_MEMORY.search(file.read()) is not None
        return False

    def _epitaph(self) -> str:
        dead = self.first_death()
        return self.describe(dead) if dead else "its workers ended without a word"

    def break_off(self, dead: Rank) -> None:
        """Remember who was the first to die; the others are about to be ended."""
        self.broken = self.describe(dead)
        self.broken_code = KILLED if dead.code is None else dead.code
        with contextlib.suppress(OSError):
            write_private(self.directory / BROKEN, json.dumps({"reason": self.broken, "code": self.broken_code}))

    def describe(self, rank: Rank) -> str:
        """Of what a worker died."""
        who = f"worker {self.ranks.index(rank)}"
        if rank.exit is None:
            return f"{who}: its wrapper was killed"
        number = rank.exit.get("signal")
        if number:
            with contextlib.suppress(ValueError):
                return f"{who} was killed by {signal.Signals(number).name}"
            return f"{who} was killed by signal {number}"
        return f"{who} ended with exit code {rank.code}"


def _through(reports: list[channel.Report]) -> bool:
    return bool(reports) and all(report.status is channel.WorkerStatus.DONE for report in reports)


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def open_gang(directory: Path, key: Key) -> Gang | None:
    """A gang of an earlier service from its files; None where it was never complete enough to run."""
    told = read_json(directory / GANG)
    if not isinstance(told, dict) or not (directory / wrapper.GO).exists():
        return None
    gang = Gang(key, directory, tuple(Slot(**slot) for slot in told["slots"]))
    for number in range(told["ranks"]):
        rank = Rank(directory / f"rank-{number}")
        rank.look()
        gang.ranks.append(rank)
        stop = read_json(rank.directory / wrapper.STOP)
        gang.stop = gang.stop or (stop.get("how", "end") if isinstance(stop, dict) else "")
    gang.control = channel.read_control(gang.ranks[0].directory) or gang.control
    broken = read_json(directory / BROKEN)
    if isinstance(broken, dict):
        gang.broken, gang.broken_code = broken.get("reason", ""), broken.get("code")
    return gang
