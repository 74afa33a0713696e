"""Checkpoints of jobs of one node on nodes that do not see the home: brought here when the job stops there, and sent
to the node where it runs next.

An archive arrives in pieces, by offset: the service says how much it has, so that a lost answer or a restart repeats
nothing. It is unpacked when its hash is right. `checkpoint.json` in the job's folder says which attempt the checkpoints
here are of, and why a later one stayed on its node.
"""

import json
import os
import threading
from dataclasses import dataclass, replace
from pathlib import Path

from carpool.errors import InputError
from carpool.live.checkpoint_archive import digest_of, has_files, pack_folder, unpack_folder
from carpool.live.executors import wire
from carpool.live.home import Home, folder_mode, read_own_json, write_private

RECORD = "checkpoint.json"
PIECE = 4 << 20
"""Bytes of one piece of an archive."""
MOST_BYTES = 4 << 30
"""Size of the largest checkpoint folder that is fetched, unless the operator says otherwise."""
AT_A_TIME = 2
"""Number of archives that are packed and unpacked at a time."""


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """What is known about the checkpoints of a job."""

    attempt: int = 0
    """The attempt that wrote the checkpoints here; 0: none did."""
    left: int = 0
    """The latest attempt whose checkpoints could not be fetched; 0: there is none."""
    node: str = ""
    """Where those are, or were."""
    why: str = ""


@dataclass(frozen=True, slots=True)
class PackedCheckpoint:
    """An archive that is ready to be sent."""

    path: Path
    size: int
    sha256: str


class FetchedCheckpoints:
    """The checkpoints of all jobs. All methods block; several threads may call them."""

    def __init__(self, home: Home, most_bytes: int) -> None:
        self._home, self.most_bytes = home, most_bytes
        self._packed: dict[str, PackedCheckpoint] = {}
        self._working = threading.BoundedSemaphore(AT_A_TIME)
        self._lock = threading.Lock()
        self._turns: dict[str, threading.Lock] = {}

    def record(self, job: str) -> CheckpointRecord:
        data = read_own_json(self._home.job(job) / RECORD)
        try:
            return wire.read(CheckpointRecord, data)
        except InputError:
            return CheckpointRecord()

    def left(self, job: str) -> str:
        """Say why the latest checkpoints of a job are not here; empty: they are, or there are none."""
        found = self.record(job)
        if found.left <= found.attempt:
            return ""
        then = f"goes on from that of attempt {found.attempt}" if found.attempt else "starts from its beginning"
        return f"its checkpoint of attempt {found.left} is on node {found.node} only ({found.why}); elsewhere it {then}"

    def leave(self, job: str, attempt: int, node: str, why: str) -> None:
        """Note that the checkpoints of an attempt stay on their node, or are lost with it."""
        self._write(job, replace(self.record(job), left=attempt, node=node, why=why))

    def written_here(self, job: str, attempt: int) -> None:
        """Note that an attempt writes its checkpoints into the home itself."""
        found = self.record(job)
        if found != CheckpointRecord():
            self._write(job, CheckpointRecord(attempt))

    def _write(self, job: str, record: CheckpointRecord) -> None:
        write_private(self._folder(job) / RECORD, json.dumps(wire.plain(record)))

    def _folder(self, job: str) -> Path:
        folder = self._home.job(job)
        folder.mkdir(mode=folder_mode(), exist_ok=True)
        return folder

    # ---- from a node -----------------------------------------------------------------------------------------------

    def receive(
        self, key: tuple[str, int], uid: int | None, offset: int, data: bytes, size: int, sha256: str
    ) -> tuple[int, bool]:
        """Take a piece of an archive; return how much is here, and whether the checkpoints are in their place."""
        job, attempt = key
        if size > self.most_bytes + self.most_bytes // 8:
            raise InputError(f"it is larger than {self.most_bytes >> 20} MiB, packed")
        with self._turn(job):
            if self.record(job).attempt == attempt:  # the answer to the last piece was lost
                return size, True
            path = self._folder(job) / f".arriving-{sha256}"
            for other in self._folder(job).glob(".arriving-*"):
                if other != path:
                    other.unlink()
            have = _append(path, offset, data, size)
            if have < size:
                return have, False
            if digest_of(path) != sha256:
                path.unlink()
                return 0, False
            try:
                with self._working:
                    unpack_folder(path, self._home.checkpoints(job), uid, self.most_bytes)
            except InputError:
                path.unlink()
                raise
            self._write(job, CheckpointRecord(attempt))
            path.unlink()
            self._forget(job)
            return size, True

    # ---- to a node -------------------------------------------------------------------------------------------------

    def offer(self, job: str, node: str) -> PackedCheckpoint | None:
        """Pack the checkpoints of a job for a node; None: there are none, or the node has later ones."""
        found, folder = self.record(job), self._home.checkpoints(job)
        if (found.left > found.attempt and found.node == node) or not has_files(folder):
            return None
        with self._turn(job):
            if job not in self._packed or not self._packed[job].path.exists():
                path = self._home.job(job) / ".leaving"
                path.unlink(missing_ok=True)
                with self._working, open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                    pack_folder(folder, file, self.most_bytes)
                self._packed[job] = PackedCheckpoint(path, path.stat().st_size, digest_of(path))
            return self._packed[job]

    def read(self, job: str, offset: int) -> bytes:
        """Return a piece of an archive that was offered."""
        found = self._packed.get(job)
        if found is None:
            return b""
        with found.path.open("rb") as file:
            file.seek(offset)
            return file.read(PIECE)

    def taken(self, job: str) -> None:
        """Remove an archive that its node has."""
        with self._turn(job):
            self._forget(job)

    def _forget(self, job: str) -> None:
        found = self._packed.pop(job, None)
        if found is not None:
            found.path.unlink(missing_ok=True)

    def _turn(self, job: str) -> threading.Lock:
        with self._lock:
            return self._turns.setdefault(job, threading.Lock())


def _append(path: Path, offset: int, data: bytes, size: int) -> int:
    """Append to a file of this size; return its size."""
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "r+b") as file:
        have = os.fstat(file.fileno()).st_size
        if have == offset and have + len(data) <= size:
            have += os.pwrite(file.fileno(), data, offset)
        return have
