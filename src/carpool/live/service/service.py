"""The live service: `Scheduler.step` with a real clock, a journal on disk and an executor.

`open_service` builds the parts and hands them to each other; `Service` runs them in one asyncio process and closes
them. The HTTP API calls `service.requests` and `service.queries`; it decides which user may call what.
"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial

from carpool import policies
from carpool.core import events as ev
from carpool.core.codec import UnknownEvent
from carpool.core.model import ALIVE
from carpool.core.scheduler import Scheduler
from carpool.core.state import State
from carpool.errors import InputError
from carpool.live.clock import Clock, RealClock
from carpool.live.errors import Deposed
from carpool.live.executors.base import Executor, Leadership
from carpool.live.executors.registry import make_executor
from carpool.live.home import Home
from carpool.live.insight.forecaster import Forecaster
from carpool.live.journal.sqlite import SqliteJournal
from carpool.live.journal.store import Commit, Store, StoreError
from carpool.live.rank import boot_id
from carpool.live.service import recovery
from carpool.live.service.cancellations import CancelFile, UnwrittenCancels
from carpool.live.service.config import ServiceConfig
from carpool.live.service.demands import DemandWatch
from carpool.live.service.dispatcher import Dispatcher
from carpool.live.service.driver import Driver
from carpool.live.service.due_events import DueEvents
from carpool.live.service.estimator import JobEstimator
from carpool.live.service.executor_events import ExecutorEvents
from carpool.live.service.feed import EventFeed
from carpool.live.service.inbox import Inbox
from carpool.live.service.inventory import Inventory
from carpool.live.service.jobs import JobBook
from carpool.live.service.longer_nodes import ROW as LONGER_NODES
from carpool.live.service.longer_nodes import LongerNodes
from carpool.live.service.metrics import Metrics
from carpool.live.service.notices import Notifier
from carpool.live.service.opening import Waiting, open_journal
from carpool.live.service.operator_settings import META, OperatorSettings
from carpool.live.service.pause_limit import PauseLimit
from carpool.live.service.pictures import Pictures
from carpool.live.service.progress import ProgressWatch
from carpool.live.service.pruner import Pruner
from carpool.live.service.queries import Queries
from carpool.live.service.records import KEPT_S, Recorder
from carpool.live.service.requests import Requests
from carpool.live.service.reserve import DiskReserve
from carpool.live.service.retention import RetentionLedger
from carpool.live.service.snapshot_quota import SnapshotQuota
from carpool.live.service.snapshots import SnapshotKeeper
from carpool.live.service.terminals import Terminals
from carpool.live.service.users import Users
from carpool.live.service.warm_up import WarmUpWatch
from carpool.policies.guarded import GuardedPolicy

log = logging.getLogger("carpool.live")

LOADED_STORIES = 2000
"""Number of jobs that ended lately whose places are shown after a restart."""
LOOK_AHEAD_S = 2.0
"""Seconds between two forecasts of new jobs."""


@dataclass
class Service:
    """The parts of a running service. `open_service` makes one."""

    home: Home
    clock: Clock
    store: Store
    executor: Executor
    state: State
    inbox: Inbox
    book: JobBook
    users: Users
    driver: Driver
    progress: ProgressWatch
    warm_up: WarmUpWatch
    demands: DemandWatch
    pause_limit: PauseLimit
    due_events: DueEvents
    forecaster: Forecaster
    pruner: Pruner
    snapshots: SnapshotKeeper
    feed: EventFeed
    metrics: Metrics
    notifier: Notifier
    requests: Requests
    """What users may change."""
    queries: Queries
    """What users may look at."""
    pictures: Pictures
    """What the dashboard draws."""
    terminals: Terminals
    """The terminals of jobs, and commands beside workers."""

    async def run(self) -> None:
        """Schedule until `close` is called. Raise `Deposed` when another service leads."""
        background = (
            self.progress.run,
            self.warm_up.run,
            self.demands.run,
            self.pause_limit.run,
            self.due_events.run,
            self._look_ahead,
            self.pruner.run,
            self.notifier.run,
            DiskReserve(self.home.reserve).run,
        )
        tasks = [asyncio.create_task(task()) for task in background]
        driving = asyncio.create_task(self.driver.run())
        losing = asyncio.create_task(self.store.leadership.lost.wait())
        try:
            await asyncio.wait({driving, losing}, return_when=asyncio.FIRST_COMPLETED)
            if losing.done():
                raise Deposed(self.store.leadership.term)
            await driving
        finally:
            for task in (*tasks, driving, losing):
                task.cancel()
            await asyncio.gather(*tasks, driving, losing, return_exceptions=True)

    async def close(self) -> None:
        """Stop scheduling and release everything. Gangs keep running, and the next service finds them."""
        if self.driver.stopped:
            return
        self.feed.close()
        self.terminals.close()
        await self.driver.close()
        await self.executor.close()
        await self.snapshots.close(take_last=self.driver.settled and not self.driver.write_error)
        await asyncio.to_thread(self.book.finish)
        self.store.close()
        self.home.release()

    async def _look_ahead(self) -> None:
        """Forecast new jobs, so that the accuracy of forecasts can be judged later."""
        while True:
            await asyncio.sleep(LOOK_AHEAD_S)
            try:
                self.forecaster.look_ahead()
            except Exception:  # nothing depends on it
                log.exception("no forecast could be made")


async def open_service(config: ServiceConfig, waiting: Waiting = lambda state: None) -> Service:
    """Lock the home, read the journal, find the gangs that still run, and return a service that is ready to run.

    Where another service leads, it calls `waiting` and stands by until it can lead. Raises `InputError` if a service is
    not possible; then everything is released again.
    """
    async with AsyncExitStack() as undo:
        undo.callback(config.home.release)
        store = Store(config.database or SqliteJournal(config.home.journal))
        undo.callback(store.close)
        try:
            await open_journal(config, store, waiting)
            users = Users.load(config.home, store.users())
            executor = _executor(config, store.leadership)
            undo.push_async_callback(executor.close)
            await executor.open(separate_users=users.separate)
            inventory = Inventory(executor)
            opened = _Opened(config, store, users, inventory, _estimator(config, inventory))
            loaded = await recovery.load(store, partial(_scheduler, config, opened.estimator))
        except StoreError as error:
            raise InputError(f"journal {store.place}: {error}; see `carpool doctor`") from error
        except UnknownEvent as error:  # nothing was written, so the release that has this event can still start
            raise InputError(f"journal {store.place}: {error}") from error
        service = await _assemble(opened, loaded)
        undo.pop_all()
        return service


@dataclass(frozen=True)
class _Opened:
    """What is there before the journal's state: the choices of the operator, the journal, and what was found."""

    config: ServiceConfig
    store: Store
    users: Users
    inventory: Inventory
    estimator: JobEstimator


