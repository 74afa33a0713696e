"""Notices to users about their jobs: start, end, failure, time limit, slow-down beyond a bound.

The notifier is called after every turn and puts what is due into a queue; tasks send it from there, a few at a time,
and put what did not arrive back for later. Nothing waits for it, and a service that ends drops what is left. Logs and
the journal say that a notice failed, and never where it was to go.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from carpool.core import events as ev
from carpool.core.model import Status
from carpool.core.record import JobRecord
from carpool.core.state import State
from carpool.errors import InputError
from carpool.live.insight.receipt import receipt
from carpool.live.service.jobs import JobBook
from carpool.live.service.notice_queue import DueNotice, NoRoom, NoticeQueue
from carpool.live.service.senders import MailServer, NoticeText, NotSent, never_sent, send
from carpool.live.service.turns import TurnDone
from carpool.live.text import span
from carpool.notices import END, FAILURE, LIMIT, START, NoticeTarget, bound_of

log = logging.getLogger("carpool.live")
Targets = Mapping[str, Sequence[str]]
"""Where notices go, by their moments."""
KEPT_JOBS = 1000
"""Number of jobs of which it is kept that a notice did not arrive."""
AT_ONCE = 4
AGAIN_S = (1.0, 5.0, 30.0, 120.0)
"""Seconds before the second and further attempts."""


@dataclass(frozen=True, slots=True)
class NoticeSettings:
    """What the operator allows."""

    mail: MailServer | None = None
    private: bool = False
    """Whether webhooks may name addresses that are not public."""

    def check(self, wanted: Targets) -> None:
        """Raise `InputError` for notices that could never be sent."""
        for moment, targets in wanted.items():
            bound = bound_of(moment)
            if bound is not None and bound < 1.0:
                raise InputError(f"notify: {moment}: a slow-down is at least 1; write a bound such as slowdown:1.5")
            for target in map(NoticeTarget.read, targets):
                why = never_sent(target, mail=self.mail, private=self.private)
                if why:
                    raise InputError(f"notify: {moment}: {target.form}: {why}")


@dataclass
class Notifier:
    """Sends notices."""

    state: State
    book: JobBook
    settings: NoticeSettings
    note: Callable[[str], None]
    """Writes a line for the operator."""
    again_s: tuple[float, ...] = AGAIN_S
    undelivered: OrderedDict[str, list[str]] = field(default_factory=OrderedDict)
    """Why notices did not arrive, and in which form, for the latest such jobs. A restart forgets it."""
    _queue: NoticeQueue = field(default_factory=NoticeQueue)
    _threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(AT_ONCE, "notices"))
    """Threads of its own: a webhook may be slow, and other work of the service must not wait for one."""
    _told: set[str] = field(default_factory=set)
    """Jobs that have ended and whose stories are still to be written."""
    _slow: set[tuple[str, float]] = field(default_factory=set)
    """Jobs and bounds for which a notice of a slow-down was made: one is enough."""

    def turned(self, turn: TurnDone) -> None:
        for event in turn.events:
            job = getattr(event, "job", None)
            wanted = self._wanted(job)
            if not wanted:
                continue
            record = self.state.jobs.get(str(job))
            if isinstance(event, ev.Started) and record is not None and record.attempt == 1:
                self._due(record, wanted.get(START, ()), "started", turn.now)
            elif isinstance(event, ev.LimitNeared) and record is not None:
                self._due(record, wanted.get(LIMIT, ()), f"reaches its time limit in {span(event.left_s)}", turn.now)
            elif isinstance(event, ev.Observed) and record is not None:
                self._judge_speed(record, wanted, turn.now)
        for ended in self.book.ended:
            if ended.id not in self._told:
                self._told.add(ended.id)
                self._tell_end(ended.record, self._wanted(ended.id), turn.now)
        for ended in turn.ended:
            self._told.discard(ended.id)
            self._slow = {known for known in self._slow if known[0] != ended.id} if self._slow else self._slow

    def _tell_end(self, record: JobRecord, wanted: Targets, now: float) -> None:
        failed = record.status is Status.FAILED
        targets = wanted.get(FAILURE, wanted.get(END, ())) if failed else wanted.get(END, ())
        self._due(record, targets, str(record.status), now)

    def _wanted(self, job: Any) -> Targets:
        spec = self.book.specs.get(job) if isinstance(job, str) else None
        return (spec.notify or {}) if spec is not None else {}

    def _judge_speed(self, record: JobRecord, wanted: Targets, now: float) -> None:
        if not record.iteration_s or not record.pace_seen:
            return
        ratio = record.iteration_s / record.alone_iteration_s
        for moment, targets in wanted.items():
            bound = bound_of(moment)
            if bound is not None and ratio > bound and (record.job.id, bound) not in self._slow:
                self._slow.add((record.job.id, bound))
                self._due(record, targets, f"takes {ratio:.2f}× as long as alone", now)

    def _due(self, record: JobRecord, targets: Sequence[str], what: str, now: float) -> None:
        if not targets:
            return
        job, name = record.job.id, self.book.name(record.job.id)
        title = f"Carpool: job {job} {name} {what}".replace("  ", " ")
        account = receipt(record, now)
        reason = f" ({record.reason})" if record.reason and record.ended >= 0.0 else ""
        text = f"Job {job} {name} of {record.job.user} {what}{reason}. It waited {span(account['waited_s'])}"
        text += f" and ran {span(account['ran_s'])}." if account["ran_s"] else "."
        facts = {"job": job, "name": name, "user": record.job.user, "event": what, "reason": record.reason}
        for target in map(NoticeTarget.read, targets):
            try:
                self._queue.add(DueNotice(job, record.job.user, target, NoticeText(title, text, facts)))
            except NoRoom:
                log.warning("a notice about job %s is dropped: too many wait", job)
                self._keep(job, f"{target.form}: too many wait")

    def _keep(self, job: str, why: str) -> None:
        self.undelivered.setdefault(job, []).append(why)
        while len(self.undelivered) > KEPT_JOBS:
            self.undelivered.popitem(last=False)

    async def run(self) -> None:
        """Send what is due, for ever."""
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(AT_ONCE):
                    group.create_task(self._send_all(group))
        finally:
            self._threads.shutdown(wait=False, cancel_futures=True)

    async def _send_all(self, group: asyncio.TaskGroup) -> None:
        while True:
            due = await self._queue.take()
            pause = await self._send(due)
            self._queue.tried(due, done=pause is None)
            if pause is not None:  # others are sent meanwhile
                group.create_task(self._put_back(due, pause))

    async def _put_back(self, due: DueNotice, pause: float) -> None:
        await asyncio.sleep(pause)
        self._queue.put(replace(due, tries=due.tries + 1))

    async def _send(self, due: DueNotice) -> float | None:
        """Send a notice; return after how many seconds to send it again, None: it is done."""
        try:
            sending = partial(send, due.target, due.notice, mail=self.settings.mail, private=self.settings.private)
            await asyncio.get_running_loop().run_in_executor(self._threads, sending)
            return None
        except NotSent as error:
            why, again = str(error), error.again
        except Exception as error:  # the next notice must be sent
            why, again = type(error).__name__, False
        if again and due.tries < len(self.again_s):
            return self.again_s[due.tries]
        self._keep(due.job, f"{due.target.form}: {why}")
        self.note(f"a notice about job {due.job} did not arrive ({due.target.form}: {why})")
        return None
