"""The adapter for the Hugging Face Trainer: one line after the trainer is made.

    trainer = Trainer(model, args, train_dataset=data)
    carpool = CarpoolTrainerCallback(trainer)
    trainer.train(resume_from_checkpoint=carpool.resume)

`per_device_train_batch_size` stays the full batch. Each call of `training_step` runs in as many pieces as the scheduler
chose; the trainer's own normalisation by `num_items_in_batch` (tokens) is kept, and where it has none, each piece
counts by its samples. Saving and resuming are the trainer's, with its data order and random state.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from carpool.channel import WorkerStatus
from carpool.train import memory, randomness
from carpool.train.accumulation import Accumulation, Micro
from carpool.train.certify import being_checked, check_and_exit
from carpool.train.link import Link
from carpool.train.training import TrainingStopped
from carpool.train.verdict import Verdict


class CarpoolTrainerCallback(TrainerCallback):
    """A callback that attaches itself to a trainer: splits its steps, reports progress, saves and stops on request."""

    def __init__(
        self, trainer: Trainer, *, accumulation: int | None = None, can_shrink: bool | Verdict | None = None
    ) -> None:
        self._trainer = trainer
        self._requested, self._can_shrink = accumulation, can_shrink
        self._step, self._loss = trainer.training_step, trainer.compute_loss
        self._share = 1.0
        self._scaled: bool | None = None
        self._samples = 0
        self._stopping = False
        trainer.training_step = self._training_step  # type: ignore[method-assign]
        trainer.compute_loss = self._compute_loss  # type: ignore[method-assign]
        trainer.add_callback(self)

    @property
    def resume(self) -> str | None:
        """The trainer's newest checkpoint, for `trainer.train(resume_from_checkpoint=...)`; None at the first start."""
        directory = self._trainer.args.output_dir
        if directory is None or being_checked() or not Path(directory).is_dir():
            return None
        found: str | None = get_last_checkpoint(directory)  # type: ignore[no-untyped-call]
        return found

    # The step

    def _training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        trainer = self._trainer
        if being_checked():
            self._check(model, inputs)
        inputs = trainer._prepare_inputs(inputs)
        if self.accumulation.count > 1 or self.accumulation.can_shrink:
            self._learn_scaling(inputs, num_items_in_batch)
        scaled = self._scaled and num_items_in_batch is not None

        def passes(micros: Iterator[Micro]) -> torch.Tensor:
            total: Any = None
            for micro in micros:
                quiet = contextlib.nullcontext() if micro.sync else trainer.accelerator.no_sync(model)
                self._share = 1.0 if scaled else micro.share
                with quiet:
                    loss = self._step(model, micro.data, num_items_in_batch)
                total = loss if total is None else total + loss
            return torch.as_tensor(total)

        repeatable = all(p.grad is None for p in model.parameters())
        clear = functools.partial(model.zero_grad, set_to_none=True)
        try:
            return self.accumulation.run(inputs, passes, clear, repeatable=repeatable)
        finally:
            self._share = 1.0
            self._samples += self.accumulation.samples

    def _compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        result = self._loss(model, inputs, *args, **kwargs)
        if self._share == 1.0:
            return result
        if isinstance(result, tuple):
            return (result[0] * self._share, *result[1:])
        return result * self._share

    def _learn_scaling(self, inputs: Any, items: Any) -> None:
        """Find out whether the loss divides by the items of the whole batch, so that losses of pieces add up.

        Many models accept `num_items_in_batch` and ignore it, so it is tried: twice the items must give half the loss.
        """
        if self._scaled is not None:
            return
        if items is None:
            self._scaled = False
            return
        piece = self.accumulation.split(inputs)[0]
        model = self._trainer.accelerator.unwrap_model(self._trainer.model_wrapped)
        random = randomness.capture()
        model.eval()  # this pass must not use dropout or change running statistics
        try:
            with torch.no_grad(), self._trainer.compute_loss_context_manager():
                one, half = (_first(self._loss(model, dict(piece), num_items_in_batch=n)) for n in (items, 2 * items))
        finally:
            model.train()
            randomness.restore(random)
        self._scaled = bool(torch.isclose(half * 2, one, rtol=1e-3)) and not bool(torch.isclose(half, one, rtol=1e-3))

    def _check(self, model: Any, inputs: Any) -> None:
        trainer = self._trainer
        inputs = trainer._prepare_inputs(inputs)
        items = trainer._get_num_items_in_batch([inputs], trainer.args.device)
        model.train()

        def loss(batch: Any) -> torch.Tensor:
            return _first(self._loss(model, dict(batch), num_items_in_batch=items))

        self._learn_scaling(inputs, items)
        average = "sum" if self._scaled else "samples"
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        check_and_exit((model,), loss, dict(inputs), optimizer=optimizer, average=average)

    # The callback

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        model = self._trainer.model_wrapped
        device = args.device
        self.link = Link(memory=lambda: memory.peak(device))
        self.accumulation = Accumulation(self.link, (model,), requested=self._requested, can_shrink=self._can_shrink)
        self.link.say(iteration=state.global_step, total=max(0, state.max_steps))
        self.accumulation.obey()
        self.link.begin()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._samples = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        self.link.stepped(state.global_step, self._samples)
        orders = self.accumulation.obey()
        if orders.stop and state.global_step < state.max_steps:
            control.should_save = control.should_training_stop = self._stopping = True
        if orders.checkpoint > self.link.checkpoints_taken:
            control.should_save = True
            self.link.say(checkpoints_taken=orders.checkpoint)
        return control

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.link.say(checkpoint=state.global_step)
        self.link.begin()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._stopping:
            self.link.say(status=WorkerStatus.STOPPED)
            raise TrainingStopped
        self.link.done()


def _first(result: Any) -> torch.Tensor:
    loss: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return loss
