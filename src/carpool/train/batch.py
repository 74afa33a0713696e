"""Splits a batch into micro-batches whose sizes differ by at most one sample.

A batch is any nesting of tuples, lists, dicts, named tuples and dataclasses around tensors (or NumPy arrays) that share
one batch dimension. The pieces are views: splitting copies no data. Where it is not clear how to split, an error names
the place in the batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Bounds = Sequence[tuple[int, int]]


class BatchError(ValueError):
    """The batch cannot be split; the message names the place and the remedy."""


def sizes(samples: int, parts: int) -> list[int]:
    """Return the sizes of the micro-batches, largest first. There are never more parts than samples.

    >>> sizes(10, 4)
    [3, 3, 2, 2]
    """
    parts = max(1, min(parts, samples))
    whole, rest = divmod(samples, parts)
    return [whole + (part < rest) for part in range(parts)]


def batch_size(batch: Any, dim: int = 0) -> int:
    """Return the number of samples: the length of the first tensor, or else of the first list of samples."""
    first = batch
    if type(batch) is tuple and batch:  # fast path for the usual batches
        first = batch[0]
    elif type(batch) is dict and batch:
        first = next(iter(batch.values()))
    if getattr(first, "ndim", 0) > dim:
        return int(first.shape[dim])
    return _measure(batch, dim)[0]


def split(batch: Any, parts: int, dim: int = 0) -> list[Any]:
    """Split the batch into at most `parts` micro-batches of the same structure."""
    samples, lists_only = _measure(batch, dim)
    counts = sizes(samples, parts)
    if len(counts) == 1:
        return [batch]
    bounds, start = [], 0
    for count in counts:
        bounds.append((start, start + count))
        start += count
    return _Splitter(samples, bounds, dim, lists_only).pieces(batch, "batch")


def _measure(batch: Any, dim: int) -> tuple[int, bool]:
    """Return the number of samples, and whether it is known only from lists of samples."""
    if isinstance(batch, list):
        if batch and all(isinstance(item, tuple | Mapping) for item in batch):
            raise BatchError(
                "the batch is a list of samples (or of structures?): collate it, or pass split= to Training"
            )
        found = next((array for item in batch for array in _arrays(item)), None)
    else:
        found = next(_arrays(batch), None)
    if found is not None:
        if found.ndim <= dim:
            raise BatchError(f"the first tensor of the batch has {found.ndim} dimensions, so no dimension {dim}")
        return int(found.shape[dim]), False
    samples = next(_lists(batch), None)
    if samples is None:
        raise BatchError("the batch holds no tensor, so its number of samples is unknown; pass split= to Training")
    return len(samples), True


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "ndim") and hasattr(value, "__getitem__")


def _children(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, tuple):
        return list(value)
    if _is_dataclass(value):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return []


def _arrays(value: Any) -> Iterator[Any]:
    """Yield the arrays that determine the batch size, without those in lists: a list may hold one entry per sample."""
    if _is_array(value) and value.ndim:
        yield value
    for child in _children(value):
        yield from _arrays(child)


def _lists(value: Any) -> Iterator[list[Any]]:
    if isinstance(value, list) and value:
        yield value
    for child in _children(value):
        yield from _lists(child)


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


@dataclasses.dataclass(frozen=True, slots=True)
class _Splitter:
    samples: int
    bounds: Bounds
    dim: int
    lists_only: bool

    def pieces(self, value: Any, path: str) -> list[Any]:
        if _is_array(value):
            return self._slices(value, path)
        if value is None or isinstance(value, str | bytes | bool | int | float | complex):
            return [value] * len(self.bounds)
        if isinstance(value, Mapping):
            return self._mapping(value, path)
        if isinstance(value, tuple):
            columns = [self.pieces(item, f"{path}[{i}]") for i, item in enumerate(value)]
            make = type(value)._make if hasattr(value, "_make") else type(value)
            return [make(row) for row in self._rows(columns)]
        if isinstance(value, list):
            return self._list(value, path)
        if _is_dataclass(value):
            names = [field.name for field in dataclasses.fields(value) if field.init]
            columns = [self.pieces(getattr(value, name), f"{path}.{name}") for name in names]
            return [dataclasses.replace(value, **dict(zip(names, row, strict=True))) for row in self._rows(columns)]
        raise BatchError(f"{path} is a {type(value).__name__}, which cannot be split; pass split= to Training")

    def _rows(self, columns: list[list[Any]]) -> list[tuple[Any, ...]]:
        return list(zip(*columns, strict=True)) if columns else [()] * len(self.bounds)

    def _slices(self, value: Any, path: str) -> list[Any]:
        if value.ndim == 0:
            return [value] * len(self.bounds)
        if value.ndim <= self.dim or value.shape[self.dim] != self.samples:
            raise BatchError(
                f"{path} has shape {tuple(value.shape)}, but the batch has {self.samples} samples in dimension "
                f"{self.dim}; pass split= to Training if this batch has a structure of its own"
            )
        before = (slice(None),) * self.dim
        return [value[(*before, slice(start, end))] for start, end in self.bounds]

    def _mapping(self, value: Mapping[Any, Any], path: str) -> list[Any]:
        columns = {key: self.pieces(item, f"{path}[{key!r}]") for key, item in value.items()}
        rows = [{key: column[part] for key, column in columns.items()} for part in range(len(self.bounds))]
        if type(value) is dict:
            return rows
        try:
            return [type(value)(row) for row in rows]  # type: ignore[call-arg]
        except TypeError as error:
            raise BatchError(f"{path}: cannot make a {type(value).__name__} of a part of it ({error})") from error

    def _list(self, value: list[Any], path: str) -> list[Any]:
        """Split a list: a structure, like [inputs, labels], or one entry per sample, like lists of boxes."""
        per_sample = len(value) == self.samples
        if self.lists_only and per_sample:
            return [value[start:end] for start, end in self.bounds]
        columns = bool(value) and all(
            _is_array(v) and v.ndim > self.dim and v.shape[self.dim] == self.samples for v in value
        )
        if path != "batch" and per_sample:  # the outermost list is a structure: collate functions make it so
            if columns:
                raise BatchError(
                    f"{path} is a list of {self.samples} tensors of {self.samples} rows: one entry per sample, or one "
                    "row per sample? Use a tuple for the latter, or pass split= to Training"
                )
            return [value[start:end] for start, end in self.bounds]
        return [list(row) for row in self._rows([self.pieces(v, f"{path}[{i}]") for i, v in enumerate(value)])]
