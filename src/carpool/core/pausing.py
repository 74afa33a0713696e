"""Which of the jobs that hold GPUs compute: pauses and resumes. Called by `transitions` and `claims`.

A paused job keeps its GPUs' memory, makes no progress and slows nobody down. A gang is paused and resumed as a whole.
The plan changes what counts: from then on the job is active or not. The workers follow: until they confirm, the job is
`PAUSING` or `RESUMING`, and a driver resumes or launches nobody on the GPUs of a job that is still `PAUSING`.
"""

from carpool.core.model import Status
from carpool.core.pace import settle, update_pace
from carpool.core.record import JobRecord
from carpool.core.state import State


def pause(state: State, record: JobRecord) -> None:
    """Let a running job stop computing; its workers are still to confirm it."""
    settle(state, record)
    record.iteration_s = 0.0
    record.slowdown = 1.0
    record.pace_version += 1
    record.status = Status.PAUSING
    record.active = False
    record.paused_since = state.now
    record.pauses += 1
    state.pauses += 1
    state.paused[record.seq] = state.switching[record.seq] = record
    update_pace(state, [record, *state.cluster.mates(record)])
    state.capacity_changed()


def resume(state: State, record: JobRecord) -> None:
    """Let a paused job compute again as soon as its workers confirm it."""
    record.status = Status.RESUMING
    record.active = True
    del state.paused[record.seq]
    state.switching[record.seq] = record
    state.reindex(record)
    for mate in state.cluster.mates(record):
        state.reindex(mate)


def end_pause(state: State, record: JobRecord) -> None:
    """Count the time that a job was paused: it computes again, or it leaves its GPUs."""
    state.paused.pop(record.seq, None)
    state.switching.pop(record.seq, None)
    if record.paused_since >= 0.0:
        record.paused_s += state.now - record.paused_since
        record.paused_since = -1.0
