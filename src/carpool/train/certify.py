"""Decides whether splitting the batch changes a training: inspects modules, tries the loss, and measures.

`examine` inspects a model's modules and costs nothing; every `Training` does it. `check` also runs the loss on a batch,
whole and split, in float64 and without dropout. It finds the module or the loss that mixes samples, and trains a few
steps both ways. Model, optimizers and random state are left as they were.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from carpool.channel import ENV_CHECK, ENV_CHECK_OPTIONS
from carpool.train import batch as batches
from carpool.train import randomness
from carpool.train.sandbox import BATCH_NORM, DROPOUT, Exact, doubled, sandbox
from carpool.train.verdict import Finding, SplitMeasurement, Verdict

Loss = Callable[[Any], "Tensor | Mapping[str, Tensor]"]
Average = Literal["samples", "sum"] | Callable[[Any], "int | float | Tensor"]
Split = Callable[[Any, int], Sequence[Any]]

_SAME = 1e-9


def examine(*models: nn.Module) -> Verdict:
    """Return the verdict that the modules alone allow."""
    findings = [found for model in models for name, module in _named(model) if (found := _finding(name, module))]
    return Verdict(tuple(findings))


def _named(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    yield from inner.named_modules()


def _finding(name: str, module: nn.Module) -> Finding | None:
    where = _label(name, module)
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        if module.training or module.running_mean is None:
            return Finding("refuse", where, BATCH_NORM)
        return Finding("note", where, "frozen in eval mode: splitting does not matter while it stays there")
    if isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats:
        return Finding("warn", where, "its running statistics move once per micro-batch; training itself is the same")
    rate = getattr(module, "p", None) if isinstance(module, nn.modules.dropout._DropoutNd) else None
    if isinstance(module, nn.MultiheadAttention) or (isinstance(module, nn.RNNBase) and module.num_layers > 1):
        rate = module.dropout
    return Finding("warn", where, DROPOUT) if rate and module.training else None


def _label(name: str, module: nn.Module) -> str:
    return f"{name} ({type(module).__name__})" if name else type(module).__name__


def check(
    model: nn.Module | Sequence[nn.Module],
    loss_fn: Loss,
    batch: Any,
    *,
    optimizer: Any = None,
    average: Average = "samples",
    split: Split | int = 0,
    accumulation: int = 4,
    steps: int = 5,
) -> Verdict:
    """Certify, warn or refuse, and measure `steps` steps with the whole batch against `accumulation` micro-batches."""
    models = tuple(model) if isinstance(model, list | tuple) else (model,)
    optimizers = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer] if optimizer else []
    if not optimizers:
        optimizers = [torch.optim.SGD([p for m in models for p in m.parameters()], lr=0.01)]
    findings = list(examine(*models).findings)
    with sandbox(models, optimizers):
        trial = _Trial(models, loss_fn, doubled(batch), optimizers, average, split)
        if trial.samples < 2:
            raise batches.BatchError("a check needs a batch of at least two samples")
        known = {finding.where for finding in findings}
        whole = trial.run_whole()  # an error here would also occur without Carpool
        try:
            observed = trial.observe(whole)
            findings += [found for found in observed if found.where not in known]
            if not any(found.level == "refuse" for found in findings):
                findings += trial.try_loss()
            measurement = trial.measure(min(max(accumulation, 2), trial.samples), steps)
        except Exception as error:
            words = f"it fails on a part of the batch: {type(error).__name__}: {error}"
            findings.append(Finding("refuse", trial.loss_name, words))
            measurement = None
    if measurement is not None and not measurement.same and not any(found.level == "refuse" for found in findings):
        words = f"the weights differ by {measurement.difference:.1e} and no single module was found to be the reason"
        findings.append(Finding("refuse", "the training step", words))
    return Verdict(tuple(findings), measurement)


def being_checked() -> bool:
    """Return whether `carpool check` started the script, which then ends at its first step."""
    return ENV_CHECK in os.environ


def check_and_exit(models: Sequence[nn.Module], loss_fn: Loss, batch: Any, **how: Any) -> NoReturn:
    """Check the script's training step, write the verdict where `carpool check` expects it, and exit."""
    options = json.loads(os.environ.get(ENV_CHECK_OPTIONS, "{}"))
    check(models, loss_fn, batch, **how, **options).save(os.environ[ENV_CHECK])
    raise SystemExit(0)


Trace = list[tuple[str, nn.Module, list[Tensor], list[Tensor]]]


