"""What the workers of one gang must agree on: when to save, pause and stop, how far to split, whether a step fitted.

Agreement is one tiny all-reduce between processors, never on the GPU, so that no worker waits for its kernels. It is
made at steps that every worker computes alike: at each, unless steps are so short that its cost would show. A gang of
one worker needs no all-reduce.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist

_AGREE_EVERY_S = 0.02


class Gang:
    def __init__(self) -> None:
        together = dist.is_available() and dist.is_initialized()
        self.size = dist.get_world_size() if together else 1
        self.rank = dist.get_rank() if together else _environment_rank()
        self._group = dist.new_group(backend="gloo") if self.size > 1 and dist.get_backend() != "gloo" else None
        self._countdown = 0

    def largest(self, values: Sequence[float]) -> list[float]:
        """Each value's maximum over the gang."""
        if self.size == 1:
            return list(values)
        return self._reduce(values, dist.ReduceOp.MAX)

    def total(self, value: float) -> float:
        """The sum over the gang."""
        return self._reduce([value], dist.ReduceOp.SUM)[0] if self.size > 1 else value

    def _reduce(self, values: Sequence[float], how: dist.ReduceOp.RedOpType) -> list[float]:
        tensor = torch.tensor(list(values), dtype=torch.float64)
        dist.all_reduce(tensor, op=how, group=self._group)
        return tensor.tolist()

    def due(self) -> bool:
        """Return whether the gang agrees at this step. All workers get the same answer."""
        if self._countdown > 0:
            self._countdown -= 1
            return False
        return True

    def agree_again(self) -> None:
        """Make the next step at which the gang agrees the present one."""
        self._countdown = 0

    def next_in(self, seconds_per_iteration: float) -> None:
        """Set the next agreement; the time must itself be agreed upon."""
        steps = int(_AGREE_EVERY_S / seconds_per_iteration) if seconds_per_iteration > 0 else 1
        self._countdown = min(max(steps, 1), 10_000) - 1


def _environment_rank() -> int:
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdigit() else 0
