"""What jobs are charged for: each GPU-second that jobs hold, once.

`division` says which part of a GPU counts for which job. Called by `claims`, `pausing` and `transitions` where shares
count and the residents of a GPU changed.
"""

from carpool.core.division import held_and_shared
from carpool.core.record import JobRecord
from carpool.core.state import State


def charge(state: State, record: JobRecord) -> None:
    """Charge a job for its GPUs from now on, and its mates for theirs."""
    state.tenants.charge(record, rate(state, record), state.now)
    charge_mates(state, record)


def charge_mates(state: State, record: JobRecord) -> None:
    """Charge the mates of a job for their GPUs from now on."""
    for mate in state.cluster.mates(record):
        state.tenants.charge(mate, rate(state, mate), state.now)


def rate(state: State, record: JobRecord) -> float:
    """Return the GPUs that a job is charged for."""
    return held_and_shared(state.cluster, record)[0]
