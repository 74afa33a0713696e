"""The random state of a process: Python's, NumPy's (if loaded), PyTorch's on the CPU and on the current GPU.

A repeated step and a resumed training must draw what the uninterrupted one would have drawn.
"""

from __future__ import annotations

import random
import sys
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


class _HostGenerators:
    """The generators of the CPU: slow to read, and some training loops never use them.

    They are read before every step; once they have stood still for 50 steps, before every 32nd. Should one move
    again, they are read before every step for good. So only one that wakes up late can be restored up to 31 steps
    old.
    """

    def __init__(self) -> None:
        self._quiet = 0
        self._kept: tuple[Any, ...] | None = None

    def keep(self) -> None:
        self._quiet += 1
        if self._quiet > 50 and self._quiet % 32:
            return
        numpy = sys.modules.get("numpy")
        array = numpy.random.get_state() if numpy is not None and hasattr(numpy, "random") else None
        now = (torch.default_generator.get_state(), random.getstate(), array)
        if self._quiet > 0 and self._kept is not None and not _equal(now, self._kept):
            self._quiet = -(1 << 60)
        self._kept = now

    def restore(self) -> None:
        assert self._kept is not None
        state, python, array = self._kept
        torch.set_rng_state(state)
        random.setstate(python)
        if array is not None:
            sys.modules["numpy"].random.set_state(array)


def _equal(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    if not torch.equal(a[0], b[0]) or a[1] != b[1]:
        return False
    if a[2] is None or b[2] is None:
        return a[2] is b[2]
    # NumPy's: a name, an array, a position, and a normal number in store
    return bool(a[2][1].tobytes() == b[2][1].tobytes() and a[2][2:] == b[2][2:])


class Rewind:
    """What a step must find again when it is repeated: random state, and the buffers that forward passes change."""

    def __init__(self, modules: tuple[torch.nn.Module, ...], device: torch.device | None) -> None:
        self._on_gpu = device is not None and device.type == "cuda"
        self._gpu: torch.Tensor | None = None
        self._host = _HostGenerators()
        self._buffers = Buffers(modules)

    def keep(self) -> None:
        self._host.keep()
        if self._on_gpu:
            self._gpu = torch.cuda.get_rng_state()
        self._buffers.keep()

    def restore(self) -> None:
        self._host.restore()
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
