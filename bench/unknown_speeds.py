"""Measure how fast the trainings of `unknown_work.py` run on this GPU: alone, and in pairs.

    python bench/unknown_speeds.py --out speeds.json [--mps] [--pairs]

Every kind is started (twice with --pairs, because a kind may share with itself), watched as the service watches jobs,
and stopped. Then the processes in question go on for some seconds: their reports tell how fast they are. The file is
written after each measurement.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import combinations
from pathlib import Path

from unknown_work import KINDS

from carpool.channel import ENV_ATTEMPT, ENV_DIRECTORY, Report, read_report
from carpool.gpu import mps
from carpool.live.executors.environment import watch_python

ENDLESS = 10**8
WARM = 12
"""Steps after which a training is warm."""
SETTLE_S = 0.3
START_S = 120.0


class Process:
    """A training, stopped except while it is measured."""

    def __init__(self, kind: str, folder: Path, tiny: bool, variables: dict[str, str]) -> None:
        self.kind, self.folder, self.began, self.startup_s = kind, folder, time.time(), 0.0
        folder.mkdir()
        env = {**os.environ, **variables, ENV_DIRECTORY: str(folder), ENV_ATTEMPT: "1"}
        watch_python(env)
        with (folder / "log").open("wb") as log:
            command = [sys.executable, *KINDS[kind].command(ENDLESS, tiny)]
            self.process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def report(self) -> Report | None:
        if self.process.poll() is not None:
            lines = (self.folder / "log").read_text(errors="replace").strip().splitlines()
            raise SystemExit(f"{self.kind} ended: {' | '.join(lines[-3:])}")
        return read_report(self.folder)

    def warm(self) -> bool:
        report = self.report()
        if report is not None and report.iteration > 0 and not self.startup_s:
            self.startup_s = time.time() - self.began
        return report is not None and report.iteration >= WARM


def start(kinds: Sequence[str], folder: Path, tiny: bool, variables: dict[str, str]) -> list[Process]:
    """Start all, and stop each as soon as it is warm."""
    processes = [Process(kind, folder / str(number), tiny, variables) for number, kind in enumerate(kinds)]
    cold, until = list(processes), time.monotonic() + START_S
    while cold:
        if time.monotonic() > until:
            end(processes)
            raise SystemExit(f"{', '.join(one.kind for one in cold)}: did not begin to train in {START_S:.0f} s")
        for one in [one for one in cold if one.warm()]:
            one.process.send_signal(signal.SIGSTOP)
            cold.remove(one)
        time.sleep(0.05)
    return processes


def end(processes: Sequence[Process]) -> None:
    for one in processes:
        one.process.kill()
    for one in processes:
        one.process.wait()


def step_times(active: Sequence[Process], seconds: float) -> list[float]:
    """Return the seconds of a step of each process while all of them run."""
    for one in active:
        one.process.send_signal(signal.SIGCONT)
    time.sleep(SETTLE_S)
    begin = [one.report() for one in active]
    time.sleep(seconds)
    stop = [one.report() for one in active]
    for one in active:
        one.process.send_signal(signal.SIGSTOP)
    time.sleep(0.05)
    return [
        (b.time - a.time) / (b.iteration - a.iteration) if a and b and b.iteration > a.iteration else seconds
        for a, b in zip(begin, stop, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("speeds.json"))
    parser.add_argument("--mps", action="store_true", help="share by MPS; starts a daemon of its own")
    parser.add_argument("--pairs", action="store_true", help="measure all pairs, too")
    parser.add_argument("--tiny", action="store_true", help="tiny trainings, to try the script on a CPU")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--seconds", type=float, default=1.6, help="length of a measurement")
    options = parser.parse_args()
    found: dict[str, object] = {"mechanism": "mps" if options.mps else "time-slicing", "alone": {}, "pairs": []}

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cu-")))
        daemon = stack.enter_context(mps.Daemon(folder / "mps")) if options.mps else None
        kinds = [kind for kind in options.kinds for _ in range(2 if options.pairs else 1)]
        processes = start(kinds, folder, options.tiny, daemon.env() if daemon else {})
        stack.callback(end, processes)
        first = {one.kind: one for one in reversed(processes)}
        second = {one.kind: one for one in processes}
        found["startup_s"] = {kind: one.startup_s for kind, one in first.items()}
        for kind, one in first.items():
            found["alone"][kind] = step_times([one], 2 * options.seconds)[0]
            _write(options.out, found)
        pairs = [*combinations(first, 2), *((kind, kind) for kind in first)] if options.pairs else []
        for a, b in pairs:
            times = step_times([first[a], second[b]], options.seconds)
            found["pairs"].append([a, b, *times])
            _write(options.out, found)
    print(json.dumps(found["alone"], indent=1))


def _write(path: Path, found: dict[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
