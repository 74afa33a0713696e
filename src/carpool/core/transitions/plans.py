"""What the scheduler decides: claims of GPUs, suspensions, pauses, new sub-batches."""

from carpool.core import events as ev
from carpool.core import trials
from carpool.core.claims import claim, preempt, retune
from carpool.core.model import Allocation, Decision
from carpool.core.pausing import pause, resume, swap_out
from carpool.core.record import JobRecord
from carpool.core.state import State, handles


@handles(ev.Planned)
def _planned(state: State, event: ev.Planned) -> None:
    claims: list[tuple[JobRecord, Allocation]] = []
    resumed: list[JobRecord] = []
    tries = False
    for decision in event.decisions:
        record, allocation = state.jobs[decision.job], decision.allocation
        tries = tries or decision.trial is not None
        if record.gpus:
            if allocation is not None and allocation.gpus == record.gpus:
                if allocation.active and record.active:
                    retune(state, record, allocation)
                elif allocation.active:
                    resumed.append(record)
                else:
                    _pause_as_planned(state, record, decision)
                continue
            preempt(state, record)
        if allocation is not None:  # a start, or a move: the job stops on its old GPUs and starts on these
            claims.append((record, allocation))
    for record in resumed:
        resume(state, record)
    for record, allocation in claims:
        claim(state, record, allocation)
    if tries:
        trials.begin(state, event.decisions)
    if state.trials.running:
        for decision in event.decisions:
            trials.look(state, state.jobs[decision.job])


def _pause_as_planned(state: State, record: JobRecord, decision: Decision) -> None:
    if not record.active:
        swap_out(state, record)
        return
    if decision.trial is None:
        trials.withdraw(state, record)
    pause(state, record, swapped=decision.allocation is not None and decision.allocation.swapped)