@dataclass(frozen=True)
class _Observers:
    """The parts that observe every turn of the driver."""

    feed: EventFeed
    recorder: Recorder
    metrics: Metrics
    notifier: Notifier


async def _assemble(opened: _Opened, loaded: recovery.LoadedState) -> Service:
    """Build the parts around a loaded state, recover jobs and gangs, and take the first turn."""
    config, store, state = opened.config, opened.store, loaded.scheduler.state
    _resume_clock(config.clock, store, state)
    inbox = Inbox(config.clock)
    settings = OperatorSettings(config.home, state, store.meta().get(META, ""))
    for text in (*store.notes, *opened.users.notes, *settings.notes, *loaded.notes):
        inbox.note(text)
    book = _recover_jobs(opened, state, inbox, settings)
    driver = _make_driver(opened, loaded, inbox, book)
    observers = _add_observers(opened, driver)
    driver.unwritten.resume()
    await _recover_gangs(opened, driver, settings)
    await _first_turn(config, driver, opened.inventory.executor)
    await settings.keep()
    return _make_service(opened, driver, observers, settings)


def _recover_jobs(opened: _Opened, state: State, inbox: Inbox, settings: OperatorSettings) -> JobBook:
    """Return the book of jobs. Groups and limits that the journal lost are put into the inbox as well."""
    home, store, users, clock = opened.config.home, opened.store, opened.users, opened.config.clock
    inbox.add_events(*settings.lost_groups(clock.now()))
    book = JobBook(home, store, state)
    jobs = recovery.JobRecovery(home, store, state, book, users, inbox, opened.estimator)
    jobs.run(opened.inventory.executor)
    for name, limits in users.lost_limits(state.limits).items():
        inbox.add_events(ev.LimitsChanged(clock.now(), name, limits))
    return book


