"""An executor that starts nothing and a clock that stands until it is set."""

from carpool.live.executors.base import How, Key, Launch, Listener


class FakeClock:
    def __init__(self, now: float = 0.0) -> None:
        self.time = now

    def now(self) -> float:
        return self.time


class FakeExecutor:
    """Remembers what it was told. Gangs are up and gone when the test says so."""

    def __init__(self) -> None:
        self.launched: list[Launch] = []
        self.stopped: list[tuple[Key, How]] = []
        self.gangs: dict[Key, tuple[int, ...]] = {}
        self.reports = {}
        self.listener: Listener

    def start(self, listener: Listener) -> None:
        self.listener = listener

    async def recover(self, known) -> None:
        return

    def launch(self, launch: Launch) -> None:
        self.launched.append(launch)
        self.gangs[launch.key] = tuple(slot.id for slot in launch.slots)

    def stop(self, key: Key, how: How) -> bool:
        self.stopped.append((key, how))
        return key in self.gangs

    def retune(self, key: Key, accumulation: int) -> None:
        return

    def present(self):
        return dict(self.gangs)

    def report(self, key: Key):
        return self.reports.get(key)

    def ranks(self, key: Key):
        return []

    async def close(self) -> None:
        return
