"""Events that are applied together: the estimates of waiting jobs are computed once for all of them.

Many jobs may end in one step, and each end may teach something about the speed of all jobs like it, or about the
guesses of its user. The pace of running jobs is computed again at each event, because the time between two events
counts at the pace that was believed then. Waiting jobs make no progress, so only what is believed in the end counts for
them.
"""

from collections.abc import Iterable

from carpool.core import events as ev
from carpool.core.healing import correct_waiting
from carpool.core.pace import refresh_waiting
from carpool.core.state import State

BLIND_TO_WAITING = (ev.Finished, ev.Observed, ev.Progressed, ev.Started, ev.Checkpointed)
"""Events whose effect does not depend on what is believed of waiting jobs."""


def apply_together(state: State, events: Iterable[ev.Event]) -> None:
    """Apply the events of one step."""
    state.defers_waiting = True
    try:
        for event in events:  # they may have happened a little before now
            if (state.new_speeds or state.new_factors) and not isinstance(event, BLIND_TO_WAITING):
                _compute_waiting(state)
            state.apply(event)
    finally:
        state.defers_waiting = False
        if state.new_speeds or state.new_factors:
            _compute_waiting(state)


def _compute_waiting(state: State) -> None:
    """Compute the estimates of waiting jobs again: something was learned about them."""
    correct_waiting(state)
    refresh_waiting(state)