class _Trial:
    """One batch, one loss function, and the questions asked of them."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        loss_fn: Loss,
        batch: Any,
        optimizers: Sequence[Any],
        average: Average,
        split: Split | int,
    ) -> None:
        self.models, self.loss_fn, self.batch = models, loss_fn, batch
        self.optimizers, self.average = optimizers, average
        self._split = split
        dim = split if isinstance(split, int) else 0
        self.samples = len(split(batch, 1 << 30)) if callable(split) else batches.batch_size(batch, dim)
        self._names = {id(module): name for model in models for name, module in _named(model)}

    def pieces(self, count: int) -> list[Any]:
        if callable(self._split):
            return list(self._split(self.batch, count))
        return batches.split(self.batch, count, self._split)

    def _loss(self, data: Any) -> Tensor:
        output = self.loss_fn(data)
        return output["loss"] if isinstance(output, Mapping) else output

    def _weight(self, piece: Any) -> float:
        if callable(self.average):
            return float(self.average(piece))
        if self.average == "sum":
            return 1.0
        if callable(self._split):
            return float(len(self._split(piece, 1 << 30)))
        return float(batches.batch_size(piece, self._split))

    def shares(self, pieces: Sequence[Any]) -> list[float]:
        weights = [self._weight(piece) for piece in pieces]
        total = 1.0 if self.average == "sum" else sum(weights)
        return [weight / total for weight in weights]

    # Which module mixes samples?

    def run_whole(self) -> tuple[Trace, list[Finding]]:
        """Run the whole batch. Return the inputs and outputs of every module, and the findings."""
        findings: dict[tuple[str, str], Finding] = {}
        with torch.no_grad():
            trace = self._trace(self.batch, findings)
        return trace, list(findings.values())

    def observe(self, seen: tuple[Trace, list[Finding]]) -> list[Finding]:
        """Run the batch in two pieces, and name the first module whose outputs differ from those of the whole batch."""
        whole, found = seen
        counts = batches.sizes(self.samples, 2)
        with torch.no_grad():
            parts = [self._trace(piece, {}) for piece in self.pieces(2)]
        if all(len(part) == len(whole) for part in parts):
            for at, (name, module, inputs, outputs) in enumerate(whole):
                there = [part[at] for part in parts]
                if _agree(inputs, [t[2] for t in there], counts) and not _agree(outputs, [t[3] for t in there], counts):
                    where = _label(name, module)
                    if not any(f.where == where and f.level == "refuse" for f in found):
                        words = "it mixes the samples of a batch: its output for one depends on the others"
                        found.append(Finding("refuse", where, words))
                    break
        return found

    def _trace(self, data: Any, findings: dict[tuple[str, str], Finding]) -> Trace:
        trace: Trace = []
        stack: list[tuple[str, nn.Module]] = []

        def enter(module: nn.Module, inputs: Any) -> None:
            stack.append((self._names.get(id(module), "the loss" if not stack else ""), module))

        def leave(module: nn.Module, inputs: Any, output: Any) -> None:
            name, _ = stack.pop()
            trace.append((name, module, _tensors(inputs), _tensors(output)))

        def notice(level: Any, words: str) -> None:
            where = _label(*stack[-1]) if stack else self.loss_name
            findings.setdefault((where, words), Finding(level, where, words))

        mode = Exact.active
        assert mode is not None
        mode.notice = notice
        handles = [hooks.register_module_forward_pre_hook(enter), hooks.register_module_forward_hook(leave)]
        try:
            self._loss(data)
        finally:
            mode.notice = lambda level, words: None
            for handle in handles:
                handle.remove()
        return trace

    @property
    def loss_name(self) -> str:
        return f"the loss ({getattr(self.loss_fn, '__qualname__', type(self.loss_fn).__name__)})"

    # Is the loss the mean that the script says it is?

    def try_loss(self) -> list[Finding]:
        pieces = self.pieces(min(3, self.samples))
        with torch.no_grad():
            whole = float(self._loss(self.batch))
            parts = [float(self._loss(piece)) for piece in pieces]
        shares = self.shares(pieces)
        if _close(sum(share * part for share, part in zip(shares, parts, strict=True) if share), whole):
            return []
        if self.average != "sum" and _close(sum(parts), whole):
            words = 'it adds up over samples instead of averaging: pass average="sum"'
        elif self.average != "samples" and _close(
            sum(part * batches.batch_size(piece) for part, piece in zip(parts, pieces, strict=True)) / self.samples
            if not callable(self._split)
            else float("nan"),
            whole,
        ):
            words = 'it is a mean over samples: pass average="samples"'
        elif self._weighted_mean():
            words = (
                "it is a mean over something else than what average= says (tokens?): pass average=, a function that "
                "counts them in a micro-batch"
            )
        else:
            words = "it compares the samples of a batch with each other (an in-batch loss), so splitting changes it"
        return [Finding("refuse", self.loss_name, words)]

    def _weighted_mean(self) -> bool:
        """Return whether the loss is a weighted mean over samples. The ratios of weights of a, b, c must be consistent.

        L(ab) lies between L(a) and L(b) at w_b / (w_a + w_b), which gives w_b / w_a; and w_b/w_a · w_c/w_b = w_c/w_a.
        """
        singles = self.pieces(self.samples)
        if len(singles) < 3 or callable(self._split):
            return False
        dim = self._split
        with torch.no_grad():
            alone = [float(self._loss(piece)) for piece in singles[:3]]
            ratio = {}
            for i, j in ((0, 1), (1, 2), (0, 2)):
                both = float(self._loss(_joined(singles[i], singles[j], dim)))
                if both == alone[i] or alone[i] == alone[j]:
                    return False
                ratio[i, j] = (both - alone[i]) / (alone[j] - both) if alone[j] != both else 0.0
        return all(value > 0 for value in ratio.values()) and _close(ratio[0, 1] * ratio[1, 2], ratio[0, 2], 1e-6)

    # How far apart do the weights end?

    def measure(self, accumulation: int, steps: int) -> SplitMeasurement:
        tensors = list({id(t): t for m in self.models for t in (*m.parameters(), *m.buffers())}.values())
        before = [t.detach().clone() for t in tensors]
        random = randomness.capture()
        ends: list[list[Tensor]] = []
        for count in (1, accumulation):
            with torch.no_grad():
                for tensor, start in zip(tensors, before, strict=True):
                    tensor.copy_(start)
            for optimizer in self.optimizers:
                optimizer.state = defaultdict(dict)
            randomness.restore(random)
            self._train(count, steps)
            ends.append([p.detach().clone() for m in self.models for p in m.parameters()])
        differences = [float((a - b).abs().max()) for a, b in zip(*ends, strict=True) if a.numel()]
        scale = max((float(a.abs().max()) for a in ends[0] if a.numel()), default=0.0)
        return SplitMeasurement(accumulation, steps, max(differences, default=0.0), scale)

    def _train(self, count: int, steps: int) -> None:
        pieces = self.pieces(count) if count > 1 else [self.batch]
        shares = self.shares(pieces) if count > 1 else [1.0]
        for _ in range(steps):
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=True)
            for piece, share in zip(pieces, shares, strict=True):
                if share:
                    torch.autograd.backward(self._loss(piece) * share)
            for optimizer in self.optimizers:
                optimizer.step()


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value.detach().clone()] if value.is_floating_point() else []
    if isinstance(value, Mapping):
        return [t for item in value.values() for t in _tensors(item)]
    if isinstance(value, list | tuple):
        return [t for item in value for t in _tensors(item)]
    return []


def _agree(whole: list[Tensor], parts: list[list[Tensor]], counts: Sequence[int]) -> bool:
    """Return whether the pieces together equal the whole. Tensors without a leading batch dimension are skipped."""
    for at, tensor in enumerate(whole):
        if any(len(part) != len(whole) for part in parts):
            return True
        pieces = [part[at] for part in parts]
        comparable = tensor.ndim > 0 and tensor.shape[0] == sum(counts)
        comparable = comparable and all(
            p.ndim == tensor.ndim and p.shape[0] == n and p.shape[1:] == tensor.shape[1:]
            for p, n in zip(pieces, counts, strict=True)
        )
        if comparable and not torch.allclose(torch.cat(pieces), tensor, rtol=1e-8, atol=1e-10, equal_nan=True):
            return False
    return True


def _joined(a: Any, b: Any, dim: int) -> Any:
    if isinstance(a, Tensor):
        return torch.cat([a, b], dim) if a.ndim else a
    if isinstance(a, Mapping):
        return type(a)({key: _joined(a[key], b[key], dim) for key in a})  # type: ignore[call-arg]
    if isinstance(a, tuple):
        make = type(a)._make if hasattr(a, "_make") else type(a)
        return make(_joined(x, y, dim) for x, y in zip(a, b, strict=True))
    if isinstance(a, list):
        return [_joined(x, y, dim) for x, y in zip(a, b, strict=True)]
    return a


def _close(a: float, b: float, tolerance: float = _SAME) -> bool:
    return abs(a - b) <= tolerance * max(1.0, abs(a), abs(b))
