"""The random state of a process: Python's, NumPy's (if loaded), PyTorch's on the CPU and on the current GPU.

A repeated step and a resumed training must draw what the uninterrupted one would have drawn.
"""

from __future__ import annotations

import ctypes
import random
import sys
from typing import Any

import torch


class _NumPy:
    """NumPy's global state, which takes 35 µs to read: while its raw bits stand still, the last reading holds.

    The bits do not show the second half of a pair of normal numbers kept in store, so a state that has one in store
    is always read anew.
    """

    _BYTES = 624 * 4 + 4  # MT19937: its key and its position

    def __init__(self) -> None:
        self._bits = b""
        self._state: Any = None

    def capture(self, numpy: Any) -> Any:
        generator = numpy.random.get_bit_generator()
        if type(generator).__name__ != "MT19937":
            return numpy.random.get_state(legacy=False)
        bits = ctypes.string_at(generator.ctypes.state_address, self._BYTES)
        if bits != self._bits or self._state[3]:
            self._bits, self._state = bits, numpy.random.get_state()
        return self._state


_numpy = _NumPy()


def capture() -> dict[str, Any]:
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if (numpy := sys.modules.get("numpy")) is not None and hasattr(numpy, "random"):
        state["numpy"] = _numpy.capture(numpy)
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
