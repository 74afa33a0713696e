"""The actor that keeps an agent alive on one node of a Ray cluster, and answers for the ground while it runs.

Ray starts it again when it dies. The supervisor and the agent are its children and die with it; the agent asks it
through a socket whether the pilot is wanted, which is so while the pilot's key is in Ray's store.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from typing import Any

UNKNOWN, WANTED, DENIED = b"?", b"1", b"0"
"""Answers to an agent: Ray cannot be asked, the pilot is wanted, it is not."""


class RayPilot:
    """Runs the supervisor of an agent as a child process."""

    def __init__(self, ticket: dict[str, Any], place: dict[str, str], namespace: str) -> None:
        """`place`: name and address of the node. `namespace`: of the keys of this service's pilots."""
        self._key, self._space = ticket["pilot"].encode(), namespace.encode()
        row = self._row()
        if row is None:
            raise RuntimeError(f"pilot {ticket['pilot']} is not wanted any more")
        self._write({**row, "state": "running"})
        folder = tempfile.mkdtemp(prefix="carpool-")
        path = os.path.join(folder, "witness")
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.bind(path)
        self._listening.listen(8)
        threading.Thread(target=self._answer_for_ever, daemon=True).start()
        data = {"ticket": ticket, "ground": "ray", **place, "witness": {"kind": "socket", "path": path}}
        command = [sys.executable, "-m", "carpool.live.agent.pilot", "ray"]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE)
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(data).encode())
        self._child.stdin.close()
        threading.Thread(target=self._end_with_child, daemon=True).start()

    def _row(self) -> dict[str, Any] | None:
        from ray.experimental import internal_kv

        text = internal_kv._internal_kv_get(self._key, namespace=self._space)
        found: dict[str, Any] | None = json.loads(text) if text is not None else None
        return found

    def _write(self, row: dict[str, Any] | None) -> None:
        from ray.experimental import internal_kv

        if row is None:
            internal_kv._internal_kv_del(self._key, namespace=self._space)
        else:
            internal_kv._internal_kv_put(self._key, json.dumps(row).encode(), overwrite=True, namespace=self._space)

    def _end_with_child(self) -> None:
        """End with the supervisor: for good if that ended by itself, otherwise until Ray starts this actor again."""
        status = self._child.wait()
        if status >= 0:
            with contextlib.suppress(Exception):
                self._write(None)
        os._exit(1)

    def _answer_for_ever(self) -> None:
        while True:
            connection, _ = self._listening.accept()
            with connection, contextlib.suppress(OSError):
                connection.settimeout(5.0)
                connection.sendall(self._wanted())

    def _wanted(self) -> bytes:
        try:
            return DENIED if self._row() is None else WANTED
        except Exception:
            return UNKNOWN
