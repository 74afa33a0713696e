"""Events that are applied together: the jobs that wait are computed again once for all of them.

Many jobs may end in one step, and each end may teach something about the speed of all jobs like it, or about the
guesses of its user. What runs is computed again at each event, because the time between two events counts at the pace
that was believed then. What waits makes no progress, so that only what is believed in the end counts for it.
"""

from collections.abc import Iterable

from carpool.core import events as ev
from carpool.core.healing import correct_waiting
from carpool.core.pace import refresh_waiting
from carpool.core.state import State

BLIND_TO_WAITING = (ev.Finished, ev.Observed, ev.Progressed, ev.Started, ev.Checkpointed)
"""Events that change nothing by what is believed of jobs that wait."""


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
    """Compute the jobs that wait again: something was learned about them."""
    correct_waiting(state)
    refresh_waiting(state)
