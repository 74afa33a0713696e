"""What nodes and their GPUs do: join, leave, close, open, lose memory to others."""

from carpool.core import closures
from carpool.core import events as ev
from carpool.core.claims import leave, preempt
from carpool.core.model import Status
from carpool.core.pausing import pause
from carpool.core.queueing import resize_pending
from carpool.core.state import State, handles
from carpool.core.transitions.endings import count_loss, workers_gone


@handles(ev.NodeJoined)
def _node_joined(state: State, event: ev.NodeJoined) -> None:
    state.join(event.node)
    resize_pending(state)
    state.capacity_changed()


@handles(ev.NodeLost)
def _node_lost(state: State, event: ev.NodeLost) -> None:
    number = state.topology.present.get(event.node)
    if number is None:
        return
    lost = state.topology.nodes[number].gpus
    for record in list(state.jobs.values()):
        if any(gpu in lost for gpu in record.gpus):
            record.leaving = record.gpus
            count_loss(state, record)
            leave(state, record)
            record.done = record.checkpoint
            if record.status is not Status.CANCELLING:
                record.status = Status.STOPPING
        if record.leaving:
            if record.status is Status.STOPPING and any(gpu in lost for gpu in record.leaving) and not record.gpus:
                count_loss(state, record)  # it was about to save
            record.leaving = tuple([gpu for gpu in record.leaving if gpu not in lost])
            if not record.leaving and record.status in (Status.STOPPING, Status.CANCELLING):
                workers_gone(state, record)
    state.cluster.lose(event.node)
    if state.accounts.on:
        state.accounts.note_nodes(state.topology)
    resize_pending(state)
    state.capacity_changed()


@handles(ev.NodeClosed)
def _node_closed(state: State, event: ev.NodeClosed) -> None:
    _set_closed(state, event.node, True)


@handles(ev.NodeOpened)
def _node_opened(state: State, event: ev.NodeOpened) -> None:
    _set_closed(state, event.node, False)


def _set_closed(state: State, name: str, closed: bool) -> None:
    number = state.topology.present.get(name)
    if number is None:
        return
    state.cluster.set_closed(number, closed)
    for gpu in state.topology.nodes[number].gpus:
        for record in state.jobs_on(gpu):
            state.reindex(record)
    state.capacity_changed()


@handles(ev.ClosureSet)
def _closure_set(state: State, event: ev.ClosureSet) -> None:
    state.closures[event.closure.id] = event.closure
    state.closures_begun.discard(event.closure.id)
    _follow_closures(state)


@handles(ev.ClosureBegan)
def _closure_began(state: State, event: ev.ClosureBegan) -> None:
    closure = state.closures.get(event.closure)
    if closure is None or event.closure in state.closures_begun:
        return
    state.closures_begun.add(event.closure)
    for record, saves in closures.cleared(state, closure):
        if saves:
            preempt(state, record)
        elif not record.kept_paused:  # its owner may have paused it, and must not resume it there
            record.paused_before = record.paused_by_owner
            record.paused_by_owner = record.kept_paused = True
            if record.status is Status.RUNNING:  # one that starts or resumes is paused as soon as it runs
                pause(state, record)
    state.capacity_changed()


@handles(ev.ClosureRemoved)
def _closure_removed(state: State, event: ev.ClosureRemoved) -> None:
    if state.closures.pop(event.closure, None) is None:
        return
    state.closures_begun.discard(event.closure)
    _follow_closures(state)


def _follow_closures(state: State) -> None:
    """Hide the GPUs that closures cover now, and let jobs go on that none of them keeps paused any more."""
    before = state.topology.closed_gpus
    state.cluster.set_kept(closures.kept_mask(state))
    changed = before ^ state.topology.closed_gpus
    for record in state.holders.values():
        if any(changed >> gpu & 1 for gpu in record.gpus):
            state.reindex(record)
        if record.kept_paused and not closures.is_held(state, record):
            record.paused_by_owner, record.kept_paused = record.paused_before, False
            record.paused_before = False
            state.awakened[record.seq] = record
    state.capacity_changed()


@handles(ev.SwapChanged)
def _swap_changed(state: State, event: ev.SwapChanged) -> None:
    number = state.topology.present.get(event.node)
    if number is not None:
        state.topology.set_swap(number, event.can_swap)
        state.capacity_changed()


@handles(ev.MemoryTaken)
def _memory_taken(state: State, event: ev.MemoryTaken) -> None:
    if event.gpu not in state.topology.node_of:
        return
    if event.memory > 0:
        state.topology.taken[event.gpu] = event.memory
    else:
        state.topology.taken.pop(event.gpu, None)
    for record in state.jobs_on(event.gpu):
        state.reindex(record)
    state.capacity_changed()
