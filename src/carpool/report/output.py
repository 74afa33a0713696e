"""A folder of results that appears whole or not at all: files are written aside and moved in place at the end."""

import csv
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from carpool.errors import InputError


@contextmanager
def results_in(folder: str | Path) -> Iterator[Path]:
    """Yields an empty folder to write into; on success its files replace those of the same name in `folder`."""
    target = Path(folder)
    try:
        target.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=target))
    except OSError as error:
        raise InputError(f"{target}: cannot write there: {error.strerror}") from None
    try:
        yield aside
        for path in sorted(aside.iterdir()):
            os.replace(path, target / path.name)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        if not any(target.iterdir()):
            target.rmdir()  # nothing came of it


@contextmanager
def whole_file(path: str | Path) -> Iterator[Any]:
    """A text file that replaces `path` once it is complete."""
    target = Path(path)
    try:
        descriptor, aside = tempfile.mkstemp(prefix=f".{target.name}-", dir=target.parent, text=True)
    except OSError as error:
        raise InputError(f"{target}: cannot write there: {error.strerror}") from None
    try:
        with open(descriptor, "w", encoding="utf-8", newline="") as file:
            yield file
        os.chmod(aside, 0o666 & ~_umask())
        os.replace(aside, target)
    except BaseException:
        os.unlink(aside)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    with open(path, "w", encoding="utf-8", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(header)
        out.writerows(rows)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
