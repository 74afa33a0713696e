"""Attack a real service from outside: requests, archives, jobs, processes, signals and faults.

`python -m tests.attack.outside` (as root: a service of root with two users and one of a plain user; otherwise the
latter only). `--short` runs the cases that `make test` runs, `--list` prints the table. Every case says what was tried
and what had to hold. Exit code 1: something did not hold.
"""

import argparse
import os
import subprocess
import sys
import time
import traceback

from tests.attack import browsers, faults, requests, tenants, terminals, workers
from tests.attack.case import BOTH, CASES, Case
from tests.attack.world import ROOT, World

assert all((browsers, faults, requests, tenants, terminals, workers)), "they fill the table"


def chosen(where: str, short: bool, only: str | None = None) -> list[Case]:
    """Return the cases for a service of `root` or of a `plain` user."""
    cases = [one for one in CASES if one.where in (BOTH, where)]
    return [one for one in cases if (one.short or not short) and only in (None, one.name)]


def grouped(cases: list[Case]) -> list[list[Case]]:
    """Return the cases in groups that share a service: starting one takes longer than most cases."""
    groups: dict[object, list[Case]] = {}
    for one in cases:
        groups.setdefault(one.name if one.fresh else one.own, []).append(one)
    return list(groups.values())


def attack(where: str, cases: list[Case]) -> list[str]:
    """Run cases, and return what did not hold."""
    broken = []
    for group in grouped(cases):
        world = World(where == "root", *(group[0].own or ()))
        try:
            for one in group:
                began = time.monotonic()
                try:
                    world.serve_if_needed()
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
    if given.only not in (None, *(one.name for one in CASES)):
        arguments.error(f"--only {given.only}: there is no such case; --list names them")
    if given.list:
        for one in CASES:
            print(f"{one.where:5} {'short' if one.short else '':5} {one.name}: {one.tried}: {one.holds}")
        return 0
    if given.where is None and os.getuid() == 0:  # both at once: cases often wait
        command = [sys.executable, "-m", "tests.attack.outside", *sys.argv[1:]]
        both = [subprocess.Popen([*command, "--where", where], cwd=ROOT) for where in ("root", "plain")]
        codes = [one.wait() for one in both]
        return int(any(codes))
    where = given.where or "plain"
    cases = chosen(where, given.short, given.only)
    broken = attack(where, cases)
    print("\n".join(broken) if broken else f"{where}: everything holds in {len(cases)} cases")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
