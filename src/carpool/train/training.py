"""`Training`: the few lines that a plain PyTorch script adds.

It splits each batch as the scheduler chose, with the gradients of the full batch, and repeats a step that ran out of
memory. It counts and reports iterations, saves checkpoints and resumes from them. Without Carpool it is a plain
training step.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from carpool.channel import EXIT_STOPPED, WorkerStatus
from carpool.train import memory, randomness
from carpool.train.accumulation import Accumulation, Micro
from carpool.train.certify import Average, Loss, Split, being_checked, check_and_exit
from carpool.train.checkpoint import Checkpoints
from carpool.train.link import Link
from carpool.train.verdict import Verdict


class TrainingStopped(SystemExit):
    """The scheduler asked for a stop and the checkpoint is written. Uncaught, it ends the script with status 75."""

    def __init__(self) -> None:
        super().__init__(EXIT_STOPPED)


class Training:
    """Trains `model` with one optimizer or several, one full batch per `step`.

    >>> training = Training(model, optimizer, schedule=schedule, clip_norm=1.0)
    >>> for inputs, labels in training.batches(loader, epochs=90):
    ...     loss = training.step((inputs, labels), lambda batch: criterion(model(batch[0]), batch[1]))

    The loss function gets a micro-batch and returns its loss, or a dict of scalars with the key "loss". `average` says
    what that loss is a mean of: "samples"; whatever a function counts in a micro-batch, such as its tokens; or "sum"
    if it is no mean at all. With `across_ranks`, the mean goes over the batches of the whole gang, as if one process
    had them all; otherwise each worker has its own mean, as in plain DistributedDataParallel.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Any,
        *,
        schedule: Any = None,
        scaler: Any = None,
        clip_norm: float | None = None,
        average: Average = "samples",
        across_ranks: bool = False,
        split: Split | int = 0,
        device: torch.device | str | None = None,
        accumulation: int | None = None,
        can_shrink: bool | Verdict | None = None,
        checkpoints: Checkpoints | str | os.PathLike[str] | None = None,
    ) -> None:
        if average not in ("samples", "sum") and not callable(average):
            raise ValueError('average must be "samples", "sum" or a function that weighs a micro-batch')
        self.models: tuple[nn.Module, ...] = tuple(_several(model))
        self.optimizers = _several(optimizer)
        self.schedules = _several(schedule)
        self.scaler = scaler
        self.clip_norm = clip_norm
        self.average = average
        self.across_ranks = across_ranks
        self.device = torch.device(device) if device is not None else None
        self.iteration = 0
        """Full batches trained on since the job's first start."""
        self.norm: Tensor | None = None
        """The gradients' norm in the last step, before clipping; None without `clip_norm`."""
        self._parameters = [p for o in self.optimizers for group in o.param_groups for p in group["params"]]
        place = self._parameters[0].device if self._parameters else None
        self.link = Link(memory=lambda: memory.peak(place))
        self.accumulation = Accumulation(
            self.link, self.models, split=split, requested=accumulation, can_shrink=can_shrink
        )
        self.checkpoints = checkpoints if isinstance(checkpoints, Checkpoints) else Checkpoints(checkpoints)
        self._being_checked = being_checked()
        self._looping = False
        self._ready = False
        self._place: dict[str, Any] = {}
        self._random: dict[str, Any] | None = None
        self._resume()

    # One step

    def step(self, batch: Any, loss_fn: Loss) -> Any:
        """Train on one full batch; returns its loss (or the dict of scalars), detached and still on its device."""
        result = self.accumulate(batch, loss_fn)
        self.update()
        return result

    def accumulate(self, batch: Any, loss_fn: Loss, optimizers: Any = None) -> Any:
        """Compute the gradients of one full batch, for scripts that step their optimizers themselves.

        Clears the gradients of `optimizers` (all, by default) first. Call `advance` once the full batch is done.
        """
        if self._being_checked:
            data = batch if self.device is None else _moved(batch, self.device)
            check_and_exit(
                *(self.models, loss_fn, data),
                optimizer=self.optimizers,
                average=self.average,
                split=self.accumulation.splitter,
            )
        if not self._ready:
            self._first()
        chosen = self.optimizers if optimizers is None else _several(optimizers)

        def clear() -> None:
            for optimizer in chosen:
                optimizer.zero_grad(set_to_none=True)

        clear()
        return self.accumulation.run(batch, lambda micros: self._passes(micros, loss_fn), clear, self._shares)

    def update(self) -> None:
        """Unscale, clip, step every optimizer and schedule, and advance. Called once per full batch."""
        if self.scaler is not None and self.clip_norm is not None:
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)
        self._clip()
        for optimizer in self.optimizers:
            if self.scaler is not None:
                self.scaler.step(optimizer)
            else:
                optimizer.step()
        if self.scaler is not None:
            self.scaler.update()
        for schedule in self.schedules:
            schedule.step()
        self.advance()

    def advance(self) -> None:
        """Count and report a full batch, and apply what the scheduler wants."""
        self.iteration += 1
        self.link.stepped(self.iteration, self.accumulation.samples)
        if not self._looping:
            self._boundary()

    def _passes(self, micros: Iterator[Micro], loss_fn: Loss) -> Any:
        result: Any = None
        for data, share, sync in micros:
            if sync:
                output = self._pass(data, share, loss_fn)
            else:
                with self._no_sync():
                    output = self._pass(data, share, loss_fn)
            result = _weighted(output, share, result)
        return result

    def _pass(self, data: Any, share: float, loss_fn: Loss) -> Any:
        output = loss_fn(data if self.device is None else _moved(data, self.device))
        loss = output if isinstance(output, Tensor) else output["loss"]
        self._backward(loss if share == 1.0 else loss * share)
        return output

    @contextlib.contextmanager
    def _no_sync(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for model in self.models:
                if callable(quiet := getattr(model, "no_sync", None)):
                    stack.enter_context(quiet())
            yield

    def _backward(self, loss: Tensor) -> None:
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def _clip(self) -> None:
        if self.clip_norm is not None:
            self.norm = nn.utils.clip_grad_norm_(self._parameters, self.clip_norm)

    def _shares(self, pieces: Sequence[Any], samples: int) -> list[float]:
        """Return each micro-batch's share of the mean over the full batch, or over the gang's batches."""
        if self.average == "sum":
            return [1.0] * len(pieces)
        if len(pieces) == 1 and not (self.across_ranks and self.accumulation.gang.size > 1):
            return [1.0]
        if callable(self.average):
            weights = [float(self.average(piece)) for piece in pieces]
        else:
            weights = [float(self.accumulation.size(piece)) for piece in pieces]
        total = sum(weights)
        if self.across_ranks:
            # DDP divides by the number of workers; undo it, so that the gang's sum is divided by the gang's weight.
            total = self.accumulation.gang.total(total) / self.accumulation.gang.size
        return [weight / total if total else 1.0 / len(pieces) for weight in weights]

    # The loop

    def steps(self, iterations: int) -> Iterator[int]:
        """Iterate over the remaining iterations: `for i in training.steps(1000): ...`, with one `step` in each."""
        self._begin(iterations)
        self._restore_random()
        while self.iteration < iterations:
            self._boundary()
            before = self.iteration
            yield before
            self._expect(before)
        self.finish()

    def batches(
        self, loader: Iterable[Any], *, iterations: int | None = None, epochs: int | None = None
    ) -> Iterator[Any]:
        """Iterate over the remaining batches, epoch after epoch. A resumed training continues where it stopped.

        Ends after `iterations` or `epochs`, whichever comes first; one epoch if neither is given. The last, partial
        batch of an epoch is trained on like any other.
        """
        epochs = 1 if epochs is None and iterations is None else epochs
        self._begin(_total(loader, iterations, epochs))
        epoch = self._place.get("epoch", 0)
        while (epochs is None or epoch < epochs) and (iterations is None or self.iteration < iterations):
            iterator = self._epoch(loader, epoch)
            while iterations is None or self.iteration < iterations:
                self._boundary()  # before the data is drawn, because a resumed training draws it again
                batch = next(iterator, _END)
                if batch is _END:
                    break
                before = self.iteration
                yield batch
                self._expect(before)
                self._place["taken"] += 1
            if not self._place["taken"]:
                raise ValueError("the loader yields no batches")
            if iterations is not None and self.iteration >= iterations:
                break
            epoch += 1
            self._place = {}
        self.finish()

    def finish(self) -> None:
        """Write the final report of a complete training. `steps` and `batches` call it at their end."""
        self._looping = False
        self.link.done()

    def _begin(self, total: int) -> None:
        """Begin the loop, and tell the scheduler how many iterations it makes in all; 0: not known."""
        self._looping = self._ready = True
        self.link.say(total=total)
        self.link.begin()

    def _expect(self, before: int) -> None:
        if self.iteration != before + 1:
            raise RuntimeError("call step(), or advance(), exactly once for every batch")

    def _epoch(self, loader: Iterable[Any], epoch: int) -> Iterator[Any]:
        """Start an epoch, or return to the middle of one, in the same order and at the same position."""
        generators = _generators(loader)
        if "random" in self._place:
            randomness.restore(self._place["random"])
            for generator, state in zip(generators, self._place["generators"], strict=True):
                generator.set_state(state)
        else:
            self._restore_random()
            self._place = {
                "epoch": epoch,
                "taken": 0,
                "random": randomness.capture(),
                "generators": [generator.get_state() for generator in generators],
            }
        for sampler in (getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None), loader):
            if callable(set_epoch := getattr(sampler, "set_epoch", None)):
                set_epoch(epoch)
        iterator = iter(loader)
        for _ in range(self._place["taken"]):
            next(iterator)
        self._restore_random()
        return iterator

    # Between two steps

    def _first(self) -> None:
        self._ready = True
        self._restore_random()
        self.link.begin()
        self._boundary()

    def _boundary(self) -> None:
        checkpoint, stop = self.accumulation.obey()
        if stop:
            if self.checkpoints.directory is not None:
                self.save(checkpoint)
            self.link.say(status=WorkerStatus.STOPPED)
            raise TrainingStopped
        every = self.checkpoints.every
        own = every is not None and self.iteration % every == 0 and self.iteration > self.link.checkpoint
        if self.iteration and (own or checkpoint > self.link.checkpoints_taken):
            self._try_save(checkpoint)

    def _try_save(self, asked: int) -> None:
        """Save a checkpoint. If that fails, warn and continue training."""
        try:
            self.save(asked)
        except (OSError, RuntimeError) as error:
            self.link.say(note=str(error), checkpoints_taken=asked)
            warnings.warn(f"Carpool: {error}", stacklevel=4)

    def save(self, asked: int = 0) -> Path:
        """Write a checkpoint now. A gang calls it together."""
        private = {"iteration": self.iteration, "random": randomness.capture(), "place": self._place}
        write = self.checkpoints.custom_save or self._save_all
        path = self.checkpoints.save(self.iteration, write, private, self.accumulation.gang)
        taken = max(asked, self.link.checkpoints_taken)
        self.link.say(checkpoint=self.iteration, checkpoints_taken=taken)
        self.link.begin()
        return path

    def _parts(self) -> dict[str, Sequence[Any]]:
        scalers = [self.scaler] if self.scaler is not None else []
        models = [_unwrapped(model) for model in self.models]
        return {"models": models, "optimizers": self.optimizers, "schedules": self.schedules, "scalers": scalers}

    def _save_all(self, directory: Path) -> None:
        states = {name: [part.state_dict() for part in parts] for name, parts in self._parts().items()}
        torch.save(states, directory / "state.pt")

    def _load_all(self, directory: Path) -> None:
        states = torch.load(directory / "state.pt", map_location="cpu", weights_only=False)
        for name, parts in self._parts().items():
            if len(parts) != len(states[name]):
                raise ValueError(f"the checkpoint holds {len(states[name])} {name}, this training {len(parts)}")
            for part, state in zip(parts, states[name], strict=True):
                part.load_state_dict(state)

    def _resume(self) -> None:
        found = self.checkpoints.latest()
        if found is None or self._being_checked:
            return
        _, path = found
        (self.checkpoints.custom_load or self._load_all)(path)
        private = self.checkpoints.private(path, self.accumulation.gang.rank)
        self.iteration, self._random, self._place = private["iteration"], private["random"], private["place"]
        self.link.say(iteration=self.iteration, checkpoint=self.iteration)

    def _restore_random(self) -> None:
        """Restore the random state once, as late as possible: building models and data sets draws random numbers."""
        if self._random is not None:
            randomness.restore(self._random)
            self._random = None


