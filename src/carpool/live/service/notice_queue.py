"""The queue of notices that are to be sent, in which no user delays the notices of another.

A user chooses where notices go, and so how long sending them takes. Every user therefore has a queue, of which only a
few notices are sent at a time, and users take turns. `notices.py` fills and empties it.
"""

import asyncio
from collections import Counter, deque
from dataclasses import dataclass, field

from carpool.live.service.senders import NoticeText
from carpool.notices import NoticeTarget

MOST_OPEN = 1000
"""Number of notices that wait or are being sent; beyond it, new ones are dropped."""
MOST_OF_USER = 250
"""The same of one user."""
AT_ONCE_OF_USER = 2
"""Number of notices of one user that are sent at a time."""


class NoRoom(Exception):
    """Too many notices wait."""


@dataclass(frozen=True, slots=True)
class DueNotice:
    """A notice to send."""

    job: str
    user: str
    target: NoticeTarget
    notice: NoticeText
    tries: int = 0
    """Number of attempts that failed."""


@dataclass
class NoticeQueue:
    """Notices by user."""

    _waiting: dict[str, deque[DueNotice]] = field(default_factory=dict)
    """Users whose turn is next come first."""
    _open: Counter[str] = field(default_factory=Counter)
    """Notices of each user that are not done, including those that are sent now or again later."""
    _sending: Counter[str] = field(default_factory=Counter)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, due: DueNotice) -> None:
        """Add a new notice; raise `NoRoom`."""
        if self._open.total() >= MOST_OPEN or self._open[due.user] >= MOST_OF_USER:
            raise NoRoom
        self._open[due.user] += 1
        self.put(due)

    def put(self, due: DueNotice) -> None:
        """Put a notice to the end of its user's queue: a new one, or one to send again."""
        self._waiting.setdefault(due.user, deque()).append(due)
        self._news.set()

    async def take(self) -> DueNotice:
        """Return the next notice to send, as soon as there is one. The caller calls `tried` when it has."""
        while (due := self.take_now()) is None:
            self._news.clear()
            await self._news.wait()
        return due

    def take_now(self) -> DueNotice | None:
        """Return the next notice to send; None: there is none, or their users' earlier ones are still being sent."""
        user = next((one for one in self._waiting if self._sending[one] < AT_ONCE_OF_USER), None)
        if user is None:
            return None
        own = self._waiting.pop(user)
        due = own.popleft()
        if own:
            self._waiting[user] = own  # at the end: another user is next
        self._sending[user] += 1
        return due

    def tried(self, due: DueNotice, *, done: bool) -> None:
        """Note that sending a notice has ended. `done`: it will not be sent again."""
        self._sending[due.user] -= 1
        if done:
            self._open[due.user] -= 1
        self._open, self._sending = +self._open, +self._sending  # users without notices are forgotten
        self._news.set()
