"""What tenants and operators do in chaos_outside.py, by the command line only, and whether the rules about them held.

One client is a user of a group with a cap. Its jobs are shell scripts, so that they run under any uid. Some of them
have a time limit far below what they compute, and some of these go on from where they were. An operator drains and
reserves GPUs for a few seconds. `tests/live/service/chaos_tenants.py` has the judges.
"""

import json
import os
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from carpool.core.model import Closure
from tests.live.service import chaos_tenants as judges

USER, GROUP, UID = "ann", "red", 7_000_401
LIMIT_S, GRACE_S = 1.0, 1.0
LATE_S = 1.0 + 2 * GRACE_S + 12.0
"""Seconds of services that are up in which a job at its limit, or on closed GPUs, must be gone: the pause between two
looks, the time to save and the time to leave, and what a busy machine adds."""
LIMITED, GOING_ON, SHORT = "limited", "going on", "shell"
ENDLESS_S = 120.0
WORKER = """
out=$1 name=$2 beats=$3 beat=$4 keeps=$5 n=0 kept="$CARPOOL_CHECKPOINT_DIR/done-$RANK"
me="$name.$CARPOOL_ARRAY_INDEX $CARPOOL_ATTEMPT $RANK $WORLD_SIZE $CARPOOL_GPUS $$ $PPID"
say() { echo "$1 $me $(date +%s.%N)" >> "$out"; }
[ "$keeps" ] && [ -s "$kept" ] && read n < "$kept"
say start
while [ "$n" -lt "$beats" ]; do
    sleep "$beat"; n=$((n + 1)); say beat
    [ "$keeps" ] && echo "$n" > "$kept"
done
say end
"""


def job(drawn: random.Random) -> tuple[str, float, list[str]]:
    """Return the kind of a job, how long it computes, and its options."""
    kind = drawn.choice([SHORT, SHORT, SHORT, GOING_ON, LIMITED])
    seconds = {SHORT: drawn.uniform(0.2, 1.0), GOING_ON: 2.5, LIMITED: ENDLESS_S}[kind]
    limit = [] if kind == SHORT else ["--limit", f"{LIMIT_S:g}s", *(["--requeue"] if kind == GOING_ON else [])]
    return kind, seconds, [*limit, "--grace", f"{GRACE_S:g}s", "--no-watch"]


@dataclass
class Operator:
    """Describes the group and its user, and drains and reserves GPUs."""

    world: Any
    drawn: random.Random
    gpus: int
    token: str = ""
    closed: list[judges.Closed] = field(default_factory=list)
    """What was closed for certain, and until when."""
    clearings: list[tuple[int, float, float]] = field(default_factory=list)
    """GPUs, and from when to when jobs there may have been asked to save and leave. A paused one goes on for that."""

    def describe(self) -> None:
        """Make the group and its user, before the first job."""
        cap = judges.CAPS[GROUP]
        for words in (["group", "set", GROUP, "--cap", str(cap), "--weight", "2"], ["group", "share", "0.5"]):
            found = self.world.carpool(*words)
            assert found.returncode == 0, found.stderr
        uid = ["--uid", str(UID)] if os.getuid() == 0 else []
        found = self.world.carpool("user", "add", USER, "--group", GROUP, *uid, "--json")
        assert found.returncode == 0, found.stderr
        self.token = json.loads(found.stdout)["token"]

    def run(self) -> None:
        while not self.world.done.is_set():
            time.sleep(self.drawn.uniform(1.0, 3.0))
            if self.world.is_up():
                self._close_for_a_while()
        while not self.open_all():
            time.sleep(0.2)

    def _close_for_a_while(self) -> None:
        gpu, soon = self.drawn.randrange(self.gpus), self.drawn.choice(["", "2s"])
        if self.drawn.random() < 0.6:
            words = ["drain", f"node0:{gpu}", *(["--at", soon] if soon else [])]
        else:
            words = ["reserve", f"node0:{gpu}", "--for", GROUP, "--to", "600s", *(["--from", soon] if soon else [])]
        self.clearings.append((gpu, time.time(), time.time() + 2.0 + LATE_S))
        found = self.world.carpool(*words, "--json")
        time.sleep(self.drawn.uniform(2.0, 20.0))
        until = time.time()
        while not self.open_all() and not self.world.done.is_set():
            time.sleep(0.1)
        if found.returncode == 0:
            said = json.loads(found.stdout)
            closure = Closure(
                said["name"], (gpu,), said["start"], None, said["group"], words[0] == "drain" and not soon
            )
            self.closed.append(judges.Closed(closure, until))

    def open_all(self) -> bool:
        """Take back what is closed, and return whether nothing is."""
        listed = self.world.carpool("reservations", "--json")
        if listed.returncode:
            return False
        rows = json.loads(listed.stdout)
        rows = rows["closures"] if isinstance(rows, dict) else rows
        for row in rows:
            self.world.carpool("undrain" if row["group"] is None else "unreserve", row["name"])
        return not rows


def read_runs(lines: Iterable[Sequence[str]], kinds: Mapping[str, str]) -> list[judges.Run]:
    """Return the workers that wrote into the ledger. `kinds`: those of tickets."""
    runs: dict[tuple[str, str, str], judges.Run] = {}
    for _, name, attempt, rank, _, gpu, _, _, at in lines:
        found = runs.get((name, attempt, rank))
        if found is None:
            kind = kinds.get(name.partition(".")[0], "")
            group = GROUP if kind in (SHORT, LIMITED, GOING_ON) else ""
            limit, slot = LIMIT_S if kind in (LIMITED, GOING_ON) else 0.0, int(gpu.rpartition(":")[2])
            found = runs[name, attempt, rank] = judges.Run(name, int(attempt), int(rank), slot, group, limit, [])
        found.times.append(float(at))
    return list(runs.values())


def judge(
    runs: Sequence[judges.Run], closed: Sequence[judges.Closed], uptime: judges.Uptime, beat_s: float
) -> list[str]:
    """Return which rules about tenants were broken."""
    broken = judges.judge_caps(runs)
    broken += judges.judge_limits(runs, uptime, beat_s, LATE_S) + judges.judge_cleared(runs, closed, uptime, LATE_S)
    for run in runs:
        for one in closed:
            closure, first = one.closure, run.times[0]
            if run.gpu in closure.gpus and run.group != closure.group and closure.start < first < one.until:
                late = uptime.between(closure.start, first)
                if late > LATE_S:
                    broken.append(f"{run.job} was started on GPU {run.gpu}, {late:.1f} s after {closure.id} had begun")
    return broken
