"""The training library: gradient accumulation chosen by the scheduler, progress reports and checkpoints.

    from carpool.train import Training

PyTorch is imported when one of these names is first used, so that the rest of Carpool works without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from carpool.train.verdict import Finding, SplitMeasurement, Verdict

if TYPE_CHECKING:
    from carpool.train.batch import BatchError, split
    from carpool.train.certify import check, examine
    from carpool.train.checkpoint import Checkpoints
    from carpool.train.memory import OutOfMemoryError
    from carpool.train.training import Training, TrainingStopped

__all__ = [
    "BatchError",
    "Checkpoints",
    "Finding",
    "OutOfMemoryError",
    "SplitMeasurement",
    "Training",
    "TrainingStopped",
    "Verdict",
    "check",
    "examine",
    "split",
]

_HOMES = {
    "BatchError": "batch",
    "Checkpoints": "checkpoint",
    "OutOfMemoryError": "memory",
    "TrainingStopped": "training",
    "Training": "training",
    "check": "certify",
    "examine": "certify",
    "split": "batch",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(
            f"carpool.train.{name} needs PyTorch: pip install 'carpool[train]'", name="torch"
        ) from error
    globals()[name] = value
    return value
