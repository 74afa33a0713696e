"""The tests that every executor must pass. A package with an executor of its own imports and runs them with pytest.

Derive a test class from `ExecutorContract` and give it a fixture `make_executor`: a function that returns a new
executor on the same nodes and files each time, as after a restart of the service. One node needs at least two GPUs:

    import pytest

    from carpool.live.executors.base import ExecutorOptions
    from carpool.live.executors.contract import ExecutorContract
    from carpool.live.executors.kubernetes import KubernetesExecutor
    from carpool.live.home import Home


    class TestKubernetesExecutor(ExecutorContract):
        @pytest.fixture
        def make_executor(self, tmp_path):
            home = Home(tmp_path / "home")
            home.create()
            return lambda: KubernetesExecutor(ExecutorOptions(home))

The tests are coroutines: pytest-asyncio must be installed, with the setting `asyncio_mode = "auto"`, which Carpool's
own `pyproject.toml` has. Call `pytest.register_assert_rewrite("carpool.live.executors.contract")` in `conftest.py` for
detailed failures. An executor whose nodes have no shell or no Carpool overrides the methods that return commands.
"""

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import carpool
from carpool.core.model import GpuId
from carpool.live.executors.base import (
    Executor,
    GangEnded,
    GangKey,
    GangOutcome,
    Launch,
    NodeFault,
    StopMode,
)

TIMEOUT_S = 60.0
"""Seconds after which something that should happen counts as missing."""
QUIET_S = 0.5
"""Seconds of waiting for something that should not happen."""
LIMIT = 1 << 20
SAVING_WORKER = """
import os, sys, time
from carpool.channel import EXIT_STOPPED, ControlReader, Report, ReportWriter, WorkerStatus
folder, attempt = os.environ["CARPOOL_WORKER_DIR"], int(os.environ["CARPOOL_ATTEMPT"])
reader, writer = ControlReader(folder), ReportWriter(folder)
while True:
    control = reader.read()
    if control.stop:
        time.sleep(float(sys.argv[2]))
        writer.write(Report(attempt=attempt, checkpoint=int(sys.argv[1]), status=WorkerStatus.STOPPED))
        sys.exit(EXIT_STOPPED)
    saved = int(sys.argv[1]) if control.checkpoint else -1
    writer.write(Report(attempt=attempt, accumulation=control.accumulation, checkpoint=saved))
    time.sleep(0.02)
"""


