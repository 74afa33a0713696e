"""The place where `check` tries things: float64 throughout, no dropout, and everything as before afterwards.

`Exact` sees every PyTorch function that a script calls, which is how casts are undone, dropout is skipped, and batch
statistics or random draws in plain functions are noticed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from carpool.train import randomness

BATCH_NORM = "it normalises by the statistics of the micro-batch, so a split batch trains another model"
DROPOUT = "dropout draws other random numbers for micro-batches: the same in distribution, not bit by bit"


@contextlib.contextmanager
def sandbox(models: Sequence[nn.Module], optimizers: Sequence[Any]) -> Iterator[None]:
    """float64 throughout and no dropout; afterwards everything is as before."""
    tensors = list({id(t): t for m in models for t in (*m.parameters(), *m.buffers())}.values())
    data, gradients = [t.data for t in tensors], [t.grad for t in tensors]
    states = [optimizer.state for optimizer in optimizers]
    random, dtype = randomness.capture(), torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        for tensor in tensors:
            tensor.grad = None
            tensor.data = tensor.data.clone().double() if tensor.is_floating_point() else tensor.data.clone()
        with Exact():
            yield
    finally:
        torch.set_default_dtype(dtype)
        for tensor, before, gradient in zip(tensors, data, gradients, strict=True):
            tensor.grad = None
            tensor.data = before
            tensor.grad = gradient
        for optimizer, state in zip(optimizers, states, strict=True):
            optimizer.state = state
        randomness.restore(random)


def doubled(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, Mapping):
        items = {key: doubled(item) for key, item in value.items()}
        return items if type(value) is dict else type(value)(items)  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return type(value)._make(doubled(item) for item in value)
    if isinstance(value, list | tuple):
        return type(value)(doubled(item) for item in value)
    return value


_DROPOUTS: set[Callable[..., Any]] = {
    functional.dropout,
    functional.dropout1d,
    functional.dropout2d,
    functional.dropout3d,
    functional.alpha_dropout,
    functional.feature_alpha_dropout,
    torch.dropout,
}
_RANDOM: set[Callable[..., Any]] = {
    *(torch.rand, torch.randn, torch.randint, torch.randperm, torch.bernoulli, torch.normal, torch.multinomial),
    *(torch.rand_like, torch.randn_like, torch.randint_like),
    *(Tensor.bernoulli_, Tensor.normal_, Tensor.uniform_, Tensor.bernoulli, Tensor.multinomial),
}


_CASTS: set[Callable[..., Any]] = {Tensor.float, Tensor.half, Tensor.bfloat16}
_NARROW = {torch.float32, torch.float16, torch.bfloat16}


def _is_narrow(value: Any) -> bool:
    return isinstance(value, torch.dtype) and value in _NARROW


class Exact(TorchFunctionMode):
    """Sees every PyTorch function a script calls: keeps it in float64 even where the script casts, skips dropout, and
    notes what would change with the batch.
    """

    active: Exact | None = None

    def __init__(self) -> None:
        super().__init__()
        self.notice: Callable[[str, str], None] = lambda level, words: None

    def __enter__(self) -> Any:
        Exact.active = self
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        Exact.active = None
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _CASTS:
            return args[0].double()
        args = tuple(torch.float64 if _is_narrow(arg) else arg for arg in args)
        kwargs = {key: torch.float64 if _is_narrow(value) else value for key, value in (kwargs or {}).items()}
        if func in _DROPOUTS:
            rate = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
            training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
            if rate and training:
                self.notice("warn", DROPOUT)
            return kwargs.get("input", args[0] if args else None)
        if func is functional.scaled_dot_product_attention or func is functional.multi_head_attention_forward:
            args, kwargs = self._without_rate(func, args, kwargs)
        elif func is functional.batch_norm and kwargs.get("training", args[5] if len(args) > 5 else False):
            self.notice("refuse", BATCH_NORM)
        elif func in _RANDOM:
            self.notice(
                "warn",
                f"it draws random numbers ({getattr(func, '__name__', func)}): the same in distribution at best",
            )
        return func(*args, **kwargs)

    def _without_rate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        place = 4 if func is functional.scaled_dot_product_attention else 10
        rate = args[place] if len(args) > place else kwargs.get("dropout_p", 0.0)
        if rate and kwargs.get("training", True):
            self.notice("warn", DROPOUT)
        if len(args) > place:
            return (*args[:place], 0.0, *args[place + 1 :]), kwargs
        return args, {**kwargs, "dropout_p": 0.0}
