"""What a case of the outside suite is, and the table of all of them."""

from collections.abc import Callable
from dataclasses import dataclass

from tests.attack.world import World

BOTH, ROOT_ONLY, PLAIN_ONLY = "both", "root", "plain"


@dataclass(frozen=True)
class Case:
    """One attack."""

    name: str
    run: Callable[[World], None]
    tried: str
    holds: str
    where: str = BOTH
    """Which services it attacks: those of root, of a plain user, or both."""
    short: bool = False
    """Whether `make test` runs it, too."""
    own: tuple[str, ...] | None = None
    """Options of the service, which is shared with all cases that have the same ones. The case may kill and start the
    service, and leaves one that runs; None: it leaves the service as it is."""
    fresh: bool = False
    """Whether it needs a home that no other case has used, or leaves one that no other can use."""


CASES: list[Case] = []


def case(tried: str, holds: str, **more: object) -> Callable[[Callable[[World], None]], Callable[[World], None]]:
    """Add a function to the table: what it tries, and what has to hold then."""

    def add(run: Callable[[World], None]) -> Callable[[World], None]:
        CASES.append(Case(run.__name__, run, tried, holds, **more))  # type: ignore[arg-type]
        return run

    return add