def _make_driver(opened: _Opened, loaded: recovery.LoadedState, inbox: Inbox, book: JobBook) -> Driver:
    """Return the driver with the parts that it calls in a turn."""
    config, store, inventory = opened.config, opened.store, opened.inventory
    clock, state = config.clock, loaded.scheduler.state
    forecaster = Forecaster(lambda: state, partial(_policy, config), book.source, book.name, inventory.label, clock.now)
    forecaster.learn(store.estimates())
    snapshots = SnapshotKeeper(store, state, inbox, loaded.seq)
    longer_nodes = LongerNodes(state, inbox, store.meta().get(LONGER_NODES, ""))
    dispatcher = Dispatcher(state, inventory.executor, book, opened.users, inbox, clock, longer_nodes)
    cancel_file = CancelFile(config.home.cancelled)
    unwritten = UnwrittenCancels(state, dispatcher, inbox, cancel_file, store.leadership.leads)
    return Driver(loaded.scheduler, store, clock, inbox, book, dispatcher, forecaster, snapshots, unwritten)


def _add_observers(opened: _Opened, driver: Driver) -> _Observers:
    """Let feed, records, metrics and notices follow the turns of the driver."""
    config, store, inventory = opened.config, opened.store, opened.inventory
    state, book = driver.scheduler.state, driver.book
    feed = EventFeed(store, inventory.labels)
    recorder = Recorder(state)
    recorder.load(store.ended_since(config.clock.now() - KEPT_S, LOADED_STORIES))
    book.picture = recorder.story
    metrics = Metrics(driver, inventory, config.policy)
    driver.forecaster.on_judged = metrics.judged
    notifier = Notifier(state, book, config.notices, driver.inbox.note)
    driver.observers += [feed, recorder, metrics, notifier]
    return _Observers(feed, recorder, metrics, notifier)


async def _recover_gangs(opened: _Opened, driver: Driver, settings: OperatorSettings) -> None:
    """Find the gangs and the nodes of the executor, then apply the closures that the journal lost."""
    state, inventory, inbox, clock = driver.scheduler.state, opened.inventory, driver.inbox, driver.clock
    executor, dispatcher = inventory.executor, driver.dispatcher
    events = ExecutorEvents(state, executor, inventory, dispatcher, driver.book, inbox, clock)
    await recovery.GangRecovery(state, executor, dispatcher, inbox, clock).run(events)
    events.nodes_changed()
    inbox.add_events(*settings.lost_closures(clock.now()))


