"""Checkpoints on a node that does not see the service's home: brought to the service when a job stops here, and fetched
from there before it goes on here.

One archive at a time travels, in pieces and at a bounded rate. Where the service does not answer, the same piece is
tried again. The folder here is removed when the service has its contents, and stays where it could not be sent.
"""

import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from carpool.errors import InputError
from carpool.live.agent.road import AGAIN_S, Road, Turned, until_answered
from carpool.live.checkpoint_archive import digest_of, has_files, pack_folder, unpack_folder
from carpool.live.executors.base import GangKey, Launch
from carpool.live.home import Home

SENDING, FETCHING = ".sending-", ".fetching-"
"""Prefixes of the folders in which archives are made."""
RATE = 64 << 20
"""Bytes that are sent or fetched in a second."""
TRIES = 3
"""Number of times that an archive is fetched whose hash is wrong."""
PIECE = 4 << 20


class CheckpointCopies:
    """Sends and fetches checkpoints. All methods block."""

    def __init__(self, home: Home, road: Road) -> None:
        self._home, self._road = home, road
        self.most_bytes = 0
        """Size of the largest folder that the service takes; 0: it takes none."""

    def has_any(self, job: str) -> bool:
        """Return whether there are checkpoints of a job here that the service would take."""
        return self.most_bytes > 0 and has_files(self._home.checkpoints(job))

    def send(self, key: GangKey, wanted: Callable[[], bool]) -> None:
        """Bring the checkpoints of a job to the service; tell it where they have to stay here."""
        folder = self._home.checkpoints(key[0])
        try:
            with tempfile.TemporaryDirectory(prefix=SENDING, dir=self._home.path) as place:
                packed = Path(place) / "packed"
                with packed.open("xb") as file:
                    pack_folder(folder, file, self.most_bytes)
                sent = self._send(key, packed, wanted)
            if sent:
                shutil.rmtree(folder, ignore_errors=True)
        except Turned as error:
            if error.status != 404:  # else the service has given the job up
                self._leave(key, str(error), wanted)
        except InputError as error:
            self._leave(key, str(error), wanted)
        except OSError as error:
            self._leave(key, f"it cannot be packed ({error.strerror})", wanted)

    def _send(self, key: GangKey, packed: Path, wanted: Callable[[], bool]) -> bool:
        """Send an archive piece by piece; return whether the service has it."""
        size, sha256, offset = packed.stat().st_size, digest_of(packed), 0
        with packed.open("rb") as file:
            while True:
                began = time.monotonic()
                file.seek(offset)
                data = file.read(PIECE)
                place: dict[str, str | int] = {"job": key[0], "attempt": key[1], "offset": offset, "size": size}
                place["sha256"] = sha256
                answer = until_answered(partial(self._road.send_checkpoint, data, **place), wanted)
                if answer is None or answer[1]:
                    return answer is not None
                offset = answer[0]
                if not data:  # it is being unpacked
                    time.sleep(AGAIN_S)
                _keep_rate(began, len(data))

    def _leave(self, key: GangKey, why: str, wanted: Callable[[], bool]) -> None:
        try:
            until_answered(lambda: self._road.leave_checkpoint(key[0], key[1], why), wanted)
        except InputError:  # the service has given the job up
            return

    def fetch(self, launch: Launch, wanted: Callable[[], bool]) -> None:
        """Fetch the checkpoints from which a job goes on, if the service has some that are not here. Raise `InputError`
        where they cannot be unpacked, and OSError where they do not arrive."""
        if launch.attempt == 1 or not self.most_bytes:
            return
        for _ in range(TRIES):
            offered = self._offered(launch.job, wanted)
            if offered is None:
                return
            size, sha256 = offered
            with tempfile.TemporaryDirectory(prefix=FETCHING, dir=self._home.path) as place:
                packed = Path(place) / "packed"
                if self._fetch(launch.job, packed, size, wanted) and digest_of(packed) == sha256:
                    unpack_folder(packed, self._home.checkpoints(launch.job), launch.uid, self.most_bytes)
                    until_answered(lambda: self._road.took_checkpoint(launch.job), wanted)
                    return
        raise OSError("its checkpoint did not arrive as it was sent")

    def _offered(self, job: str, wanted: Callable[[], bool]) -> tuple[int, str] | None:
        """Return the size and the hash of the archive that the service has; None: there is none."""
        while True:
            try:
                found = until_answered(lambda: self._road.offered_checkpoint(job), wanted)
            except Turned as error:
                if error.status == 404:
                    return None
                raise
            if found is not None:
                return found
            if not wanted():
                raise OSError("its checkpoint is not wanted any more")
            time.sleep(AGAIN_S)  # it is being packed

    def _fetch(self, job: str, packed: Path, size: int, wanted: Callable[[], bool]) -> bool:
        """Fetch an archive piece by piece; return whether it came whole. A service that starts anew forgets it."""
        with packed.open("xb") as file:
            while (offset := file.tell()) < size:
                began = time.monotonic()
                data = until_answered(partial(self._road.read_checkpoint, job, offset), wanted)
                if data is None:
                    raise OSError("its checkpoint is not wanted any more")
                if not data or offset + len(data) > size:
                    return False
                file.write(data)
                _keep_rate(began, len(data))
        return True


def _keep_rate(began: float, count: int) -> None:
    """Wait until so many bytes may have been sent since `began`."""
    time.sleep(max(0.0, began + count / RATE - time.monotonic()))


def remove_unfinished(home: Home) -> None:
    """Remove the archives that an agent left which was killed. Blocks."""
    for prefix in (SENDING, FETCHING):
        for place in home.path.glob(f"{prefix}*"):
            shutil.rmtree(place, ignore_errors=True)
