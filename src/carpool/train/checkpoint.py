"""Checkpoints of a job: one directory per saved iteration, complete or absent. A restart loads the newest one.

A checkpoint is written beside its final place and renamed when every worker of the gang has written its part. A kill at
any moment therefore leaves the previous checkpoint in force. `Checkpoints` owns the files, `Training` their contents.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from carpool.channel import ENV_CHECKPOINTS
from carpool.train.gang import Gang

Save = Callable[[Path], None]
Load = Callable[[Path], None]

_NAME = re.compile(r"iteration-(\d+)")


class Checkpoints:
    """The directory for checkpoints, the number to keep, and optionally the script's own save and load functions.

    `save(directory)` writes the shared state into a directory, on the first worker only; `load(directory)` reads it
    back, on every worker. Without them, `Training` saves the model, the optimizers, the schedules and the scaler.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        save: Save | None = None,
        load: Load | None = None,
        every: int | None = None,
        keep: int = 2,
    ) -> None:
        if (save is None) != (load is None):
            raise ValueError("give both save= and load=, or neither")
        if keep < 1 or (every is not None and every < 1):
            raise ValueError("keep= and every= must be at least 1")
        directory = directory if directory is not None else os.environ.get(ENV_CHECKPOINTS)
        self.directory = Path(directory) if directory else None
        self.every = every
        self.keep = keep
        self.custom_save = save
        self.custom_load = load

    def latest(self) -> tuple[int, Path] | None:
        """Return the newest complete checkpoint, as iteration and path."""
        if self.directory is None or not self.directory.is_dir():
            return None
        found = [(int(m[1]), path) for path in self.directory.iterdir() if (m := _NAME.fullmatch(path.name))]
        return max(found, default=None)

    def save(self, iteration: int, shared: Save, private: Any, gang: Gang) -> Path:
        """Write one checkpoint, together with the whole gang. Raises on every worker if any of them failed."""
        if self.directory is None:
            raise RuntimeError("there is no directory for checkpoints: set one in Training(checkpoints=...)")
        final = self.directory / f"iteration-{iteration:09d}"
        partial = self.directory / f".partial-{iteration:09d}"
        problem: Exception | None = None
        try:
            partial.mkdir(parents=True, exist_ok=True)
            if gang.rank == 0:
                shared(partial)
            torch.save(private, partial / f"worker-{gang.rank}.pt")
            _flush(partial)
        except Exception as error:
            problem = error
        [failed] = gang.largest([problem is not None])
        if not failed and gang.rank == 0:
            try:
                _replace(partial, final)
                self._prune()
            except OSError as error:
                problem = error
        [failed] = gang.largest([problem is not None])
        if failed:
            raise RuntimeError(f"the checkpoint of iteration {iteration} could not be written: {problem}") from problem
        return final

    def private(self, path: Path, rank: int) -> Any:
        """Load one worker's own part: its random state and its position in the data."""
        return torch.load(path / f"worker-{rank}.pt", map_location="cpu", weights_only=False)

    def _prune(self) -> None:
        assert self.directory is not None
        complete = sorted(path for path in self.directory.iterdir() if _NAME.fullmatch(path.name))
        for old in complete[: -self.keep]:
            shutil.rmtree(old, ignore_errors=True)


def _flush(directory: Path) -> None:
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _replace(partial: Path, final: Path) -> None:
    if final.exists():  # saved twice at one iteration: the new one replaces the old one
        shutil.rmtree(final)
    partial.rename(final)