def _make_service(opened: _Opened, driver: Driver, observers: _Observers, settings: OperatorSettings) -> Service:
    """Build the parts that users and background tasks call, and return all parts together."""
    config, users, inventory = opened.config, opened.users, opened.inventory
    home, clock, executor, state = config.home, config.clock, inventory.executor, driver.scheduler.state
    inbox, book, forecaster = driver.inbox, driver.book, driver.forecaster
    progress = ProgressWatch(state, executor, book, inbox, clock)
    pruner = Pruner(home, opened.store, inbox, clock, config.retention, RetentionLedger(home.retention))
    queries = Queries(
        state=state,
        store=opened.store,
        clock=clock,
        executor=executor,
        inventory=inventory,
        book=book,
        user_book=users,
        progress=progress,
        estimator=opened.estimator,
        forecaster=forecaster,
        pruner=pruner,
        unwritten=driver.unwritten,
        recorder=observers.recorder,
        policy=config.policy,
        policy_failure=driver.policy_failure,
        undelivered=observers.notifier.undelivered,
    )
    return Service(
        home=home,
        clock=clock,
        store=opened.store,
        executor=executor,
        state=state,
        inbox=inbox,
        book=book,
        users=users,
        driver=driver,
        progress=progress,
        warm_up=WarmUpWatch(state, executor, inbox, clock),
        demands=DemandWatch(state, executor, progress, inbox),
        pause_limit=PauseLimit(state, executor, inbox, clock, config.gang_pause_s),
        due_events=DueEvents(state, inbox, clock),
        forecaster=forecaster,
        pruner=pruner,
        snapshots=driver.snapshots,
        feed=observers.feed,
        metrics=observers.metrics,
        notifier=observers.notifier,
        requests=_make_requests(opened, driver, pruner, settings),
        queries=queries,
        pictures=Pictures(clock, inventory, queries, observers.recorder, forecaster),
        terminals=Terminals(state, book, executor),
    )


def _make_requests(opened: _Opened, driver: Driver, pruner: Pruner, settings: OperatorSettings) -> Requests:
    config, state, book = opened.config, driver.scheduler.state, driver.book
    return Requests(
        home=config.home,
        state=state,
        inbox=driver.inbox,
        book=book,
        users=opened.users,
        estimator=opened.estimator,
        pruner=pruner,
        unwritten=driver.unwritten,
        settings=settings,
        quota=SnapshotQuota(config.home, state, book, config.max_snapshots),
        max_grace_s=config.max_grace_s,
        notices=config.notices,
    )


def _executor(config: ServiceConfig, leadership: Leadership) -> Executor:
    if isinstance(config.executor, str):
        return make_executor(config.executor, replace(config.executor_options, leadership=leadership))
    return config.executor


def _estimator(config: ServiceConfig, inventory: Inventory) -> JobEstimator:
    devices = [slot.device for slot in inventory.slots]
    return JobEstimator(inventory.node_gpus, inventory.mechanism, devices, config.perf, config.profile)


def _policy(config: ServiceConfig) -> GuardedPolicy:
    return GuardedPolicy(policies.make(config.policy), config.policy)


def _scheduler(config: ServiceConfig, estimator: JobEstimator, numbers: recovery.JobsPerGpu | None) -> Scheduler:
    policy, belief = _policy(config), estimator.initial_belief()
    numbers = numbers or recovery.JobsPerGpu(config.jobs_per_gpu, config.resident_per_gpu)
    return Scheduler(policy, belief, *numbers, strict=False)


def _resume_clock(clock: Clock, store: Store, state: State) -> None:
    last, boot = store.last_moment(), store.meta().get("boot", "")
    if last is not None and isinstance(clock, RealClock):
        busy = any(record.status in ALIVE for record in state.jobs.values())
        clock.resume(*last, boot, busy)


async def _first_turn(config: ServiceConfig, driver: Driver, executor: Executor) -> None:
    """Write what was found at the start."""
    inbox, state = driver.inbox, driver.scheduler.state
    if driver.store.meta().get("policy", config.policy) != config.policy:
        now = config.clock.now()
        inbox.add_events(*(ev.PriorityChanged(now, record.job.id) for record in list(state.queue)))
    if not state.accounts.on:
        inbox.add_events(ev.AccountsOpened(config.clock.now()))
    waiting = sum(record.status not in ALIVE for record in state.jobs.values())
    found = f"{len(executor.present())} gangs found running, {waiting} jobs waiting"
    inbox.note(f"the service started under {config.policy}: {found}", logging.INFO)

    def prepare(now: float, commit: Commit) -> Sequence[ev.Event]:
        numbers = {"jobs_per_gpu": str(state.jobs_per_gpu), "resident_per_gpu": str(state.resident_per_gpu)}
        commit.meta.update({"policy": config.policy, **numbers, "boot": boot_id()})
        return ()

    inbox.add(prepare)
    if not await driver.turn():
        raise InputError(f"the journal cannot be written ({driver.write_error}); make room and start again")
