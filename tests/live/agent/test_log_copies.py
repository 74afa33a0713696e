"""Logs are copied in turns: a large one keeps no other job's log or end back."""

import asyncio

from carpool.live.agent.log_copies import A_TURN, CHUNK, LogCopies
from carpool.live.agent.parts import NodePart, NodeParts
from carpool.live.executors.base import GangEnded, GangOutcome

LARGE, SMALL = ("1", 1), ("2", 1)


class CountingRoad:
    """A service that takes every piece."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}

    def send_log(self, data, *, job, offset, **_):
        assert offset == self.sizes.get(job, 0)
        self.sizes[job] = offset + len(data)
        return self.sizes[job]


async def test_a_large_log_keeps_no_other_log_back_and_its_job_ends_when_it_is_copied(home):
    home.create()
    for key, size in ((LARGE, 5 * A_TURN * CHUNK + 7), (SMALL, 3)):
        home.rank(*key, 0).mkdir(parents=True)
        (home.rank(*key, 0) / "stdout.log").write_bytes(b"x" * size)
    road, parts = CountingRoad(), NodeParts(lambda: None)
    at_end: dict[str, int] = {}
    copies = LogCopies(home, road, parts, lambda: at_end.update(_newly(parts, road, at_end)))
    for key in (LARGE, SMALL):
        parts.parts[key] = NodePart(key, ended=GangEnded(*key, GangOutcome.FINISHED))
    running = asyncio.create_task(copies.run())
    async with asyncio.timeout(20):
        while not all(part.logged for part in parts.parts.values()):
            await asyncio.sleep(0.01)
    running.cancel()
    assert at_end["2"] == A_TURN * CHUNK, "the large log had had one turn"
    assert at_end["1"] == 5 * A_TURN * CHUNK + 7, "all of it is there when the end is reported"


def _newly(parts: NodeParts, road: CountingRoad, known: dict[str, int]) -> dict[str, int]:
    """Return how much of the large log was copied, for each job whose end may be reported now."""
    return {key[0]: road.sizes["1"] for key, part in parts.parts.items() if part.logged and key[0] not in known}
