"""Looking at files with the rights of another user, for a service of root.

What root reads for a user, that user must be allowed to read: even a hash tells whether a guess at a file's content is
right. The kernel keeps the rights to files for each thread, so a thread that takes those of a user does the work and
ends. Nothing has to be given back, and no other thread notices. The estimator calls this for the scripts of jobs.
"""

import ctypes
import os
import platform
from collections.abc import Callable
from threading import Thread
from typing import TypeVar

from carpool.live.accounts import account

_SYS_SETGROUPS = {"x86_64": 116, "aarch64": 159, "riscv64": 159, "loongarch64": 159, "ppc64le": 81, "s390x": 206}
"""Number of the system call by machine. The C library's function of that name changes all threads."""
_Result = TypeVar("_Result")


def with_rights_of(uid: int | None, work: Callable[[], _Result]) -> _Result:
    """Return what `work` returns, called with a user's rights to files; None: with those of this process. Blocks.

    Raise OSError where the rights cannot be taken. `work` runs in another thread if the user is another one.
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

    thread = Thread(target=run, name=f"uid {uid}")
    thread.start()
    thread.join()
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
