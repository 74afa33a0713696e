"""Attack a real service from outside: requests, archives, jobs, processes, signals and faults.

`python -m tests.attack.outside` (as root: a service of root with two users, then one of a plain user; otherwise the
latter only). `--short` runs the cases that `make test` runs, `--list` prints the table. Every case says what was tried
and what had to hold. Exit code 1: something did not hold.
"""

import argparse
import os
import sys
import time
import traceback

from tests.attack import faults, requests, workers
from tests.attack.case import BOTH, CASES, Case
from tests.attack.world import World

assert all((faults, requests, workers)), "they fill the table"


def chosen(where: str, short: bool, only: str | None = None) -> list[Case]:
    """Return the cases for a service of `root` or of a `plain` user."""
    cases = [one for one in CASES if one.where in (BOTH, where)]
    return [one for one in cases if (one.short or not short) and only in (None, one.name)]


def attack(where: str, cases: list[Case]) -> list[str]:
    """Run cases, those that share a service first; return what did not hold."""
    broken = []
    shared = [one for one in cases if one.own is None]
    for group in ([shared] if shared else []) + [[one] for one in cases if one.own is not None]:
        world = World(where == "root", *(group[0].own or ()))
        try:
            world.serve()
            for one in group:
                began = time.monotonic()
                try:
                    one.run(world)
                    verdict = "holds "
                except Exception as error:
                    verdict = "BROKEN"
                    broken.append(f"{where}: {one.name}: {one.holds}: {error}")
                    print(broken[-1])
                    if not isinstance(error, AssertionError):
                        traceback.print_exc()
                print(f"{verdict} {where:5} {time.monotonic() - began:5.1f} s  {one.tried}: {one.holds}", flush=True)
        finally:
            world.close()
    return broken


def main() -> int:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--short", action="store_true")
    arguments.add_argument("--list", action="store_true")
    arguments.add_argument("--only")
    arguments.add_argument("--where", choices=["root", "plain"])
    given = arguments.parse_args()
    if given.list:
        for one in CASES:
            print(f"{one.where:5} {'short' if one.short else '':5} {one.name}: {one.tried}: {one.holds}")
        return 0
    places = [given.where] if given.where else ["root", "plain"] if os.getuid() == 0 else ["plain"]
    broken = []
    for where in places:
        broken += attack(where, chosen(where, given.short, given.only))
    print("\n".join(broken) if broken else "everything holds")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
