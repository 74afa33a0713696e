"""Splits a step into micro-batches and repeats it with smaller ones when memory runs out. All front ends use it.

`Accumulation.run` splits a batch and lets the caller work through the micro-batches. When memory runs out it clears the
gradients, restores random state and running statistics, and repeats the step with twice as many micro-batches.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch

from carpool.channel import ENV_VERDICT, Control, Shrinking, WorkerStatus
from carpool.train import batch as batches
from carpool.train import memory, randomness
from carpool.train.certify import Split, examine
from carpool.train.gang import Gang
from carpool.train.link import Link
from carpool.train.memory import OutOfMemoryError
from carpool.train.verdict import Verdict

T = TypeVar("T")


class Micro(NamedTuple):
    """One micro-batch: its data, the factor for its loss, and whether its backward pass may synchronise the gang."""

    data: Any
    share: float
    sync: bool


class Orders(NamedTuple):
    """What the scheduler requests besides the accumulation."""

    checkpoint: int
    stop: bool


Work = Callable[[Iterator[Micro]], T]
Weigh = Callable[[Sequence[Any], int], Sequence[float]]
"""Function that returns the share of each micro-batch. Its second argument is the number of samples in the batch."""


class Accumulation:
    def __init__(
        self,
        link: Link,
        modules: tuple[torch.nn.Module, ...],
        *,
        split: Split | int = 0,
        requested: int | None = None,
        can_shrink: bool | Verdict | None = None,
    ) -> None:
        if requested is not None and requested < 1:
            raise ValueError("accumulation must be at least 1")
        self.link = link
        self.gang = Gang()
        self.verdict = can_shrink if isinstance(can_shrink, Verdict) else _given_verdict() or examine(*modules)
        self._device = next((p.device for m in modules for p in m.parameters()), None)
        self.splitter = split
        self._dim = split if isinstance(split, int) else 0
        self._split = split if callable(split) else None
        self._requested = requested
        self._allowed = can_shrink if isinstance(can_shrink, bool) else None
        self._floor = 1  # minimum accumulation after running out of memory, until the scheduler changes it
        self._sequence = -1
        self._stood = 0  # the latest control whose pause is over
        self._control: Control | None = None
        self._orders = Orders(0, False)
        self._rehearsals = 2  # one before and one after the optimizer's state exists
        self._synchronising = False
        self._rewind = randomness.Rewind(modules, self._device)
        self.can_shrink = self._allowed_by(link.control)
        self.count = 1
        self.samples = 0
        link.verdict(self.verdict.shrinking, self.verdict.sentence)
        link.say(can_stand=self.gang.size > 1)

    def _allowed_by(self, control: Control) -> bool:
        """Return whether the batch may be split: the scheduler decides, then the script, then the verdict."""
        if control.can_shrink is not None:
            return control.can_shrink
        return self._allowed if self._allowed is not None else self.verdict.can_shrink

    def _wanted_by(self, control: Control) -> int:
        """Return the accumulation that this worker wants from the next step on."""
        if control.sequence != self._sequence:
            self._floor = 1
        wanted = self._requested or 1
        if self.link.connected and (self.verdict.shrinking != Shrinking.REFUSED or self._allowed_by(control)):
            wanted = max(wanted, control.accumulation)
        return max(wanted, self._floor)

    def obey(self) -> Orders:
        """Apply what the scheduler wants, together with the rest of the gang. Called between two steps."""
        control = self.link.poll()
        if self.gang.size == 1:
            if control is self._control:
                return self._orders
            self._control, self._orders = control, Orders(control.checkpoint, control.stop)
            self._take_up(self._wanted_by(control), self._allowed_by(control), control.sequence)
            return self._orders
        while self.gang.due():
            count, forbidden, checkpoint, stop, seconds, pause, pause_s = self.gang.largest(
                [
                    self._wanted_by(control),
                    not self._allowed_by(control),
                    control.checkpoint,
                    control.stop,
                    self.link.report.seconds,
                    *self._pause_of(control),
                ]
            )
            self.gang.next_in(seconds)
            self._take_up(int(count), not forbidden, control.sequence)
            if not pause or stop:
                return Orders(int(checkpoint), bool(stop))
            self._stand(int(pause), pause_s)
            control = self.link.poll()
        return Orders(0, False)

    def _pause_of(self, control: Control) -> tuple[int, float]:
        """Return the number of the control that asks for a pause, and its length; 0 where none does, or no more."""
        asked = control.pause_s > 0.0 and control.sequence > self._stood
        return (control.sequence, control.pause_s) if asked else (0, 0.0)

    def _stand(self, sequence: int, seconds: float) -> None:
        """Wait with the whole gang until the scheduler lets it go on, then agree again on what it wants."""
        if self._device is not None and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # kernels of collectives may still be in flight
        self.link.stand(sequence, seconds)
        self._stood = sequence
        self.gang.agree_again()

    def _take_up(self, count: int, can_shrink: bool, sequence: int) -> None:
        self.can_shrink = can_shrink
        if count == self.count and sequence == self._sequence:
            return
        if count < self.count:
            self._rehearsals = max(self._rehearsals, 1)
        if count != self.count:
            memory.reset_peak(self._device)
            self.link.retuned(count)
        self.count, self._sequence = count, sequence
        self.link.say(accumulation=count, control=sequence)

    def split(self, data: Any) -> list[Any]:
        if self.count == 1:
            return [data]
        return list(self._split(data, self.count)) if self._split else batches.split(data, self.count, self._dim)

    def size(self, data: Any) -> int:
        """Return the number of samples in a batch; with a custom split function, the number of smallest pieces."""
        if self._split is None:
            return batches.batch_size(data, self._dim)
        try:
            return batches.batch_size(data, self._dim)
        except batches.BatchError:
            return len(self._split(data, 1 << 30))

    def _by_samples(self, pieces: Sequence[Any], samples: int) -> list[float]:
        """Return the shares for a loss that is a mean over samples."""
        return [1.0] if len(pieces) == 1 else [self.size(piece) / samples for piece in pieces]

    def run(
        self, data: Any, work: Work[T], clear: Callable[[], None], weigh: Weigh | None = None, repeatable: bool = True
    ) -> T:
        """Run one step's forward and backward passes in as many micro-batches as necessary.

        `clear` drops the gradients made so far. A step that starts with gradients to keep is not `repeatable`.
        """
        weigh = weigh or self._by_samples
        self.samples = self.size(data)
        if not self.can_shrink or not repeatable:
            return self._run_fixed(data, work, weigh)
        self._rewind.keep()

        def rewind() -> None:
            clear()
            self._rewind.restore()

        if self.gang.size > 1 and self._rehearsals > 0:
            self._rehearse(data, work, rewind, weigh)
        while True:
            try:
                return work(self._micros(data, weigh))
            except Exception as error:
                words = _words(error)
            # Outside the handler: the traceback, and with it the activations, are gone.
            if self.gang.size > 1 and self._synchronising:
                self._give_up(
                    "a worker of a gang ran out of memory in a synchronised pass, which cannot be repeated by one "
                    f"worker alone; start the gang again with accumulation {2 * self.count}",
                    words,
                )
            self._double(self.samples, words)
            rewind()

    def _micros(self, data: Any, weigh: Weigh, sync: bool = True) -> Iterator[Micro]:
        self._synchronising = False
        pieces = self.split(data)
        shares = weigh(pieces, self.samples)
        if len(pieces) == 1:
            self._synchronising = sync
            yield Micro(data, shares[0], sync)
            return
        # A piece without weight (no tokens) has no mean: leave it out, unless nothing else is there.
        kept = [i for i, share in enumerate(shares) if share] or [0]
        for i in kept:
            self._synchronising = sync and i == kept[-1]
            yield Micro(pieces[i], shares[i], self._synchronising)

    def _run_fixed(self, data: Any, work: Work[T], weigh: Weigh) -> T:
        """Run a step whose accumulation may not grow. If memory runs out, report that the job must run alone."""
        try:
            return work(self._micros(data, weigh))
        except Exception as error:
            words = _words(error)
        if self.can_shrink:
            self._give_up(
                "out of memory in the middle of the framework's own gradient accumulation, whose earlier gradients "
                "would be lost; set that accumulation to 1 and let Carpool split the batch",
                words,
            )
        self.link.say(needs_alone=True)
        return self._give_up(
            f"out of memory, and this job may not split its batch further ({self.verdict.sentence}); it asks to run "
            "alone on its GPUs. To allow smaller micro-batches, certify the job with `carpool check` or pass "
            "can_shrink=True",
            words,
        )

    def _rehearse(self, data: Any, work: Work[Any], rewind: Callable[[], None], weigh: Weigh) -> None:
        """Try a gang's step without synchronising: a worker that fails inside an all-reduce would block the others.

        This costs one more pass in the first two steps and after a change to larger micro-batches, and nothing else.
        """
        while True:
            words = ""
            try:
                work(self._micros(data, weigh, sync=False))
            except Exception as error:
                words = _words(error)
            rewind()
            failed, count, samples = self.gang.largest([bool(words), self.count, self.samples])
            self.count = int(count)
            if not failed:
                self._rehearsals -= 1
                return
            # Batches may differ in size within a gang. All workers use the largest one, so that they stay together.
            self._double(int(samples), words or "another worker of the gang ran out of memory")

    def _double(self, samples: int, words: str) -> None:
        if self.count >= samples:
            self._give_up("out of memory with one sample per micro-batch: this model does not fit on the GPU", words)
        self.count = self._floor = min(2 * self.count, samples)
        memory.release()
        memory.reset_peak(self._device)
        note = f"out of memory; the step is repeated with accumulation {self.count}"
        self.link.retuned(self.count)
        self.link.say(note=note, out_of_memory=self.link.report.out_of_memory + 1)
        warnings.warn(f"Carpool: {note}", stacklevel=5)

    def _give_up(self, sentence: str, words: str) -> NoReturn:
        self.link.say(status=WorkerStatus.OUT_OF_MEMORY, note=sentence)
        raise OutOfMemoryError(f"{sentence}. The error was: {words}")


def _words(error: Exception) -> str:
    """Return the message of an out-of-memory error, and raise any other error again."""
    if not memory.is_out_of_memory(error):
        raise error
    return str(error) or type(error).__name__


def _given_verdict() -> Verdict | None:
    """Return the verdict of an earlier `carpool check`, which the service passes to the job."""
    path = os.environ.get(ENV_VERDICT)
    if not path:
        return None
    try:
        return Verdict.load(path)
    except (OSError, ValueError, TypeError) as error:
        warnings.warn(f"Carpool: the verdict in {path} cannot be read ({error})", stacklevel=4)
        return None
