"""Looking at files with the rights of another user, and giving files to one, for a service of root.

Root must read for a user only what that user may read: even a hash shows whether a guess at a file's content is right.
The kernel keeps the rights to files for each thread, so a thread that takes those of a user does the work and ends.
Nothing has to be given back, and no other thread is affected. The estimator calls this for the scripts of jobs.
"""

import ctypes
import os
import platform
from collections.abc import Callable
from pathlib import Path
from threading import Lock, Thread
from typing import TypeVar

from carpool.live.accounts import account

_SYS_SETGROUPS = {"x86_64": 116, "aarch64": 159, "riscv64": 159, "loongarch64": 159, "ppc64le": 81, "s390x": 206}
"""Number of the system call by machine. The C library's function of that name changes all threads."""
LONGEST_LOOK_S = 5.0
"""Seconds after which a file system that does not answer is given up."""
MOST_UNANSWERED = 16
"""Number of threads for one user that may wait for an answer: one that is given up stays until it gets one."""
_Result = TypeVar("_Result")
_lock = Lock()
_unanswered: dict[int, int] = {}
"""Looks that are under way, by uid."""


def with_rights_of(uid: int | None, work: Callable[[], _Result], limit_s: float = LONGEST_LOOK_S) -> _Result:
    """Return what `work` returns, called with a user's rights to files; None: with those of this process. Blocks.

    Raise OSError where the rights cannot be taken, or the files do not answer in time.
    `work` runs in another thread if the user is another one.
    """
    if uid is None or uid == os.getuid():
        return work()
    owner = account(uid)
    groups = os.getgrouplist(owner.pw_name, owner.pw_gid)
    results: list[_Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            _take_rights(owner.pw_uid, owner.pw_gid, groups)
            results.append(work())
        except BaseException as error:
            errors.append(error)
        finally:
            with _lock:
                _unanswered[uid] -= 1

    thread = Thread(target=run, name=f"uid {uid}", daemon=True)
    with _lock:
        if _unanswered.get(uid, 0) >= MOST_UNANSWERED:
            raise TimeoutError(f"the files of uid {uid} do not answer")
        _unanswered[uid] = _unanswered.get(uid, 0) + 1
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        raise TimeoutError(f"the files of uid {uid} do not answer")
    if errors:
        raise errors[0]
    return results[0]


def _take_rights(uid: int, gid: int, groups: list[int]) -> None:
    """Take a user's rights to files for the rest of this thread. Raise OSError if that fails."""
    libc, call = ctypes.CDLL(None, use_errno=True), _SYS_SETGROUPS.get(platform.machine())
    array = (ctypes.c_uint32 * len(groups))(*groups)
    if call is None or libc.syscall(ctypes.c_long(call), ctypes.c_long(len(groups)), array) != 0:
        raise OSError(ctypes.get_errno(), "the groups of a user cannot be taken")
    for take, number in ((libc.setfsgid, gid), (libc.setfsuid, uid)):  # the last one gives up root's privileges
        take(ctypes.c_uint32(number))
        if take(ctypes.c_uint32(2**32 - 1)) != number:  # an invalid id changes nothing and returns the present one
            raise OSError("the rights of a user cannot be taken")


def give_tree(path: Path, uid: int) -> None:
    """Give everything below a directory, and itself, to a user.

    It must be in a folder that only the service can enter: a user who owns a part of the tree could put a link in place
    of a folder, and what is below that would be given away.
    """
    owner = account(uid)
    os.chown(path, owner.pw_uid, owner.pw_gid, follow_symlinks=False)
    for folder, folders, files in os.walk(path):
        for name in (*folders, *files):  # a link to a folder counts as a folder, which is not entered
            os.chown(os.path.join(folder, name), owner.pw_uid, owner.pw_gid, follow_symlinks=False)
