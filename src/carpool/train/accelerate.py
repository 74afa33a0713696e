"""The adapter for Hugging Face Accelerate: `Training` whose passes go through an `Accelerator`.

    accelerator = Accelerator(mixed_precision="bf16")
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    training = AcceleratedTraining(accelerator, model, optimizer, schedule=schedule, clip_norm=1.0)

Leave the accelerator's own gradient accumulation at 1: the loader keeps the full batch, and `step` splits it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from carpool.train.training import Training


class AcceleratedTraining(Training):
    """A `Training` that leaves backward passes, clipping, precision and synchronisation to the accelerator."""

    def __init__(self, accelerator: Any, model: Any, optimizer: Any, **options: Any) -> None:
        if accelerator.gradient_accumulation_steps != 1:
            raise ValueError(
                "leave gradient_accumulation_steps of the Accelerator at 1 and give the loader the full batch: "
                "Carpool splits it, and the accelerator would divide the loss a second time"
            )
        if "scaler" in options:
            raise ValueError("the Accelerator has its own gradient scaler; do not pass scaler=")
        self._accelerator = accelerator
        super().__init__(model, optimizer, **options)

    @contextlib.contextmanager
    def _no_sync(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for model in self.models:
                stack.enter_context(self._accelerator.no_sync(model))
            yield

    def _backward(self, loss: Tensor) -> None:
        self._accelerator.backward(loss)

    def _clip(self) -> None:
        if self.clip_norm is not None:
            self.norm = self._accelerator.clip_grad_norm_(self._parameters, self.clip_norm)
