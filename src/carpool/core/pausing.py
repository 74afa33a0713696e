"""Which of the jobs that hold GPUs compute: pauses and resumes. Called by `transitions` and `claims`.

A paused job keeps its GPUs' memory, makes no progress and slows no other job down. A gang is paused and resumed as a
whole. Where a node can swap, a paused job of one GPU can give up its memory, too, and stays tied to its GPU.
The plan changes what counts: from then on the job is active or not. The workers follow: until they confirm, the job is
`PAUSING` or `RESUMING`, and a driver resumes or launches no job on the GPUs of a job that is still `PAUSING`.
"""

from carpool.core.charging import charge
from carpool.core.joins import join
from carpool.core.model import Status
from carpool.core.pace import settle, update_pace
from carpool.core.record import JobRecord
from carpool.core.state import State


def pause(state: State, record: JobRecord, *, swapped: bool = False) -> None:
    """Let a running job stop computing; its workers are still to confirm it.

    With `swapped` its memory is moved to main memory and counts as free from now on: a driver launches no job there
    before the workers have confirmed.
    """
    settle(state, record)
    record.iteration_s = 0.0
    record.slowdown = 1.0
    record.pace_version += 1
    record.status = Status.PAUSING
    record.active = record.standby = False
    record.paused_since = state.now
    record.pauses += 1
    state.pauses += 1
    state.paused[record.seq] = state.switching[record.seq] = record
    if swapped:
        swap_out(state, record)
    state.cluster.note_activity(record.gpus)
    if state.tenants.on:
        charge(state, record)
    update_pace(state, [record, *state.cluster.mates(record)])
    state.capacity_changed(routine=True)


def swap_out(state: State, record: JobRecord) -> None:
    """Free the memory of a job that is paused."""
    record.swapped = True
    record.status = Status.PAUSING
    state.switching[record.seq] = record
    state.reserve(record, 0)
    state.capacity_changed()


def swap_in(state: State, record: JobRecord) -> None:
    """Reserve the memory of a swapped job again."""
    record.swapped = False
    state.reserve(record, state.perf.memory(record.job, record.accumulation))


def resume(state: State, record: JobRecord) -> None:
    """Let a paused job compute again as soon as its workers confirm it."""
    settle(state, record)
    record.status = Status.RESUMING
    record.active = True
    if record.swapped:
        swap_in(state, record)
    del state.paused[record.seq]
    state.switching[record.seq] = record
    state.cluster.note_activity(record.gpus)
    if state.tenants.on:
        charge(state, record)
    mates = state.cluster.mates(record)
    join(state, record, mates)
    state.reindex(record)
    for mate in mates:
        state.reindex(mate)


def end_pause(state: State, record: JobRecord) -> None:
    """Count the time that a paused job was paused: it computes again, or it leaves its GPUs."""
    state.paused.pop(record.seq, None)
    state.switching.pop(record.seq, None)
    record.swapped = False
    record.paused_s += state.now - record.paused_since
    record.paused_since = -1.0
