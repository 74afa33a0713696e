"""The choice among moves: the one that gains most, provided that it beats doing nothing.

The modules of candidates offer moves one by one. Most are dropped by what they cost at least, before their ends are
simulated and before they are priced. `policy` makes one choice for each job that waits.
"""

from math import inf

from carpool.core.view import JobView
from carpool.policies.joint.moves import Move, Relocate, Suspend
from carpool.policies.joint.objective import CLOSE, Objective


class Choice:
    """The best of the moves that were offered so far."""

    def __init__(self, objective: Objective, guest: JobView | None = None, *, at_any_price: bool = False) -> None:
        """`guest`: the job that all moves are for, unless they free GPUs. `at_any_price`: the move with the largest
        gain is chosen even if that is a loss."""
        self.best: Move | None = None
        self.bar = -inf if at_any_price else CLOSE
        """What a move must gain more than."""
        self._objective = objective
        self._guest = guest
        self._most: float | None = None

    @property
    def most(self) -> float:
        """Cost from which on no move can be the best, even if the waiting jobs lose nothing.

        A paused guest may free GPUs sooner if it goes on, so no cost is too high for it.
        """
        if self._most is None:
            guest = self._guest
            if guest is None or guest.gpus:
                self._most = inf
            else:
                self._most = self._objective.budget(guest) - self.bar + CLOSE  # for rounding
        return self._most

    def offer(self, move: Move) -> None:
        """Price a move, unless it costs too much, and keep it if it gains most."""
        guest = move.guest
        frees_gpus = bool(guest.gpus) or isinstance(move, (Suspend, Relocate))
        if not frees_gpus and self._objective.budget(guest) - move.cost <= self.bar:
            return
        gain = self._objective.price(move)
        if gain is not None and gain > self.bar:
            self.best, self.bar, self._most = move, gain, None
