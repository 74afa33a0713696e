"""Coming back: the state from snapshot and journal, then what the workers' directories say.

Called once, before the service takes anything in. The journal is the truth about jobs; the directories are the truth
about processes. A tail of the journal that cannot be read is set aside, and what it told is found again: jobs in their
table or beside their directories, ends in the wrappers' records; what runs and nobody remembers is killed.
"""

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from typing import Any

from carpool.core import events as ev
from carpool.core import snapshot
from carpool.core.model import Status
from carpool.core.record import JobRecord
from carpool.core.scheduler import Scheduler
from carpool.core.state import ALIVE
from carpool.live.executors.base import How, Key
from carpool.live.executors.gang import read_json
from carpool.live.home import Home
from carpool.live.journal.store import Store
from carpool.live.service.driver import Driver

SPEC_FILE, END_FILE = "job.json", "ended.json"
"""Beside the journal: what was submitted, and what became of it."""


@dataclass
class Loaded:
    """What was read, and what there is to say about it."""

    scheduler: Scheduler
    seq: int = 0
    """The event after which the snapshot was taken."""
    notes: list[str] = field(default_factory=list)


async def load(store: Store, make: Callable[[int | None], Scheduler]) -> Loaded:
    """A scheduler whose state is that of the journal's end. `make` gives a fresh one, for so many jobs per GPU."""
    notes: list[str] = []
    while True:
        loaded = Loaded(make(None), notes=notes)
        damaged = _replay(store, make, loaded)
        if damaged is None:
            return loaded
        await store.set_aside(damaged)
        notes.append(f"the journal cannot be read from event {damaged} on; that part was set aside")


def _replay(store: Store, make: Callable[[int | None], Scheduler], loaded: Loaded) -> int | None:
    """The number of the first event that cannot be applied, or None."""
    jobs_per_gpu = loaded.scheduler.state.jobs_per_gpu
    widest = max(jobs_per_gpu, int(store.meta().get("jobs_per_gpu", jobs_per_gpu)))  # as many as there may be
    scheduler = loaded.scheduler = make(widest)
    for seq, data in store.snapshots():
        try:
            perf, policy = scheduler.state.perf, scheduler.policy
            scheduler.state = snapshot.restore(data, perf, policy.key, widest)
            loaded.seq = seq
            break
        except (KeyError, TypeError, ValueError) as error:
            scheduler = loaded.scheduler = make(widest)  # the belief may have been half restored
            loaded.notes.append(f"the snapshot after event {seq} cannot be read ({error!r}); an older one is used")
    state = scheduler.state
    for seq, event in store.events_after(loaded.seq):
        try:
            if event is None:
                return seq
            state.apply(event)
        except (KeyError, ValueError) as error:
            loaded.notes.append(f"event {seq} of the journal contradicts those before it: {error!r}")
            return seq
    state.jobs_per_gpu = jobs_per_gpu
    state.needs_decision = True
    return None


def forgotten(home: Home, known: Container[int]) -> Iterator[dict[str, Any]]:
    """Jobs that were accepted, but that a damaged journal does not know: their files tell."""
    for path in home.jobs.iterdir():
        if path.name.isdigit() and int(path.name) not in known:
            data = read_json(path / SPEC_FILE)
            if isinstance(data, dict):
                yield {"id": int(path.name), **data}


def ending_of(home: Home, job: str) -> dict[str, Any] | None:
    """The last words about a job, as they were to be written to the journal; None: it had not ended."""
    data = read_json(home.job(job) / END_FILE)
    return data if isinstance(data, dict) and {"id", "state", "ended", "story"} <= data.keys() else None


async def reattach(driver: Driver) -> None:
    """Find the workers of all jobs that should have some, and go on from there."""
    state = driver.scheduler.state
    alive = [record for record in state.jobs.values() if record.status in ALIVE]
    await driver.executor.recover(_keys(alive))
    for record in alive:
        _go_on(driver, record)


def _keys(records: list[JobRecord]) -> list[Key]:
    keys = [(record.job.id, record.attempt) for record in records]
    moved = [(r.job.id, r.attempt - 1) for r in records if r.leaving and r.gpus and r.attempt > 1]
    return keys + moved


def _go_on(driver: Driver, record: JobRecord) -> None:
    key = (record.job.id, record.attempt)
    present = driver.executor.present()
    if record.status is Status.STOPPING:
        driver.stop_workers(record, How.SAVE)
    elif record.status is Status.CANCELLING:
        driver.stop_workers(record, How.END)
    elif key in present:
        if record.status is Status.RUNNING:
            driver.executor.retune(key, record.accumulation)
    elif record.status is Status.STARTING:
        driver.wait_to_launch(record)
        if (record.job.id, record.attempt - 1) in present:
            driver.executor.stop((record.job.id, record.attempt - 1), How.SAVE)
    else:
        driver.tell(ev.Failed(driver.clock.now(), *key, "its directory is gone", True))
