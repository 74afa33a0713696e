"""The adapter for Lightning: one callback.

    carpool = CarpoolCallback()
    trainer = Trainer(callbacks=[carpool], gradient_clip_val=1.0)
    trainer.fit(model, loader, ckpt_path=carpool.resume)

The loader keeps the full batch and `accumulate_grad_batches` stays what the user set. For every batch, `training_step`
and the backward pass run once per piece that the scheduler chose; clipping, the optimizer, the schedules, the step
counter, logging and checkpoints see one full batch, as without Carpool.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from carpool.channel import ENV_CHECKPOINTS, WorkerStatus
from carpool.train import memory
from carpool.train.accumulation import Accumulation, Micro
from carpool.train.certify import Split, being_checked, check_and_exit
from carpool.train.link import Link
from carpool.train.training import TrainingStopped, _weighted
from carpool.train.verdict import Verdict

_CHECKPOINT = "lightning.ckpt"


class CarpoolCallback(Callback):
    """A callback that splits the trainer's steps, reports progress, saves and stops on request."""

    def __init__(
        self,
        *,
        accumulation: int | None = None,
        can_shrink: bool | Verdict | None = None,
        split: Split | int = 0,
        checkpoints: str | os.PathLike[str] | None = None,
    ) -> None:
        self._requested, self._can_shrink, self._split = accumulation, can_shrink, split
        directory = checkpoints if checkpoints is not None else os.environ.get(ENV_CHECKPOINTS)
        self._directory = Path(directory) if directory else None
        self._samples = 0
        self._steps = 0
        self._trainer: Trainer | None = None

    @property
    def resume(self) -> str | None:
        """The checkpoint to hand to `trainer.fit(ckpt_path=...)`; None at the first start."""
        path = self._directory / _CHECKPOINT if self._directory else None
        return str(path) if path is not None and path.exists() and not being_checked() else None

    # Set-up and tear-down: the trainer's step is replaced while it trains, and put back afterwards

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not pl_module.automatic_optimization:
            raise ValueError(
                "Carpool's callback needs Lightning's automatic optimization; with manual optimization, use "
                "carpool.train.Training inside training_step"
            )
        strategy = trainer.strategy
        model = strategy.model if strategy.model is not None else pl_module
        self.link = Link(memory=lambda: memory.peak(pl_module.device))
        self.accumulation = Accumulation(
            self.link, (model,), split=self._split, requested=self._requested, can_shrink=self._can_shrink
        )
        self._trainer, self._module = trainer, pl_module
        self._training_step, self._backward = strategy.training_step, strategy.backward
        self._zero_grad = pl_module.optimizer_zero_grad
        strategy.training_step = self._step  # type: ignore[method-assign]
        strategy.backward = lambda loss, *_, **__: loss  # type: ignore[method-assign]
        pl_module.optimizer_zero_grad = lambda *_: None  # type: ignore[method-assign]
        self._steps = trainer.global_step
        self.link.say(iteration=self._steps, total=_total(trainer))
        self.accumulation.obey()
        self.link.begin()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._detach()
        self.link.done()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._detach()

    def _detach(self) -> None:
        if self._trainer is None:
            return
        for owner, name in ((self._trainer.strategy, "training_step"), (self._trainer.strategy, "backward")):
            owner.__dict__.pop(name, None)
        self._module.__dict__.pop("optimizer_zero_grad", None)

    # The step

    def _step(self, batch: Any, batch_idx: int, *more: Any) -> Any:
        """Replace Lightning's `training_step`: run the backward passes as well, and return the full batch's loss."""
        trainer = self._trainer
        assert trainer is not None
        if being_checked():
            optimizers = [getattr(o, "optimizer", o) for o in trainer.optimizers]
            check_and_exit(
                *((self._module,), lambda data: self._loss(self._training_step(data, batch_idx, *more)), batch),
                optimizer=optimizers,
                split=self._split,
            )
        optimizer = trainer.optimizers[0]
        first = batch_idx % trainer.accumulate_grad_batches == 0

        def clear() -> None:
            self._zero_grad(trainer.current_epoch, batch_idx, optimizer)

        def passes(micros: Iterator[Micro]) -> Any:
            result: Any = None
            for micro in micros:
                with contextlib.nullcontext() if micro.sync else self._no_sync():
                    output = self._training_step(micro.data, batch_idx, *more)
                    if output is None:
                        raise ValueError("training_step returned None: a piece of a batch cannot be skipped")
                    loss = self._loss(output) * (micro.share / trainer.accumulate_grad_batches)
                    self._backward(loss, optimizer)
                result = _merged(output, micro.share, result)
            return result

        if first:
            clear()
            self._samples = 0
        result = self.accumulation.run(batch, passes, clear, repeatable=first)
        self._samples += self.accumulation.samples
        return result

    @staticmethod
    def _loss(output: Any) -> torch.Tensor:
        loss: torch.Tensor = output["loss"] if isinstance(output, Mapping) else output
        return loss

    def _no_sync(self) -> contextlib.AbstractContextManager[Any]:
        assert self._trainer is not None
        quiet = getattr(self._trainer.strategy, "block_backward_sync", None)
        return quiet() if quiet is not None else contextlib.nullcontext()

    # Between two steps

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._steps:
            return  # within the user's own accumulation
        self._steps = trainer.global_step
        self.link.stepped(self._steps, self._samples)
        orders = self.accumulation.obey()
        ending = self._steps >= trainer.max_steps > 0
        stop = orders.stop and not ending
        if self._directory is not None and (stop or orders.checkpoint > self.link.checkpoints_taken):
            trainer.save_checkpoint(self._directory / _CHECKPOINT)
            self.link.say(checkpoint=self._steps, checkpoints_taken=orders.checkpoint)
            self.link.begin()
        if stop:
            self.link.say(status=WorkerStatus.STOPPED)
            raise TrainingStopped


def _total(trainer: Trainer) -> int:
    """Return the number of steps that a trainer plans in all; 0: not known."""
    total = trainer.estimated_stepping_batches
    return int(total) if 0 < total < math.inf else 0


def _merged(output: Any, share: float, so_far: Any) -> Any:
    """Return the loss of the full batch. Other outputs are those of the last piece."""
    if isinstance(output, Mapping):
        before = so_far["loss"] if so_far else None
        return {**output, "loss": _weighted(output["loss"], share, before)}
    return _weighted(output, share, so_far)
