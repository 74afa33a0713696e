"""The job that runs a function for `carpool.Executor`: `python -m carpool.client.function_job FOLDER FIRST`.

Every worker of a gang calls the function; the first one writes what it returned. The exit code is 1 if it raised.
"""

import os
import pickle
import sys
import traceback
from pathlib import Path
from typing import Any

INDEX, RANK = "CARPOOL_ARRAY_INDEX", "RANK"


class RemoteTraceback(Exception):
    """Where a function failed in its job: the cause of the exception that its future raises."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def write(path: Path, data: bytes) -> None:
    """Write a file that only its owner may read. No reader sees a part of it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    partial.replace(path)


def main() -> int:
    folder, number = Path(sys.argv[1]), int(sys.argv[2]) + int(os.environ.get(INDEX, "0"))
    returned: bool
    value: Any
    try:
        function, args, kwargs = pickle.loads((folder / f"{number}.call").read_bytes())
        returned, value = True, function(*args, **kwargs)
    except Exception as error:
        traceback.print_exc()
        error.__cause__ = RemoteTraceback(traceback.format_exc())
        error.__traceback__ = None
        returned, value = False, error
    if os.environ.get(RANK, "0") == "0":
        write(folder / f"{number}.result", _dumps(returned, value))
    return 0 if returned else 1


def _dumps(returned: bool, value: Any) -> bytes:
    """Return what a future reads. What cannot be pickled is replaced by its text."""
    import cloudpickle  # type: ignore[import-untyped]

    try:
        data: bytes = cloudpickle.dumps((returned, _with_cause(value) if not returned else value))
        pickle.loads(data)
    except Exception as error:
        what = "its result" if returned else f"the exception {value!r}"
        data = pickle.dumps((False, RuntimeError(f"{what} cannot be pickled: {error!r}")))
    return data


def _with_cause(error: BaseException) -> "_Failure":
    return _Failure(error, str(error.__cause__.args[0]) if error.__cause__ is not None else "")


class _Failure:
    """An exception with its cause, which pickling an exception alone would lose."""

    def __init__(self, error: BaseException, text: str) -> None:
        self.error, self.text = error, text

    def __reduce__(self) -> Any:
        return _rebuild, (self.error, self.text)


def _rebuild(error: BaseException, text: str) -> BaseException:
    error.__cause__ = RemoteTraceback(text)
    return error


if __name__ == "__main__":
    from carpool.client import function_job  # under the name that the reader of the result can import, not `__main__`

    sys.exit(function_job.main())
