"""A local executor that runs one gang: for the tests of what it does with its processes."""

from contextlib import asynccontextmanager

from carpool.live.executors.base import ExecutorOptions, Launch
from carpool.live.executors.contract import RecordingListener
from carpool.live.executors.local import LocalExecutor

KEY = ("1", 1)
WRITING = ("sh", "-c", "while true; do echo x; sleep 0.02; done")


@asynccontextmanager
async def executing(home, command=WRITING, gpus=1, ahead=False, **options):
    """Open an executor with one slot or more and run the command on all, unless a gang of an earlier executor is there.

    The gang keeps running when the executor closes.
    """
    home.create()
    executor = LocalExecutor(ExecutorOptions(home, gpus=gpus, **options))
    listener = RecordingListener(executor=executor)
    await executor.open()
    await executor.recover([KEY], listener)
    if KEY not in executor.present():
        executor.launch(Launch(*KEY, tuple(range(gpus)), command, "/", {}, grace_s=5.0, ahead=ahead))
    await listener.wait_for_start(KEY)
    try:
        yield executor, listener
    finally:
        await executor.close()
