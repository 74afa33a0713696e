"""What operators set for tenants and GPUs, in a copy beside the journal: groups, shares, drains and reservations.

A journal that is lost, or that lost its tail, must not lift a cap or a time limit, nor open a GPU that is drained. So
every change is written to `settings.json` before it is journalled, with a mark that the journal gets too. At a start
the copy counts unless it is damaged, which a digest shows, or the journal has a later mark. `requests.py` makes changes
through it.
"""

import asyncio
import hashlib
import json
import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from carpool.core import events as ev
from carpool.core.codec import builder, plain
from carpool.core.model import Closure, FairShare, UserGroup
from carpool.core.state import State
from carpool.live.errors import Unavailable
from carpool.live.home import OWN_JSON_BYTES, Home, read_json, sync_directory, write_private
from carpool.live.journal.store import DAMAGE, Commit
from carpool.live.service.inbox import Inbox

META = "settings"
"""Key of the mark in the journal's table of facts."""
Settings = dict[str, Any]


class OperatorSettings:
    """The settings of a state, and their copy."""

    def __init__(self, home: Home, state: State, mark: str) -> None:
        """`mark`: that of the journal."""
        self._home, self._state, self._mark = home, state, mark
        self._changing = asyncio.Lock()
        self.notes: list[str] = []
        """Lines for the operator about the state in which the copy was found."""
        self._lost: Settings = {}
        """What the copy says, where it counts."""
        self._load()

    def _load(self) -> None:
        copy = read_json(self._home.settings, OWN_JSON_BYTES)
        try:
            mark, found = copy["mark"], _read(copy)
        except DAMAGE:
            if self._home.settings.exists():
                self.notes.append(f"{self._home.settings.name} cannot be read; groups and drains are the journal's")
            return
        if mark == self._mark or _number(mark) > _number(self._mark):
            self._mark, self._lost = mark, found

    def lost_groups(self, now: float) -> Iterator[ev.Event]:
        """Yield what the journal lost about groups and shares. To be applied before jobs that are found."""
        known = self._state.tenants
        for name, group in self._lost.get("groups", {}).items():
            if known.settings.get(name) != group:
                yield ev.GroupChanged(now, group)
        if self._lost and self._lost["fair_share"] != known.fair_share:
            yield ev.FairShareChanged(now, self._lost["fair_share"])

    def lost_closures(self, now: float) -> Iterator[ev.Event]:
        """Yield what the journal lost about drains and reservations. To be applied after nodes that are found."""
        if not self._lost:
            return
        wanted: Mapping[str, Closure] = self._lost["closures"]
        for name, closure in wanted.items():
            over = closure.end is not None and closure.end <= now
            if not over and self._state.closures.get(name) != closure:
                yield ev.ClosureSet(now, closure)
        for name in self._state.closures:
            if name not in wanted:
                yield ev.ClosureRemoved(now, name)

    async def keep(self) -> None:
        """Write the copy if there is none: releases before this one wrote none."""
        settings = self._plain()
        if not self._home.settings.exists() and (settings["groups"] or settings["closures"]):
            await self._write(settings, self._mark)

    async def change(self, inbox: Inbox, event: Callable[[float], ev.Event], *, name: str = "") -> None:
        """Make a change durable and apply it. `name`: the closure that it removes."""
        async with self._changing:
            before, marked = self._plain(), self._mark
            after, mark = _applied(before, event(0.0), name), f"{_number(marked) + 1}:{secrets.token_hex(8)}"
            await self._write(after, mark)

            def prepare(now: float, commit: Commit) -> tuple[ev.Event]:
                commit.meta[META] = mark
                return (event(now),)

            try:
                await inbox.request(prepare)
            except Exception:  # not where the answer is lost: then the journal may have it
                await self._write(before, marked)
                raise
            self._mark = mark

    def _plain(self) -> Settings:
        tenants = self._state.tenants
        return {
            "groups": {name: plain(group) for name, group in tenants.settings.items()},
            "fair_share": plain(tenants.fair_share),
            "closures": {name: plain(closure) for name, closure in self._state.closures.items()},
        }

    async def _write(self, settings: Settings, mark: str) -> None:
        def write() -> None:
            copy = {"mark": mark, "digest": _digest(mark, settings), "settings": settings}
            write_private(self._home.settings, json.dumps(copy, indent=1))
            sync_directory(self._home.path)

        try:
            await asyncio.to_thread(write)
        except OSError as error:
            raise Unavailable(f"settings cannot be written ({error.strerror}); make room and try again") from None


def _applied(settings: Settings, event: ev.Event, removed: str) -> Settings:
    """Return settings after a change."""
    changed = {**settings, "groups": {**settings["groups"]}, "closures": {**settings["closures"]}}
    changed["closures"].pop(removed, None)
    if isinstance(event, ev.GroupChanged):
        changed["groups"][event.group.name] = plain(event.group)
    elif isinstance(event, ev.FairShareChanged):
        changed["fair_share"] = plain(event.fair_share)
    elif isinstance(event, ev.ClosureSet):
        changed["closures"][event.closure.id] = plain(event.closure)
    return changed


def _digest(mark: str, settings: Settings) -> str:
    return hashlib.sha256(json.dumps([mark, settings], sort_keys=True).encode()).hexdigest()


def _read(copy: Any) -> Settings:
    """Return the settings of a copy. Raises what a damaged one causes."""
    settings = copy["settings"]
    if copy["digest"] != _digest(copy["mark"], settings):
        raise ValueError("the digest is that of other settings")
    return {
        "groups": {name: builder(UserGroup)({**raw}) for name, raw in settings["groups"].items()},
        "fair_share": builder(FairShare)({**settings["fair_share"]}),
        "closures": {name: builder(Closure)({**raw}) for name, raw in settings["closures"].items()},
    }


def _number(mark: str) -> int:
    """Return how many changes a mark stands for."""
    text = mark.partition(":")[0]
    return int(text) if text.isdecimal() and len(text) < 16 else 0
