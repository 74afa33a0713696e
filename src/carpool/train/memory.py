"""GPU memory as the training library sees it: how much was needed, and whether an error means that it ran out."""

from __future__ import annotations

import gc

import torch

_SIGNS = (
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "can't allocate memory",
    "not enough memory",
)


class OutOfMemoryError(RuntimeError):
    """A micro-batch does not fit and the library may not, or cannot, make it smaller. The message says what to do."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means out of memory. Libraries below PyTorch raise a plain RuntimeError for it."""
    if isinstance(error, OutOfMemoryError):
        return False  # raised by this library after it tried
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def peak(device: torch.device | None) -> tuple[int, int]:
    """Return the maximum bytes allocated and reserved since the last reset; zero without a GPU."""
    if device is None or device.type != "cuda":
        return 0, 0
    return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)


def reset_peak(device: torch.device | None) -> None:
    if device is not None and device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def release() -> None:
    """Return cached blocks to the device, so that a step can be repeated with smaller micro-batches."""
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
