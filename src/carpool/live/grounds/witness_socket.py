"""A witness that answers through a socket on the same machine: the process of the ground that keeps the agent alive."""

import contextlib
import socket


class SocketWitness:
    """Asks the process that started the agent."""

    def __init__(self, path: str) -> None:
        self._path = path

    def wanted(self, timeout_s: float) -> bool | None:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asked:
            asked.settimeout(timeout_s)
            asked.connect(self._path)
            return {b"1": True, b"0": False}.get(asked.recv(1))
        return None
