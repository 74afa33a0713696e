"""A scheduler for deep-learning jobs that share GPUs when, and only when, sharing lowers the mean completion time.

`connect`, `connect_async` and `Executor` are the Python client of a running service. They are loaded when they are
used, so that a training process that imports `carpool.train` loads nothing else.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.2.0.dev0"
__all__ = ["Executor", "__version__", "connect", "connect_async"]

if TYPE_CHECKING:
    from carpool.client.asynchronous import connect_async
    from carpool.client.connection import connect
    from carpool.client.functions import FunctionExecutor as Executor


def __getattr__(name: str) -> Any:
    if name == "connect":
        from carpool.client.connection import connect

        return connect
    if name == "connect_async":
        from carpool.client.asynchronous import connect_async

        return connect_async
    if name == "Executor":
        from carpool.client.functions import FunctionExecutor

        return FunctionExecutor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
