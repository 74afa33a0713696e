"""Files and folders that appear complete or not at all: they are written aside and moved in place at the end.

Everything that writes results calls this module: profiles, workloads, simulation results and reports.
"""

import csv
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from carpool.errors import InputError
from carpool.interrupts import uninterrupted


@contextmanager
def results_in(folder: str | Path) -> Iterator[Path]:
    """Yield an empty folder to write into. On success its files replace those of the same name in `folder`.

    On failure everything is as before: folders that were created are removed again.
    """
    target = Path(folder)
    made: list[Path] = []
    try:
        try:
            _make(target, made)
            aside = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=target))
        except OSError as error:
            raise _unwritable(target, error) from None
        try:
            yield aside
            with uninterrupted():
                _move_in(aside, target)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    except BrokenPipeError:
        raise
    except OSError as error:  # a full disk, say
        raise _unwritable(target, error) from None
    finally:
        for path in reversed(made):
            with suppress(OSError):
                path.rmdir()  # it is empty if the block failed


def _make(folder: Path, made: list[Path]) -> None:
    """Create the folder and its parents, and add those that did not exist to `made`."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        made.append(path)
    if not folder.is_dir():
        raise NotADirectoryError(0, "it is not a folder")


def _move_in(aside: Path, target: Path) -> None:
    files = sorted(aside.iterdir())
    for path in files:
        if (target / path.name).is_dir():
            raise InputError(f"{target / path.name}: is a folder and in the way of a result; move it")
    for path in files:
        os.replace(path, target / path.name)


@contextmanager
def whole_file(path: str | Path) -> Iterator[Any]:
    """Yield a text file that replaces `path` once it is complete. A pipe or a device is written to directly."""
    target = Path(os.path.realpath(path))
    if os.path.exists(target) and not os.path.isfile(target):
        try:
            with open(target, "w", encoding="utf-8", newline="") as file:
                yield file
        except BrokenPipeError:
            raise
        except OSError as error:
            raise _unwritable(path, error) from None
        return
    try:
        descriptor, aside = tempfile.mkstemp(prefix=f".{target.name}-", dir=target.parent, text=True)
    except OSError as error:
        raise _unwritable(path, error) from None
    try:
        with open(descriptor, "w", encoding="utf-8", newline="") as file:
            yield file
        os.chmod(aside, 0o666 & ~_umask())
        os.replace(aside, target)
    except BaseException as error:
        os.unlink(aside)
        if isinstance(error, OSError):
            raise _unwritable(path, error) from None
        raise


def _unwritable(path: str | Path, error: OSError) -> InputError:
    return InputError(f"{path}: cannot write there: {error.strerror}; choose another path")


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