@dataclass
class RecordingListener:
    """An `ExecutorListener` that remembers every call."""

    started: list[GangKey] = field(default_factory=list)
    switched: list[tuple[GangKey, bool]] = field(default_factory=list)
    """Gangs that were paused (True) or resumed (False)."""
    swapped: dict[GangKey, bool] = field(default_factory=dict)
    """Whether the last pause of a gang moved its memory to main memory."""
    ended: list[GangEnded] = field(default_factory=list)
    faults: list[NodeFault] = field(default_factory=list)
    memory: list[tuple[GpuId, int]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    """Those of the notes that tell of a problem."""
    present_at_end: list[bool] = field(default_factory=list)
    """Whether a gang was still present when its end was reported."""
    executor: Executor | None = None
    found: Collection[GangKey] = ()
    """Gangs that `recover` found."""

    def gang_started(self, key: GangKey, started_at: float | None = None) -> None:
        self.started.append(key)

    def gang_paused(self, key: GangKey, *, swapped: bool = False) -> None:
        self.switched.append((key, True))
        self.swapped[key] = swapped

    def gang_resumed(self, key: GangKey) -> None:
        self.switched.append((key, False))

    def gang_ended(self, ended: GangEnded) -> None:
        self.ended.append(ended)
        self.present_at_end.append(self.executor is not None and ended.key in self.executor.present())

    def node_fault(self, fault: NodeFault) -> None:
        self.faults.append(fault)

    def memory_taken(self, gpu: GpuId, memory: int) -> None:
        self.memory.append((gpu, memory))

    def nodes_changed(self) -> None:
        return

    def note(self, text: str, level: int = logging.WARNING) -> None:
        self.notes.append(text)
        self.warnings += [text] if level >= logging.WARNING else []

    async def wait_for_start(self, key: GangKey) -> None:
        await eventually(lambda: key in self.started)

    async def wait_for_switch(self, key: GangKey, *, paused: bool) -> None:
        """Wait for the next confirmation, and forget it."""
        await eventually(lambda: bool(self.switched))
        assert self.switched.pop(0) == (key, paused)

    async def wait_for_end(self, key: GangKey) -> GangEnded:
        await eventually(lambda: any(ended.key == key for ended in self.ended))
        return next(ended for ended in self.ended if ended.key == key)


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds; raise `TimeoutError` if it never does."""
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.02)


MakeExecutor = Callable[[], Executor]


@asynccontextmanager
async def opened(
    make_executor: MakeExecutor, known: Iterable[GangKey] = (), *, leave_gangs: bool = False
) -> AsyncIterator[tuple[Executor, RecordingListener]]:
    """Open an executor and close it at the end, as a service does. Gangs are killed first unless `leave_gangs`."""
    executor = make_executor()
    listener = RecordingListener(executor=executor)
    await executor.open()
    listener.found = await executor.recover(known, listener)
    try:
        yield executor, listener
        if not leave_gangs:
            for key in list(executor.present()):
                executor.stop(key, StopMode.KILL)
            await eventually(lambda: not executor.present())
    finally:
        await executor.close()


class ExecutorContract:
    """The contract of `carpool.live.executors.base.Executor`, as tests."""

    computes = True
    """Whether gangs really run, so that a paused one can be seen to stand still."""

    # ---- commands that a subclass may replace -----------------------------------------------------------------------

    def command(self, *, output: str = "", exit_code: int | None = None) -> tuple[str, ...]:
        """Return a command that prints `output` and ends with `exit_code`; None: it runs for ten minutes."""
        then = "sleep 600" if exit_code is None else f"exit {exit_code}"
        return "sh", "-c", f"printf '%s' '{output}'; {then}"

    def writing_command(self) -> tuple[str, ...]:
        """Return a command that keeps writing to its standard output for ten minutes."""
        return "sh", "-c", "i=0; while [ $i -lt 12000 ]; do i=$((i + 1)); echo $i; sleep 0.05; done"

    def saving_command(self, checkpoint: int, seconds: float = 0.0) -> tuple[str, ...]:
        """Return a command that reports its accumulation and saves `checkpoint` when it is asked to stop, which takes
        some seconds."""
        return sys.executable, "-c", SAVING_WORKER, str(checkpoint), str(seconds)

    def failing_rank_command(self, exit_code: int) -> tuple[str, ...]:
        """Return a command whose rank 1 ends with `exit_code` while the other ranks keep running."""
        return "sh", "-c", f'test "$RANK" = 1 && exit {exit_code}; sleep 600'

    def missing_command(self) -> tuple[str, ...]:
        """Return a command that does not exist."""
        return ("/no/such/program",)

    def launch(
        self, executor: Executor, command: tuple[str, ...], *, job: str = "1", attempt: int = 1, gpus: int = 1
    ) -> Launch:
        """Return a launch on the first `gpus` GPUs of the largest node."""
        node = max(executor.nodes(), key=lambda node: len(node.slots))
        chosen = tuple(slot.id for slot in node.slots[:gpus])
        env = {"PYTHONPATH": str(Path(carpool.__file__).parents[1])}
        return Launch(job, attempt, chosen, command, "/", env, grace_s=5.0)

    # ---- nodes ------------------------------------------------------------------------------------------------------

    async def test_nodes_have_unique_ids_that_survive_a_restart(self, make_executor: MakeExecutor) -> None:
        async with opened(make_executor) as (executor, _):
            before = executor.nodes()
            gpus = [slot.id for node in before for slot in node.slots]
            assert len({node.id for node in before}) == len(before) > 0
            assert len(set(gpus)) == len(gpus)
            assert max(len(node.slots) for node in before) >= 2, "the contract needs two GPUs on one node"
            assert all(slot.node == node.id for node in before for slot in node.slots)
        async with opened(make_executor) as (executor, _):
            assert [node.node for node in executor.nodes()] == [node.node for node in before]

    # ---- starting and ending ----------------------------------------------------------------------------------------

    async def test_a_gang_is_present_from_its_launch_until_its_end(self, make_executor: MakeExecutor) -> None:
        async with opened(make_executor) as (executor, listener):
            launch = self.launch(executor, self.command(), gpus=2)
            executor.launch(launch)
            assert dict(executor.present()) == {launch.key: launch.gpus}
            await listener.wait_for_start(launch.key)
            assert launch.key in executor.present()
            executor.stop(launch.key, StopMode.KILL)
            await listener.wait_for_end(launch.key)
            assert executor.present() == {}
            assert listener.present_at_end == [False]

    async def test_a_gang_starts_whole_and_finishes(self, make_executor: MakeExecutor) -> None:
        async with opened(make_executor) as (executor, listener):
            launch = self.launch(executor, self.command(exit_code=0), gpus=2)
            executor.launch(launch)
            ended = await listener.wait_for_end(launch.key)
            assert (ended.outcome, ended.exit_code) == (GangOutcome.FINISHED, 0)
            assert listener.started == [launch.key]
            assert [row["rank"] for row in executor.ranks(launch.key)] == [0, 1]
            assert [row["exit_code"] for row in executor.ranks(launch.key)] == [0, 0]

    async def test_an_exit_code_is_reported_and_kept(self, make_executor: MakeExecutor) -> None:
        async with opened(make_executor) as (executor, listener):
            launch = self.launch(executor, self.command(exit_code=3))
            executor.launch(launch)
            ended = await listener.wait_for_end(launch.key)
            assert (ended.outcome, ended.exit_code) == (GangOutcome.FAILED, 3)
            assert ended.reason
            assert executor.exit_code(launch.key) == 3
        async with opened(make_executor) as (executor, _):
            assert executor.exit_code(launch.key) == 3
            assert executor.exit_code(("99", 1)) is None

    async def test_a_worker_that_fails_ends_its_gang(self, make_executor: MakeExecutor) -> None:
        async with opened(make_executor) as (executor, listener):
            launch = self.launch(executor, self.failing_rank_command(7), gpus=2)
            executor.launch(launch)
            ended = await listener.wait_for_end(launch.key)
            assert (ended.outcome, ended.exit_code) == (GangOutcome.FAILED, 7)

    async def test_a_command_that_cannot_run_is_a_failure(self, make_executor: MakeExecutor) -> None:
        async with opened(make_executor) as (executor, listener):
            launch = self.launch(executor, self.missing_command())
            executor.launch(launch)
            ended = await listener.wait_for_end(launch.key)
            assert ended.outcome is GangOutcome.FAILED
            assert ended.exit_code

    async def test_each_end_is_reported_exactly_once(self, make_executor: MakeExecutor) -> None:
        async with opened(make_executor) as (executor, listener):
            launches = [self.launch(executor, self.command(exit_code=code), job=str(code + 1)) for code in (0, 1, 2)]
            for launch in launches:
                executor.launch(launch)
            for launch in launches:
                await listener.wait_for_end(launch.key)
            await asyncio.sleep(QUIET_S)
            assert sorted(ended.key for ended in listener.ended) == [launch.key for launch in launches]

    # ---- stopping and retuning --------------------------------------------------------------------------------------

    async def test_every_mode_stops_a_gang(self, make_executor: MakeExecutor) -> None:
        async with opened(make_executor) as (executor, listener):
            for number, mode in enumerate(StopMode, 1):
                launch = self.launch(executor, self.command(), job=str(number), gpus=2)
                executor.launch(launch)
                await listener.wait_for_start(launch.key)
                assert executor.stop(launch.key, mode)
                ended = await listener.wait_for_end(launch.key)
                assert ended.outcome is GangOutcome.STOPPED

    async def test_a_gang_that_can_save_reports_its_checkpoint(self, make_executor: MakeExecutor) -> None:
        async with opened(make_executor) as (executor, listener):
            launch = self.launch(executor, self.saving_command(42))
            executor.launch(launch)
            await eventually(lambda: executor.report(launch.key) is not None)
            executor.stop(launch.key, StopMode.SAVE)
            ended = await listener.wait_for_end(launch.key)
            assert (ended.outcome, ended.checkpoint) == (GangOutcome.STOPPED, 42.0)

    async def test_a_gang_that_is_asked_again_while_it_saves_goes_on_saving(self, make_executor: MakeExecutor) -> None:
        async with opened(make_executor) as (executor, listener):
            launch = self.launch(executor, self.saving_command(42, 2.0))
            executor.launch(launch)
            await eventually(lambda: executor.report(launch.key) is not None)
            for _ in range(3):
                executor.stop(launch.key, StopMode.SAVE)
                await asyncio.sleep(QUIET_S / 2)
            ended = await listener.wait_for_end(launch.key)
            assert (ended.outcome, ended.checkpoint) == (GangOutcome.STOPPED, 42.0)

    async def test_stopping_again_is_harmless(self, make_executor: MakeExecutor) -> None:
        async with opened(make_executor) as (executor, listener):
            launch = self.launch(executor, self.command())
            assert not executor.stop(launch.key, StopMode.SAVE)
            executor.launch(launch)
            await listener.wait_for_start(launch.key)
            for mode in (StopMode.SAVE, StopMode.SAVE, StopMode.TERMINATE, StopMode.KILL):
                executor.stop(launch.key, mode)
            await listener.wait_for_end(launch.key)
            assert not executor.stop(launch.key, StopMode.KILL)
            await asyncio.sleep(QUIET_S)
            assert len(listener.ended) == 1

    async def test_a_gang_that_is_stopped_at_once_ends_once(self, make_executor: MakeExecutor) -> None:
        async with opened(make_executor) as (executor, listener):
            launch = self.launch(executor, self.command())
            executor.launch(launch)
            executor.stop(launch.key, StopMode.SAVE)
            ended = await listener.wait_for_end(launch.key)
            expected = GangOutcome.STOPPED if listener.started else GangOutcome.NEVER_STARTED
            assert ended.outcome is expected
            await asyncio.sleep(QUIET_S)
            assert len(listener.ended) == 1
            assert executor.present() == {}

    async def test_a_retuned_gang_reports_the_new_accumulation(self, make_executor: MakeExecutor) -> None:
        def accumulation(executor: Executor) -> int | None:
            report = executor.report(launch.key)
            return report.accumulation if report is not None else None

        async with opened(make_executor) as (executor, _):
            launch = self.launch(executor, self.saving_command(1))
            executor.launch(launch)
            await eventually(lambda: accumulation(executor) == 1)
            executor.retune(launch.key, 4)
            await eventually(lambda: accumulation(executor) == 4)
            executor.retune(("99", 1), 2)

    async def test_a_gang_that_is_asked_for_a_checkpoint_saves_and_goes_on(self, make_executor: MakeExecutor) -> None:
        def saved(executor: Executor) -> int | None:
            report = executor.report(launch.key)
            return report.checkpoint if report is not None else None

        async with opened(make_executor) as (executor, listener):
            launch = self.launch(executor, self.saving_command(42))
            executor.launch(launch)
            await eventually(lambda: saved(executor) == -1)
            executor.checkpoint(launch.key)
            await eventually(lambda: saved(executor) == 42)
            executor.checkpoint(("99", 1))
            assert listener.ended == []

    # ---- pausing and resuming ---------------------------------------------------------------------------------------

    async def written(self, executor: Executor, key: GangKey) -> list[int]:
        """Return how much each worker of a gang of two has written."""
        return [len((await executor.read_log(key, rank, "stdout", limit=LIMIT)).data) for rank in (0, 1)]

    async def assert_stands(self, executor: Executor, key: GangKey) -> None:
        before = await self.written(executor, key)
        await asyncio.sleep(QUIET_S / 2)
        assert await self.written(executor, key) == before
        assert not self.computes or all(before)

    async def assert_runs(self, executor: Executor, key: GangKey) -> None:
        before = await self.written(executor, key)
        async with asyncio.timeout(TIMEOUT_S):
            while self.computes and not all(
                now > then for now, then in zip(await self.written(executor, key), before, strict=True)
            ):
                await asyncio.sleep(0.02)

    async def test_a_paused_gang_stands_still_and_goes_on(self, make_executor: MakeExecutor) -> None:
        async with opened(make_executor) as (executor, listener):
            launch = self.launch(executor, self.writing_command(), gpus=2)
            executor.launch(launch)
            await listener.wait_for_start(launch.key)
            await self.assert_runs(executor, launch.key)
            for _ in range(2):
                executor.pause(launch.key)
                await listener.wait_for_switch(launch.key, paused=True)
                await self.assert_stands(executor, launch.key)
                assert launch.key in executor.present()
                executor.resume(launch.key)
                await listener.wait_for_switch(launch.key, paused=False)
                await self.assert_runs(executor, launch.key)

    async def test_pausing_again_is_harmless_and_the_latest_request_counts(self, make_executor: MakeExecutor) -> None:
        async with opened(make_executor) as (executor, listener):
            launch = self.launch(executor, self.writing_command(), gpus=2)
            executor.pause(launch.key)
            executor.resume(launch.key)
            executor.launch(launch)
            await listener.wait_for_start(launch.key)
            executor.resume(launch.key)
            await listener.wait_for_switch(launch.key, paused=False)
            executor.pause(launch.key)
            executor.pause(launch.key)
            await listener.wait_for_switch(launch.key, paused=True)
            executor.pause(launch.key)
            await eventually(lambda: bool(listener.switched))
            assert set(listener.switched) == {(launch.key, True)}
            for paused in (False, True, False):
                (executor.pause if paused else executor.resume)(launch.key)
            await eventually(lambda: listener.switched[-1] == (launch.key, False))
            await self.assert_runs(executor, launch.key)

    async def test_every_mode_stops_a_paused_gang(self, make_executor: MakeExecutor) -> None:
        async with opened(make_executor) as (executor, listener):
            for number, mode in enumerate(StopMode, 1):
                launch = self.launch(executor, self.command(), job=str(number), gpus=2)
                executor.launch(launch)
                await listener.wait_for_start(launch.key)
                executor.pause(launch.key)
                await listener.wait_for_switch(launch.key, paused=True)
                assert executor.stop(launch.key, mode)
                assert (await listener.wait_for_end(launch.key)).outcome is GangOutcome.STOPPED
                executor.resume(launch.key)

    async def test_a_paused_gang_that_is_stopped_saves(self, make_executor: MakeExecutor) -> None:
        async with opened(make_executor) as (executor, listener):
            launch = self.launch(executor, self.saving_command(42))
            executor.launch(launch)
            await eventually(lambda: executor.report(launch.key) is not None)
            executor.pause(launch.key)
            await listener.wait_for_switch(launch.key, paused=True)
            executor.stop(launch.key, StopMode.SAVE)
            ended = await listener.wait_for_end(launch.key)
            assert (ended.outcome, ended.checkpoint) == (GangOutcome.STOPPED, 42.0)

    async def test_a_paused_gang_is_found_paused_again(self, make_executor: MakeExecutor) -> None:
        async with opened(make_executor, leave_gangs=True) as (executor, listener):
            launch = self.launch(executor, self.writing_command(), gpus=2)
            executor.launch(launch)
            await listener.wait_for_start(launch.key)
            await self.assert_runs(executor, launch.key)
            executor.pause(launch.key)
            await listener.wait_for_switch(launch.key, paused=True)
        async with opened(make_executor, [launch.key], leave_gangs=True) as (executor, listener):
            await self.assert_stands(executor, launch.key)
            executor.pause(launch.key)
            await listener.wait_for_switch(launch.key, paused=True)
            await self.assert_stands(executor, launch.key)
        async with opened(make_executor, [launch.key]) as (executor, listener):
            executor.resume(launch.key)
            await listener.wait_for_switch(launch.key, paused=False)
            await self.assert_runs(executor, launch.key)

    # ---- restarts ---------------------------------------------------------------------------------------------------

    async def test_a_running_gang_is_found_again(self, make_executor: MakeExecutor) -> None:
        async with opened(make_executor, leave_gangs=True) as (executor, listener):
            launch = self.launch(executor, self.command(), gpus=2)
            executor.launch(launch)
            await listener.wait_for_start(launch.key)
        assert listener.ended == []
        async with opened(make_executor, [launch.key]) as (executor, listener):
            assert listener.started == [launch.key]
            assert set(listener.found) == {launch.key}
            assert dict(executor.present()) == {launch.key: launch.gpus}
            executor.stop(launch.key, StopMode.TERMINATE)
            ended = await listener.wait_for_end(launch.key)
            assert ended.outcome is GangOutcome.STOPPED

    async def test_an_end_is_reported_again_after_a_restart(self, make_executor: MakeExecutor) -> None:
        """The service may have died before it wrote the end down."""
        async with opened(make_executor) as (executor, listener):
            launch = self.launch(executor, self.command(exit_code=5))
            executor.launch(launch)
            await listener.wait_for_end(launch.key)
        async with opened(make_executor, [launch.key]) as (executor, listener):
            assert set(listener.found) == {launch.key}, "a gang that ended is found, so it is not launched again"
            ended = await listener.wait_for_end(launch.key)
            assert (ended.outcome, ended.exit_code) == (GangOutcome.FAILED, 5)
            await asyncio.sleep(QUIET_S)
            assert len(listener.ended) == 1
            assert executor.present() == {}

    async def test_gangs_that_the_service_does_not_know_are_killed(self, make_executor: MakeExecutor) -> None:
        async def written(executor: Executor) -> int:
            return (await executor.read_log(launch.key, 0, "stdout", limit=LIMIT)).next

        async with opened(make_executor, leave_gangs=True) as (executor, listener):
            launch = self.launch(executor, self.writing_command())
            executor.launch(launch)
            async with asyncio.timeout(TIMEOUT_S):
                while not await written(executor):
                    await asyncio.sleep(0.02)
        async with opened(make_executor) as (executor, listener):
            assert executor.present() == {}
            before = await written(executor)
            await asyncio.sleep(QUIET_S)
            assert await written(executor) == before, "the worker still writes"
            assert (listener.started, listener.ended) == ([], [])

    async def test_a_known_gang_that_never_started_is_not_reported(self, make_executor: MakeExecutor) -> None:
        async with opened(make_executor, [("1", 1)]) as (executor, listener):
            assert executor.present() == {}
            assert not listener.found
            await asyncio.sleep(QUIET_S)
            assert (listener.started, listener.ended) == ([], [])
            executor.launch(self.launch(executor, self.command(exit_code=0)))
            await listener.wait_for_end(("1", 1))

    async def test_attempts_of_a_job_are_separate(self, make_executor: MakeExecutor) -> None:
        async with opened(make_executor, leave_gangs=True) as (executor, listener):
            first = self.launch(executor, self.command(output="first", exit_code=1))
            executor.launch(first)
            await listener.wait_for_end(first.key)
            second = self.launch(executor, self.saving_command(1), attempt=2)
            executor.launch(second)
            await eventually(lambda: executor.report(second.key) is not None)
            assert executor.report(first.key) is None
            assert list(executor.present()) == [second.key]
            assert not executor.stop(first.key, StopMode.KILL)
        async with opened(make_executor, [second.key]) as (executor, listener):
            assert list(executor.present()) == [second.key]
            assert listener.started == [second.key]
            assert (await executor.read_log(first.key, 0, "stdout", limit=LIMIT)).data == b"first"

    # ---- logs -------------------------------------------------------------------------------------------------------

    async def test_logs_are_read_by_chunks_and_kept(self, make_executor: MakeExecutor) -> None:
        async def read(
            executor: Executor, rank: int = 0, stream: str = "stdout", **part: Any
        ) -> tuple[bytes, int, bool]:
            chunk = await executor.read_log(launch.key, rank, stream, **{"limit": LIMIT, **part})
            return chunk.data, chunk.next, chunk.last

        async with opened(make_executor) as (executor, listener):
            launch = self.launch(executor, self.command(output="one\ntwo\nthree\n", exit_code=0), gpus=2)
            assert await read(executor) == (b"", 0, True)
            executor.launch(launch)
            await listener.wait_for_end(launch.key)
            assert await read(executor) == (b"one\ntwo\nthree\n", 14, True)
            assert await read(executor, rank=1) == (b"one\ntwo\nthree\n", 14, True)
            assert await read(executor, limit=4) == (b"one\n", 4, False)
            assert await read(executor, offset=4, limit=4) == (b"two\n", 8, False)
            assert await read(executor, offset=100) == (b"", 14, True)
            assert await read(executor, tail=1) == (b"three\n", 14, True)
            assert await read(executor, tail=0) == (b"", 14, True)
            assert await read(executor, stream="stderr") == (b"", 0, True)
        async with opened(make_executor) as (executor, _):
            assert await read(executor) == (b"one\ntwo\nthree\n", 14, True)
