"""Code snapshots on a node that does not see the service's home: fetched once for each job and unpacked here.

What a job of another service left here, under the same number, is no part of a new job and is set aside.
"""

import io
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from carpool.live.agent.road import Road, until_answered
from carpool.live.checkpoint_archive import has_files
from carpool.live.foreign_files import give_tree
from carpool.live.home import Home, folder_mode
from carpool.live.http.code_snapshot import MAX_BYTES, MAX_FILES
from carpool.live.unpack import unpack


def fetch_snapshot(home: Home, road: Road, job: str, uid: int | None, wanted: Callable[[], bool]) -> Path:
    """Return the directory of a job's code snapshot on this node. Where the service does not answer, it is asked again
    as long as the snapshot is `wanted`, then OSError is raised. Blocks."""
    place = home.snapshot(job)
    if place.is_dir():
        return place
    data = until_answered(partial(road.snapshot, job), wanted)
    if data is None:
        raise OSError("its code snapshot is not wanted any more")
    mode = folder_mode()
    home.make_folders()
    home.job(job).mkdir(mode=mode, exist_ok=True)
    packed = io.BytesIO(data)
    target = Path(tempfile.mkdtemp(prefix=".unpacking-", dir=home.job(job)))
    try:
        unpack(packed, target / "files", most_bytes=MAX_BYTES, most_files=MAX_FILES)
        if uid is not None:
            give_tree(target / "files", uid)
        (target / "files").rename(place)
    finally:
        shutil.rmtree(target, ignore_errors=True)
    return place


def set_aside(home: Home, job: str) -> None:
    """Rename what is here of an earlier job with the number of a job that starts for the first time. Blocks."""
    for found in (home.snapshot(job), home.checkpoints(job)):
        if has_files(found):
            found.rename(found.with_name(f"{found.name}-before-{time.time_ns()}"))
