"""A clock that stands still until a test sets it."""


class FakeClock:
    def __init__(self, now: float = 0.0) -> None:
        self.time = now

    def now(self) -> float:
        return self.time
