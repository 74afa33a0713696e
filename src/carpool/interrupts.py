"""Delaying Ctrl-C while a few short steps must not be cut in half.

`files.py` moves finished results in place under it; the sweep starts its worker processes under it.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C until the end of the block. Child processes that are started in the block never receive it."""
    heard: list[int] = []
    masks = hasattr(signal, "pthread_sigmask")  # children inherit it; in this process other threads may take the signal
    main = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number)) if main else None
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if masks else set()
    try:
        yield
    finally:
        if masks:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if main:
            signal.signal(signal.SIGINT, handler)
        if heard:
            signal.raise_signal(signal.SIGINT)
