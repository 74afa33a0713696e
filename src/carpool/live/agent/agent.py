"""The agent of one node: it reports which parts run here, and starts and stops parts as the service asks.

One exchange (`carpool.live.executors.wire`) does both, again and again; a second one goes at once when something has
happened. Parts that the service does not want are killed; those that it wants are started, stopped, paused and retuned
through the local executor. The agent may be killed at any moment: workers outlive it until the node's lease is over,
and the next agent finds them.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import sys
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from carpool import __version__
from carpool.errors import InputError
from carpool.gpu.counters import GpuUse
from carpool.live.accounts import login_name
from carpool.live.agent.checkpoints import CheckpointCopies, remove_unfinished
from carpool.live.agent.door_relay import DoorRelay
from carpool.live.agent.lease import NodeLease
from carpool.live.agent.log_copies import LogCopies
from carpool.live.agent.memory import AgentMemory
from carpool.live.agent.network import interface_variables
from carpool.live.agent.pacing import exchange_for_ever
from carpool.live.agent.parts import NodePart, NodeParts, part_state
from carpool.live.agent.road import NoAnswer, Road, Turned
from carpool.live.agent.snapshots import fetch_snapshot, set_aside
from carpool.live.clock import since_boot
from carpool.live.executors import wire
from carpool.live.executors.base import (
    STOP_STRENGTH,
    ExecutorOptions,
    GangEnded,
    GangKey,
    GangOutcome,
    Launch,
    StopMode,
)
from carpool.live.executors.environment import meeting_point
from carpool.live.executors.local import LocalExecutor
from carpool.live.executors.wire import DeviceRow, NodeOrders, NodeState, PartOrder, Want
from carpool.live.grounds.base import NoWitness, Witness
from carpool.live.home import Home
from carpool.live.rank import boot_id

log = logging.getLogger("carpool.agent")

AGAIN_S = 0.5
"""Seconds before another exchange after one that failed."""
USE_S = 1.0
"""Seconds between two looks at the counters of GPUs."""
WITNESS_S, WITNESS_SHARE = 5.0, 0.2
"""Seconds between two questions to the witness, and their share of the lease at most."""
STEADY_S = 10.0
"""Seconds for which the agent must have been able to write its files again before anything new starts here."""
LAUNCH_PATIENCE_S = 10.0
"""Seconds after which a gang that cannot be launched here starts elsewhere."""
CHECK_S = 60.0
"""Seconds between two questions to the witness while the service answers, which only tell whether it can be asked."""


@dataclass(frozen=True)
class AgentOptions:
    """What the operator chooses for an agent."""

    home: Home
    node: str
    address: str
    """Address at which other nodes reach this one."""
    gpus: int | None = None
    """Number of logical GPUs; None: those that exist."""
    only: tuple[str, ...] = ()
    gpu_memory: int | None = None
    mps: bool = True
    emulated: str = ""
    """File that describes emulated GPUs, which the node has then; empty: none."""
    ground: str = "hand"
    pilot: str = ""
    leave_on_term: bool = False
    """Whether SIGTERM means to leave the cluster; otherwise workers run on, and the next agent finds them."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables for gangs over several nodes, such as NCCL_SOCKET_IFNAME; a job's own come first."""


