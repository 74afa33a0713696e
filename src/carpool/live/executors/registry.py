"""The executors by name, and how one is made from what the operator writes: `name` or `name:key=value,…`.

`local` (this machine) and `agents` (a cluster) are built in. A package adds its own through the entry-point group
`carpool.executors`: the name of the entry point is the name for `carpool serve --executor`, and its value is a class or
function that takes `ExecutorOptions` and returns an `Executor`.
"""

from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points

from carpool.errors import InputError, nearest
from carpool.live.executors.base import Executor, ExecutorOptions
from carpool.live.executors.cluster import ClusterExecutor
from carpool.live.executors.local import LocalExecutor

ENTRY_POINTS = "carpool.executors"
ExecutorFactory = Callable[[ExecutorOptions], Executor]
BUILT_IN: dict[str, ExecutorFactory] = {"local": LocalExecutor, "agents": ClusterExecutor}


def executor_names() -> list[str]:
    """Return the names of all executors, built in or from installed packages."""
    return sorted({*BUILT_IN, *_entry_points()})


def check_executor(text: str) -> None:
    """Raise `InputError` if no executor has this name or its settings cannot be read."""
    name, _ = _parse(text)
    _factory(name)


def make_executor(text: str, options: ExecutorOptions) -> Executor:
    """Make the executor that `text` names, with its settings added to `options`."""
    name, settings = _parse(text)
    return _factory(name)(replace(options, settings=settings))


def _entry_points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINTS) if point.name not in BUILT_IN}


def _parse(text: str) -> tuple[str, dict[str, str]]:
    name, _, rest = text.strip().partition(":")
    settings: dict[str, str] = {}
    for part in filter(None, (piece.strip() for piece in rest.split(","))):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not key:
            raise InputError(f"--executor {name}: setting {part!r}: write it as key=value")
        if key in settings:
            raise InputError(f"--executor {name}: setting {key!r} is given twice; give it once")
        settings[key] = value
    return name, settings


def _factory(name: str) -> ExecutorFactory:
    if name in BUILT_IN:
        return BUILT_IN[name]
    points = _entry_points()
    if name not in points:
        known = ", ".join(executor_names())
        hint = nearest(name, executor_names())
        hint = f"{hint} " if hint.startswith("did you mean") else ""
        raise InputError(f"--executor {name!a}: there is no such executor; {hint}known: {known}")
    point = points[name]
    try:
        factory: ExecutorFactory = point.load()
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        raise InputError(f"--executor {name}: {point.value} does not load ({problem}); fix its package") from error
    if not callable(factory):
        raise InputError(f"--executor {name}: {point.value} is neither a class nor a function; fix its package")
    return factory
