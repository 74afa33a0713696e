"""A pool of training processes that stay alive between measurements: started together, paused, and lent out.

Starting a training takes many seconds and measuring it two, so each process is started once for all its measurements.
Processes that do not fit on the GPU beside the others, or exceed the limit, are started when needed, and others make
room for them.
"""

import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from carpool.profile.measure.raw import Setting
from carpool.profile.measure.worker import ENDLESS, STOP_S, ShortOfMemory, Worker, WorkerError

POLL_S = 0.05
START_S = 180.0
Place = tuple[Setting, int]
"""A task at a batch, and the number of its process."""


class WorkerEnvironment(Protocol):
    """The environment of workers: a GPU under one mechanism."""

    def env(self) -> Mapping[str, str]: ...

    def accept(self, worker: Worker) -> None:
        """Raise if the worker does not run under the mechanism."""


class Pool:
    def __init__(
        self,
        folder: Path,
        command: Callable[[Setting], Sequence[str]],
        ground: WorkerEnvironment,
        deadline: float = ENDLESS,
        at_once: int | None = None,
    ) -> None:
        """Keep at most `at_once` workers (None: all). `deadline`, on the monotonic clock, limits all waiting."""
        self._folder, self._command, self._ground, self._deadline = folder, command, ground, deadline
        self._at_once = at_once
        self._workers: dict[Place, Worker] = {}  # the one lent last comes last
        self._started = 0

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *raised: object) -> None:
        self._drop(list(self._workers))

    def warm(self, copies: Mapping[Setting, int]) -> dict[Setting, WorkerError]:
        """Start as many of these as possible, and return the errors. A failed one is tried again when it is needed."""
        places = [
            (setting, copy) for copy in range(max(copies.values())) for setting in copies if copy < copies[setting]
        ]
        return {setting: error for (setting, _), error in self._start(places[: self._at_once]).items()}

    def lend(self, settings: Sequence[Setting]) -> list[Worker]:
        """Return a paused worker for each setting. Other workers are ended if their room is needed."""
        plain = [Setting(s.task, s.batch) for s in settings]
        places = [(setting, plain[:i].count(setting)) for i, setting in enumerate(plain)]
        missing = [place for place in places if place not in self._workers]
        if self._at_once is not None:
            idle = [place for place in self._workers if place not in places]
            room = max(0, self._at_once - len(places))
            self._drop(idle[: max(0, len(idle) - room)])
        failed = self._start(missing)
        if failed and all(isinstance(error, ShortOfMemory) for error in failed.values()):
            self._drop([place for place in self._workers if place not in places])
            failed = self._start(list(failed))
        for error in failed.values():
            raise error
        for place in places:
            self._workers[place] = self._workers.pop(place)
        return [self._workers[place] for place in places]

    def forget(self, settings: Collection[Setting]) -> None:
        """End the workers of these tasks after one of them failed, as their state is unknown."""
        plain = {Setting(s.task, s.batch) for s in settings}
        self._drop([place for place in self._workers if place[0] in plain])

    def _start(self, places: Sequence[Place]) -> dict[Place, WorkerError]:
        """Start these together. Workers that fail are ended and returned with the reason."""
        coming: dict[Place, Worker] = {}
        failed: dict[Place, WorkerError] = {}
        try:
            for place in places:
                coming[place] = self._launch(place)
            began = time.monotonic()
            while coming:
                self._gather(coming, failed, began)
                time.sleep(POLL_S if coming else 0.0)
        finally:  # after an interrupt the workers that were starting are ended as well
            self._workers.update(coming)
            self._drop(list(coming))
        return failed

    def _launch(self, place: Place) -> Worker:
        setting, _ = place
        self._started += 1
        name = f"{setting.task} at batch {setting.batch}" if setting.batch else setting.task
        folder = self._folder / f"{self._started:03d}"
        return Worker(name, self._command(setting), folder, self._ground.env())

    def _gather(self, coming: dict[Place, Worker], failed: dict[Place, WorkerError], began: float) -> None:
        """Pause workers as soon as they are ready, so that the others start faster."""
        now = time.monotonic()
        for place, worker in list(coming.items()):
            try:
                if worker.ready():
                    self._ground.accept(worker)
                    worker.pause()
                    self._workers[place] = coming.pop(place)
                elif now >= min(began + START_S, self._deadline):
                    raise worker.silent(now - began, budget_over=now >= self._deadline)
            except WorkerError as error:
                failed[place] = error
                self._workers[place] = coming.pop(place)
                self._drop([place])

    def _drop(self, places: Sequence[Place]) -> None:
        leaving = [self._workers.pop(place) for place in places]
        for worker in leaving:
            worker.ask_to_stop()
        until = time.monotonic() + STOP_S
        for worker in leaving:
            worker.end(until)
            shutil.rmtree(worker.folder, ignore_errors=True)