class Agent:
    """Runs one node."""

    def __init__(self, options: AgentOptions, road: Road, witness: Witness | None = None) -> None:
        self.options = options
        self.home = options.home
        self.road = road
        self.witness = witness or NoWitness()
        self.lease = NodeLease(self.home.path / "lease")
        self.memory = AgentMemory(self.home.path / "agent.json")
        self.parts = NodeParts(self._something_new)
        self.executor = LocalExecutor(self._executor_options())
        self.copies = LogCopies(self.home, road, self.parts, self._something_new, self._is_saved)
        self.checkpoints = CheckpointCopies(self.home, road)
        self.leaving = False
        self.instance = secrets.token_hex(8)
        self.doors = DoorRelay(road, self.executor, self.copies, self.instance)
        self.joined = False
        """A service has accepted this node in the life of this process."""
        self._recovered = False
        self._answering = True
        """The last exchange was answered."""
        self._numbers = 0
        self._latest = (0, 0)
        self._mark = ""
        self._shared = ""
        self._home_seen = ""
        """The service's home, where this node sees it; empty: it does not."""
        self._lease_s = 60.0
        self._leased = False
        """A service granted a lease to this node, in the life of this process or before."""
        self._use: dict[str, GpuUse] = {}
        self._use_at = 0.0
        self._heard_at = since_boot()
        self._asked_witness = -CHECK_S
        self._witness = ""
        """Whether the witness could be asked the last time."""
        self._trouble = ""
        """Why it cannot keep its term or its lease; empty: it can."""
        self._failed_at = 0.0
        """When it could not keep one of them the last time."""
        self._news = asyncio.Event()
        self._describing = asyncio.Lock()
        self._obeying = asyncio.Lock()
        self._ended = asyncio.Event()
        self._failure: InputError | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._starting: set[GangKey] = set()
        self._launched: dict[GangKey, Launch] = {}
        self._saving: set[GangKey] = set()
        self._sending = asyncio.Lock()

    def _executor_options(self) -> ExecutorOptions:
        options = self.options
        return ExecutorOptions(
            self.home,
            options.gpus,
            options.only,
            options.gpu_memory,
            options.mps,
            options.emulated,
            node=options.node,
            lease=self.home.path / "lease",
            has_service=lambda: since_boot() - self._heard_at < 0.5 * self._lease_s,
            launch_patience_s=LAUNCH_PATIENCE_S,
            launch_failed=self._cannot_launch,
        )

    def _something_new(self) -> None:
        self._news.set()

    # ---- the life of an agent --------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run the node until `end` is called, or until it has left the cluster. Raise `InputError` where no service
        will ever accept it."""
        self.home.create()
        self.home.acquire()
        try:
            await asyncio.to_thread(self.memory.load)
            await asyncio.to_thread(remove_unfinished, self.home)
            found = await asyncio.to_thread(self.lease.load)
            self._lease_s, self._leased = (found, True) if found is not None else (self._lease_s, False)
            await self.executor.open()
            self.executor.gate.changed = self._something_new
            self._spawn(exchange_for_ever(self._exchange, self._news))
            self._spawn(self.copies.run())
            self._spawn(self._check_witness())
            await self._ended.wait()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self.doors.close()
            await self.executor.close()
            await asyncio.to_thread(self.road.close)
            self.home.release()
        if self._failure is not None:
            raise self._failure

    def end(self) -> None:
        """End the agent. Workers run on, and the next agent finds them."""
        self._ended.set()

    def leave(self) -> None:
        """Leave the cluster: the service lets all jobs here save and stop, then the agent ends."""
        self.leaving = True
        self._something_new()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # ---- the exchange ----------------------------------------------------------------------------------------------

    async def _exchange(self) -> None:
        """Send what is here and do what the answer says."""
        try:
            state = await self._state()
            sent_at = since_boot()
            try:
                data = await asyncio.to_thread(self.road.sync, wire.plain(state))
                answer = wire.read(NodeOrders, data)
            except (NoAnswer, Turned) as error:
                await self._not_answered(error)
                return
            await self._obey(answer, sent_at)
        except InputError as error:
            self._fail(error)
        except Exception:  # the next exchange must happen
            log.exception("an exchange failed")
            await asyncio.sleep(AGAIN_S)

    def _fail(self, error: InputError) -> None:
        self._failure = error
        self._ended.set()

    async def _not_answered(self, error: InputError) -> None:
        """Wait before the next exchange; give up where the first answer says that there is no place for this node."""
        # A pilot may come before an earlier one on its machine is given up, and before the service knows where it is.
        final = (400, 403, 404, 422) if self.options.pilot else (400, 401, 403, 404, 409, 422)
        refused = isinstance(error, Turned) and error.status in final
        if refused and not self.memory.term:  # otherwise it may have workers to look after
            raise error
        if self._answering:
            self._answering = False
            say(f"no answer ({error}); it is tried again, and jobs here end when the lease is over")
        await self._ask_witness()
        if self.leaving and self.lease.over and not self.executor.present():
            self._ended.set()
        await asyncio.sleep(min(AGAIN_S, self._lease_s / 16))  # several times within a lease, however short

    async def _ask_witness(self) -> None:
        """Ask the ground whether workers may go on without the service; an agent that leaves lets the lease run out."""
        now, every = since_boot(), min(WITNESS_S, WITNESS_SHARE * self._lease_s)
        if self.leaving or now - self._heard_at < every or now - self._asked_witness < every:
            return
        self._asked_witness = now
        wanted = await asyncio.to_thread(self.witness.wanted, max(1.0, min(10.0, 0.25 * self._lease_s)))
        self._note_witness(wanted)
        if wanted and self._leased:
            await asyncio.to_thread(self.lease.extend, now, self._lease_s)
        elif wanted is False:
            say("the ground has given this node up; it leaves the cluster")
            self.leave()

    def _note_witness(self, wanted: bool | None) -> None:
        if not isinstance(self.witness, NoWitness):
            self._witness = "silent" if wanted is None else "answers"

    async def _check_witness(self) -> None:
        """See now and then whether the witness can be asked, so that operators know it before it is needed."""
        while True:
            self._note_witness(await asyncio.to_thread(self.witness.wanted, 10.0))
            await asyncio.sleep(CHECK_S)

    async def _state(self) -> NodeState:
        """Return what is here. Of two requests the one with the higher number is believed, so one begins to look only
        when the other has looked."""
        async with self._describing:
            return await self._describe()

    async def _describe(self) -> NodeState:
        inventory = self.executor.node.inventory
        self._numbers += 1
        number = self._numbers
        await asyncio.to_thread(self._read_use)
        states = None
        if self._recovered:
            own = list(self.parts.parts.values())
            states = await asyncio.to_thread(lambda: {wire.key_text(p.key): part_state(p, self.executor) for p in own})
        use, self._use = self._use, {}
        return NodeState(
            node=self.options.node,
            identity=self.memory.identity,
            boot=boot_id(),
            instance=self.instance,
            number=number,
            address=self.options.address,
            memory=inventory.memory,
            mechanism=inventory.mechanism,
            release=__version__,
            devices=tuple(DeviceRow(slot.index, slot.uuid, slot.device) for slot in inventory.slots),
            why=inventory.why,
            can_swap=inventory.can_swap,
            ground=self.options.ground,
            pilot=self.options.pilot,
            as_root=os.getuid() == 0,
            leaving=self.leaving,
            term=self.memory.term,
            seen=self._mark,
            shared=self._shared,
            parts=states,
            taken={str(gpu): memory for gpu, memory in self.parts.taken.items()},
            use=use,
            remarks=tuple(self.parts.remarks),
            witness=self._witness,
            trouble=self._trouble,
        )

    def _read_use(self) -> None:
        """Read the counters of GPUs on which parts run, about once a second. Blocks."""
        now = since_boot()
        if now - self._use_at < USE_S:
            return
        self._use_at = now
        for gpu in sorted({gpu for gpus in self.executor.present().values() for gpu in gpus}):
            found = self.executor.gpu_use(gpu)
            if found is not None:
                self._use[str(gpu)] = found

    # ---- obeying ---------------------------------------------------------------------------------------------------

    async def _obey(self, answer: NodeOrders, sent_at: float) -> None:
        async with self._obeying:
            if answer.term < self.memory.term:  # a service that was replaced and has not noticed
                await asyncio.sleep(AGAIN_S)
                return
            if os.getuid() == 0 and not answer.as_root:
                raise InputError(
                    "the service does not run as root and this agent does, so its jobs would run as root here; "
                    "start the agent as the user of the service"
                )
            try:
                await asyncio.to_thread(self.memory.remember, answer.term)
            except OSError as error:
                self._cannot_write(error)
                await asyncio.sleep(AGAIN_S)
                return
            if (answer.term, answer.number) <= self._latest:
                return
            self._latest = answer.term, answer.number
            if answer.joined and not (self._answering and self.joined):
                say(f"node {self.options.node} is part of the cluster at {self.road.url}")
            self._answering = True
            self._heard_at = since_boot()
            self.leaving = self.leaving or answer.leave
            await asyncio.to_thread(self._take_terms, answer, sent_at)
            if not self._recovered:
                if answer.separate_users:
                    await self.executor.leave_mps()
                await self.executor.recover([wire.read_key(name) for name in answer.orders], self.parts)
                self._recovered = True
            self.parts.heard(answer.heard)
            await self._carry_out(answer)
            if answer.doors:
                self.doors.summon()
            if not answer.joined:
                self._something_new() if self._settled else await asyncio.sleep(AGAIN_S)

    @property
    def _settled(self) -> bool:
        return all(part.ended is not None and part.logged for part in self.parts.parts.values())

    def _cannot_write(self, error: OSError) -> None:
        """Note that the home of this agent cannot be written, so that the service starts nothing here."""
        if not self._trouble:
            say(f"{self.home.path} cannot be written ({error.strerror}); jobs here end when the lease is over")
        self._failed_at = since_boot()
        self._trouble = f"its agent cannot write its files ({error.strerror}), so jobs there end with their lease"

    def _cannot_launch(self, error: OSError) -> None:
        """Note that jobs cannot be launched, so that the service starts nothing here until that is over."""
        self._failed_at = since_boot()
        self._trouble = self._trouble or f"its agent cannot start jobs ({error.strerror or error})"
        self._something_new()

    def _take_terms(self, answer: NodeOrders, sent_at: float) -> None:
        """Take the lease and the service's settings, and find out whether this node sees the service's home. Blocks."""
        if answer.joined:
            self.joined = self._leased = True
            self._lease_s = answer.lease_s
            self.road.timeout_s = max(0.5, min(10.0, 0.25 * answer.lease_s))
            try:
                self.lease.extend(sent_at, answer.lease_s)
                if since_boot() - self._failed_at > STEADY_S:
                    self._trouble = ""
            except OSError as error:
                self._cannot_write(error)
            self.checkpoints.most_bytes = answer.most_checkpoint
        self.executor.set_patience(answer.pause_patience_s, answer.gang_pause_s)
        shared = ""
        with contextlib.suppress(OSError, ValueError):
            shared = Path(answer.home, answer.proof).read_text()[:100] if answer.proof else ""
        self._shared = shared  # a request may be on its way out meanwhile
        self._home_seen = answer.home if self._shared else ""

    async def _carry_out(self, answer: NodeOrders) -> None:
        orders = {wire.read_key(name): order for name, order in answer.orders.items()}
        for key in [key for key in self.parts.parts if key not in orders]:
            self._drop(key, answer)
        for key, order in orders.items():
            self._follow_order(key, order)
        if self._mark != answer.mark:
            self._mark = answer.mark
            self._something_new()
        if self.leaving and not answer.joined and self._settled:
            self._ended.set()

    def _drop(self, key: GangKey, answer: NodeOrders) -> None:
        """Get rid of a part that the service does not want."""
        part = self.parts.parts[key]
        if part.ended is None:
            part.logged = True  # the service does not wait for its logs
            self._stop(part, StopMode.KILL)
        elif not part.logged:
            part.logged = True
            self._something_new()
        elif answer.joined:
            del self.parts.parts[key]
            self._launched.pop(key, None)
            self.copies.forget(key)
            self._spawn(self._remove_files(key))

    async def _remove_files(self, key: GangKey) -> None:
        await asyncio.to_thread(shutil.rmtree, self.home.attempt(*key), ignore_errors=True)

    def _is_saved(self, part: NodePart) -> bool:
        """Return whether the checkpoints of a part that ended are at the service, or stay here; send them if not."""
        ended = part.ended
        if part.saved or self._home_seen or ended is None or ended.outcome is GangOutcome.FINISHED:
            return True
        if part.stop in (StopMode.TERMINATE, StopMode.KILL):  # it was cancelled, and will not go on
            return True
        if part.key not in self._saving:
            self._saving.add(part.key)
            self._spawn(self._save(part))
        return False

    async def _save(self, part: NodePart) -> None:
        """Bring the checkpoints of a part that ended to the service: its job may go on elsewhere."""
        try:
            if await asyncio.to_thread(self.checkpoints.has_any, part.key[0]):
                async with self._sending:
                    await asyncio.to_thread(self.checkpoints.send, part.key, partial(self._is_wanted, part))
        except Exception:  # its end must be reported
            log.exception("checkpoints of %s", part.key)
        finally:
            part.saved = True
            self._saving.discard(part.key)

    def _is_to_start(self, key: GangKey) -> bool:
        """Return whether a part that is being prepared shall still start."""
        part = self.parts.parts.get(key)
        return part is not None and part.ended is None and not part.stop and not self._ended.is_set()

    def _is_wanted(self, part: NodePart) -> bool:
        """Return whether the service waits for the end of a part."""
        return self.parts.parts.get(part.key) is part and not part.logged and not self._ended.is_set()

    def _follow_order(self, key: GangKey, order: PartOrder) -> None:
        part = self.parts.parts.get(key)
        if part is None:
            if order.want is Want.STOP:  # it was never started here, and now it never will be
                self._end_early(key, GangOutcome.NEVER_STARTED, "")
            elif order.launch is not None and order.want in (Want.READY, Want.GO):
                self.parts.parts[key] = NodePart(key)
                self._spawn(self._launch(key, order))
            return
        if part.ended is not None:
            return
        if order.want is Want.STOP:
            self._stop(part, StopMode(order.how))
        elif order.want is Want.GO and order.port:
            self._open_gate(key, order)
        if order.accumulation:
            self.executor.retune(key, order.accumulation)
        if order.checkpoint > part.asked_checkpoint and part.started_at is not None:
            part.asked_checkpoint = order.checkpoint
            self.executor.checkpoint(key)
        if order.switch and order.switch != part.asked_switch and part.started_at is not None:
            part.asked_switch, part.asked_pause, part.stands = order.switch, order.paused, False
            if order.paused:
                self.executor.pause(key, swap=order.swap)
            else:
                self.executor.resume(key)

    def _stop(self, part: NodePart, mode: StopMode) -> None:
        if STOP_STRENGTH[mode] > STOP_STRENGTH[part.stop]:
            part.stop = mode
            if not self.executor.stop(part.key, mode) and part.key not in self._starting and part.ended is None:
                self._end_early(part.key, GangOutcome.NEVER_STARTED, "")

    def _open_gate(self, key: GangKey, order: PartOrder) -> None:
        launch = self._launched.get(key)
        if launch is not None:
            variables = meeting_point(launch, order.address, order.port)
            own = {**interface_variables(self.options.address), **self.options.environment}
            own = {name: value for name, value in own.items() if name not in launch.env}
            self.executor.gate.open(key, {**own, **variables})

    async def _launch(self, key: GangKey, order: PartOrder) -> None:
        """Start a part here, if it can run here."""
        assert order.launch is not None
        self._starting.add(key)
        try:
            launch = await asyncio.to_thread(self._adapt, order.launch, order.user)
        except CannotRunHere as error:
            self._end_early(key, GangOutcome.REFUSED, str(error))
            return
        except InputError as error:
            self._end_early(key, GangOutcome.FAILED, str(error))
            return
        except OSError as error:
            stopped = key in self.parts.parts and bool(self.parts.parts[key].stop)
            outcome = GangOutcome.NEVER_STARTED if stopped else GangOutcome.LOST
            self._end_early(key, outcome, "" if stopped else f"{self.options.node}: {error}")
            return
        finally:
            self._starting.discard(key)
        part = self.parts.parts.get(key)
        if part is None or part.ended is not None:
            return
        if part.stop:
            self._end_early(key, GangOutcome.NEVER_STARTED, "")
            return
        self._launched[key] = launch
        self.executor.launch(launch)

    def _end_early(self, key: GangKey, outcome: GangOutcome, reason: str) -> None:
        part = self.parts.parts.setdefault(key, NodePart(key))
        part.logged = True
        self.parts.gang_ended(GangEnded(*key, outcome, reason))

    def _adapt(self, launch: Launch, user: str) -> Launch:
        """Return a launch as it is done here. Raise `InputError` where its user or its files are not here. Blocks."""
        node, slots = self.options.node, len(self.executor.node.slots)
        if launch.uid is not None:
            _check_user(launch.uid, user, node)
        if not launch.gpus or any(not 0 <= gpu < slots for gpu in launch.gpus):
            raise InputError(f"{node}: has {slots} GPUs, and the job got others; the node's GPUs changed")
        if not self._home_seen:
            if launch.part is not None:
                raise CannotRunHere(
                    f"{node}: does not see the service's home, so no job can span this node and others; share the home "
                    "directory at the same path, or ask for as many GPUs as one node has"
                )
            launch = replace(launch, checkpoints="")
            if launch.attempt == 1:
                set_aside(self.home, launch.job)
            wanted = partial(self._is_to_start, launch.key)
            self.checkpoints.fetch(launch, wanted)
            if launch.snapshot:
                directory = fetch_snapshot(self.home, self.road, launch.job, launch.uid, wanted)
                launch = replace(launch, directory=str(directory))
        if not os.path.isdir(launch.directory):
            raise InputError(f"{node}: has no directory {launch.directory!a}; share it, or submit with --snapshot")
        return launch


class CannotRunHere(InputError):
    """This machine cannot run a job as it is set up: it knows its user as somebody else, for example."""


def say(text: str) -> None:
    """Print a line for the operator."""
    print(f"carpool agent: {text}", file=sys.stderr, flush=True)


def _check_user(uid: int, user: str, node: str) -> None:
    """Refuse a job whose uid belongs to another user on this machine."""
    if os.getuid() != 0:
        raise CannotRunHere(
            f"{node}: the agent does not run as root, so it cannot run jobs as uid {uid}; start it as root, or let "
            "the service run as an ordinary user"
        )
    if uid == 0:
        raise CannotRunHere(f"{node}: jobs of users do not run as root")
    here = login_name(uid)
    if here != user:
        known = f"{here!a} there" if here else "unknown there"
        raise CannotRunHere(f"{node}: uid {uid} is {user or 'without a login name'!a} at the service and {known}")
