"""The random state of a process: Python's, NumPy's (if loaded), PyTorch's on the CPU and on the current GPU.

A repeated step and a resumed training must draw what the uninterrupted one would have drawn.
"""

from __future__ import annotations

import operator
import random
import sys
from collections.abc import Callable
from typing import Any

import torch


def capture() -> dict[str, Any]:
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if (numpy := sys.modules.get("numpy")) is not None and hasattr(numpy, "random"):
        state["numpy"] = numpy.random.get_state()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


class _Generator:
    """One generator of the CPU: slow to read, and many training loops never use it.

    Its state is read before every step; once it has not changed for 50 steps, before every 32nd. If it changes again,
    it is read before every step from then on. So a state that is up to 31 steps old is restored only the first time
    that the generator is used again.
    """

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], None], same: Callable[[Any, Any], bool]) -> None:
        self._read, self._write, self._same = read, write, same
        self._quiet = 0
        self._kept: Any = None

    def keep(self) -> None:
        self._quiet += 1
        if self._quiet > 50 and self._quiet % 32:
            return
        now = self._read()
        if self._quiet > 1 and not self._same(now, self._kept):
            self._quiet = -(1 << 60)
        self._kept = now

    def restore(self) -> None:
        self._write(self._kept)


def _host_generators() -> list[_Generator]:
    found = [
        _Generator(torch.default_generator.get_state, torch.set_rng_state, torch.equal),
        _Generator(random.getstate, random.setstate, operator.eq),
    ]
    if (numpy := sys.modules.get("numpy")) is not None and hasattr(numpy, "random"):
        found.append(_Generator(numpy.random.get_state, numpy.random.set_state, _same_array_state))
    return found


def _same_array_state(a: Any, b: Any) -> bool:
    """Compare NumPy's states: a name, an array, a position, and a stored normal number."""
    return bool(a[1].tobytes() == b[1].tobytes() and a[2:] == b[2:])


class Rewind:
    """What a step must find again when it is repeated: random state, and the buffers that forward passes change."""

    def __init__(self, modules: tuple[torch.nn.Module, ...], device: torch.device | None) -> None:
        self._on_gpu = device is not None and device.type == "cuda"
        self._gpu: torch.Tensor | None = None
        self._host: list[_Generator] | None = None  # found at the first step: a script may load NumPy late
        self._buffers = Buffers(modules)

    def keep(self) -> None:
        if self._host is None:
            self._host = _host_generators()
        for generator in self._host:
            generator.keep()
        if self._on_gpu:
            self._gpu = torch.cuda.get_rng_state()
        self._buffers.keep()

    def restore(self) -> None:
        for generator in self._host or ():
            generator.restore()
        if self._gpu is not None:
            torch.cuda.set_rng_state(self._gpu)
        self._buffers.restore()


class Buffers:
    """The buffers that a forward pass changes (running statistics), kept so that a step can be repeated.

    Which ones those are is seen in the first step; constant ones, such as masks, then cost nothing.
    """

    def __init__(self, modules: tuple[torch.nn.Module, ...]) -> None:
        self._modules = modules
        self._watched: list[torch.Tensor] | None = None
        self._versions: list[int] = []
        self._copies: list[torch.Tensor] = []

    def keep(self) -> None:
        if self._watched == []:
            return
        if self._watched is None:
            self._watched = [b for m in self._modules for b in m.buffers()]
            self._copies = [b.detach().clone() for b in self._watched]
            self._versions = [b._version for b in self._watched]
            return
        if self._versions:
            changed = [b._version != v for b, v in zip(self._watched, self._versions, strict=True)]
            self._watched = [b for b, moved in zip(self._watched, changed, strict=True) if moved]
            self._copies = [c for c, moved in zip(self._copies, changed, strict=True) if moved]
            self._versions = []
        for copy, buffer in zip(self._copies, self._watched, strict=True):
            copy.copy_(buffer)

    def restore(self) -> None:
        with torch.no_grad():
            for buffer, copy in zip(self._watched or (), self._copies, strict=True):
                buffer.copy_(copy)