_END = object()


def _total(loader: Any, iterations: int | None, epochs: int | None) -> int:
    """Return the iterations of a whole training; 0: not known, because the loader has no length."""
    try:
        of_epochs = None if epochs is None else epochs * len(loader)
    except (TypeError, NotImplementedError):
        return iterations or 0
    return min(limit for limit in (iterations, of_epochs) if limit is not None)


def _several(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _unwrapped(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def _weighted(output: Any, share: float, so_far: Any) -> Any:
    if isinstance(output, Tensor):
        value: Any = output.detach()
    elif isinstance(output, Mapping):
        so_far = so_far or dict.fromkeys(output)
        return {name: _weighted(value, share, so_far[name]) for name, value in output.items()}
    else:
        value = output
    if share != 1.0:
        value = value * share
    return value if so_far is None else so_far + value


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {key: _moved(item, device) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return type(value)._make(_moved(item, device) for item in value)
    if isinstance(value, list | tuple):
        return type(value)(_moved(item, device) for item in value)
    return value.to(device) if hasattr(value, "to") else value


def _generators(loader: Any) -> list[torch.Generator]:
    """Return the generators that determine a loader's order, if it has its own."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    found = {id(g): g for owner in owners if isinstance(g := getattr(owner, "generator", None), torch.Generator)}
    return list(found.values())
