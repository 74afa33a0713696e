"""When a gang computes: a training spends its first seconds on imports and on building its model, without the GPU.

A gang whose command may be a training starts warming up: `may_train` says which. It computes from the first step that
it reports. Where no sign of a training comes, it computes after `UNSIGNED_S`; where PyTorch was imported but no step
was reported, after `SIGNED_S`. docs/explanation/live-service.md states the rule.
"""

import asyncio
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from carpool.channel import Report
from carpool.core import events as ev
from carpool.core.state import State
from carpool.live.clock import Clock
from carpool.live.executors.base import Executor, GangKey
from carpool.live.journal.store import Commit
from carpool.live.service.inbox import Inbox
from carpool.live.spec import Spec

log = logging.getLogger("carpool.live")

EVERY_S = 0.25
"""Seconds between two looks while a job warms up."""
UNSIGNED_S = 10.0
"""Seconds after which a gang that gave no sign of a training counts as computing."""
SIGNED_S = 120.0
"""Seconds after which a gang that imported PyTorch and reported no step counts as computing."""
TRAINING = re.compile(r"(^|[/\s;&|])(python[0-9.]*|torchrun|accelerate|deepspeed|lightning|carpool)(\s|$)|\.py(\s|$)")


def may_train(spec: Spec) -> bool:
    """Return whether a job may report the steps of a training: it runs Python, and its owner lets it be watched."""
    return spec.watch and any(TRAINING.search(word) for word in spec.command)


@dataclass
class WarmUpWatch:
    """Notices when gangs compute."""

    state: State
    executor: Executor
    inbox: Inbox
    clock: Clock
    since: dict[GangKey, float] = field(default_factory=dict)
    """When each gang was first seen warming up."""

    async def run(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            try:
                warming = self._warming()
                if warming:
                    self._take(await asyncio.to_thread(self._read, warming))
            except Exception:  # the next look must happen
                log.exception("jobs that warm up could not be looked at")

    def look(self) -> None:
        """Look at the gangs that warm up, and put `Computing` into the inbox for those that compute now."""
        self._take(self._read(self._warming()))

    def _warming(self) -> list[GangKey]:
        warming = [(record.job.id, record.attempt) for record in self.state.running if record.warming_up]
        now = self.clock.now()
        self.since = {key: self.since.get(key, now) for key in warming}
        return warming

    def _read(self, warming: Sequence[GangKey]) -> list[tuple[GangKey, Report | None]]:
        """Read reports; not on the event loop, because the workers own these files."""
        return [(key, self.executor.report(key)) for key in warming]

    def _take(self, reports: Sequence[tuple[GangKey, Report | None]]) -> None:
        found = [(key, _tells(report)) for key, report in reports if self._computes(key, report)]
        if not found:
            return

        def prepare(now: float, commit: Commit) -> Sequence[ev.Event]:
            return [ev.Computing(now, *key, told=told) for key, told in found if self._still_warms(key)]

        self.inbox.add(prepare)

    def _computes(self, key: GangKey, report: Report | None) -> bool:
        if _tells(report):
            return True
        return self.clock.now() - self.since[key] > (UNSIGNED_S if report is None else SIGNED_S)

    def _still_warms(self, key: GangKey) -> bool:
        record = self.state.jobs.get(key[0])
        return record is not None and record.attempt == key[1] and record.warming_up


def _tells(report: Report | None) -> bool:
    """Return whether a gang's report says that its start-up is over: it made a step, or stands before its first."""
    return report is not None and (report.iteration > 0 or report.standing)
