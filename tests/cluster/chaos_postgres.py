"""Kill and stop both services of a shared journal and their database from outside; look for violated guarantees.

`python -m tests.cluster.chaos_postgres --faults 20 --seed 1`. Two services share a home and a database, to which they
talk through a relay. Clients submit short jobs with the command line all the time. Then come faults: SIGKILL of the
leader, of the standby, of both; SIGSTOP of the leader until another one leads, and longer; SIGKILL and SIGSTOP of the
database; cut connections; commits whose answers are lost. Judges are the ledger that the jobs write themselves, as in
`tests/live/chaos_outside.py`, and the journal: no number is missing or twice, and the jobs of the journal are those
that clients know. Exit code 1: a guarantee was violated.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection
from pathlib import Path

from tests.cluster.pair_world import leading_side
from tests.cluster.services import Relay
from tests.live import chaos_outside
from tests.support.postgres import PASSWORD, PostgresServer

LEADS_S = 30.0
"""Seconds after a fault within which a service must lead again, on a busy machine."""
SIDES = 2
chaos_outside.RESIDENTS = 1  # no job is paused here, so that the judge can be strict: one job on a GPU at any time


class SharedWorld(chaos_outside.World):
    """A home, a database, two services and the ledger of their workers."""

    def __init__(self, folder: Path, server: PostgresServer, variables: dict[str, str] | None = None) -> None:
        super().__init__(folder)
        self.server, self.direct = server, server.new_database()
        self.relay = Relay(server.port)
        self.sides: list[subprocess.Popen | None] = [None] * SIDES
        self.environment = {**os.environ, **(variables or {})}
        self.ends: list[int] = []
        """Exit codes of services that ended by themselves."""
        self.slowest_s = 0.0
        """Longest time from a leader's end until another one answered."""

    def serve(self) -> None:
        """Start the services that do not run."""
        address = self.direct.replace(f":{self.server.port}/", f":{self.relay.port}/")
        words = ["serve", "--home", str(self.home), "--port", "0", "--database", address]
        words += ["--gpus", str(chaos_outside.GPUS), "--jobs-per-gpu", "1"]
        words += ["--resident-per-gpu", str(chaos_outside.RESIDENTS)]
        for side, process in enumerate(self.sides):
            if process is None or process.poll() is not None:
                if process is not None and process.returncode != -signal.SIGKILL:
                    self.ends.append(process.returncode)
                with self.log.open("ab") as log:
                    command = [sys.executable, "-m", "carpool.cli", *words]
                    self.sides[side] = subprocess.Popen(command, stdout=log, stderr=log, env=self.environment)

    def is_up(self) -> bool:
        return self.leader() is not None

    def leader(self) -> int | None:
        """Return the side whose address clients find, if it runs."""
        return leading_side(self.home, self.sides)

    def wait_until_led(self, other_than: int | None = None) -> bool:
        """Wait until a service leads and answers; return False if none does in time."""
        until = time.monotonic() + LEADS_S
        while time.monotonic() < until:
            self.serve()
            side = self.leader()
            if side is not None and side != other_than:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    if self.carpool("jobs", timeout=10.0).returncode == 0:
                        return True
            time.sleep(0.1)
        return False

    def describe(self) -> str:
        """Return what helps to understand why no service leads."""
        leader = self.server.sql("SELECT term, beat, released, holder FROM leader", self.direct)
        asked = "SELECT pid, state, wait_event, now() - state_change, left(query, 60) FROM pg_stat_activity"
        sessions = self.server.sql(f"{asked} WHERE application_name = 'carpool'", self.direct)
        alive = [process and process.poll() for process in self.sides]
        return "\n".join(map(str, (leader, *sessions, alive, self.log.read_text()[-2000:])))

    def kill(self, side: int) -> None:
        process = self.sides[side]
        assert process is not None
        process.kill()
        process.wait()

    def close(self) -> None:
        for process in self.sides:
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        self.relay.close()

    # ---- faults ----------------------------------------------------------------------------------------------------

    def kill_leader(self, drawn: random.Random) -> None:
        self.kill(self.leader() or 0)

    def kill_standby(self, drawn: random.Random) -> None:
        self.kill(1 - (self.leader() or 0))

    def kill_both(self, drawn: random.Random) -> None:
        for side in range(SIDES):
            self.kill(side)

    def stop_leader(self, drawn: random.Random) -> None:
        """Stop the leader; wake it up when another one leads, or a little before that."""
        side = self.leader() or 0
        process = self.sides[side]
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        if drawn.random() < 0.7:
            if not self.wait_until_led(other_than=side):
                raise SystemExit(f"nobody took over: {self.describe()}")
            time.sleep(drawn.uniform(0.0, 2.0))
        else:
            time.sleep(drawn.uniform(1.0, 6.0))
        process.send_signal(signal.SIGCONT)

    def kill_database(self, drawn: random.Random) -> None:
        self.server.kill()
        time.sleep(drawn.choice([0.0, 3.0, 7.0]))
        self.server.start()

    def stop_database(self, drawn: random.Random) -> None:
        self.server.signal(signal.SIGSTOP)
        time.sleep(drawn.choice([1.0, 5.0, 12.0]))
        self.server.signal(signal.SIGCONT)

    def cut(self, drawn: random.Random) -> None:
        self.relay.refusing = True
        self.relay.cut()
        time.sleep(drawn.choice([0.0, 2.0, 7.0]))
        self.relay.refusing = False

    def lose_answers(self, drawn: random.Random) -> None:
        for _ in range(3):
            self.relay.swallow_after = b"COMMIT"
            time.sleep(drawn.uniform(0.3, 1.0))
        self.relay.swallow_after = None

    FAULTS = (kill_leader, kill_standby, kill_both, stop_leader, kill_database, stop_database, cut, lose_answers)


def judge_journal(world: SharedWorld, rows: dict[str, list[dict]]) -> list[str]:
    """Compare the journal with what clients know."""
    numbers = [seq for (seq,) in world.server.sql("SELECT seq FROM events ORDER BY seq", world.direct)]
    broken = []
    if numbers != list(range(1, len(numbers) + 1)):
        broken.append("a number of the journal is missing or there twice")
    ids = [number for (number,) in world.server.sql("SELECT id FROM jobs", world.direct)]
    listed = {int(row["job"]) for own in rows.values() for row in own}
    if set(ids) != listed:
        broken.append(f"jobs in the journal and in the list differ: {sorted(set(ids) ^ listed)[:10]}")
    damaged = world.server.sql("SELECT count(*) FROM events WHERE kind = 'Damaged'", world.direct)[0][0]
    if damaged:
        broken.append(f"{damaged} events contradict those before them")
    # 2: the database failed while it started, which it says; its supervisor starts it again
    if any(code not in (0, 2, 3) for code in world.ends):
        broken.append(f"services ended by themselves with exit codes {sorted(set(world.ends))}")
    return broken


def run(world: SharedWorld, faults: int, drawn: random.Random, only: Collection[str] = ()) -> dict:
    world.serve()
    if not world.wait_until_led():
        raise SystemExit(f"no service: {world.log.read_text()[-3000:]}")
    clients = [
        threading.Thread(target=world.client, args=(number, drawn.random())) for number in range(chaos_outside.CLIENTS)
    ]
    for client in clients:
        client.start()
    hit: dict[str, int] = {}
    try:
        kinds = [fault for fault in world.FAULTS if not only or fault.__name__ in only]
        todo = kinds * (faults // len(kinds) + 1)
        drawn.shuffle(todo)
        for fault in todo[:faults]:
            time.sleep(drawn.uniform(0.2, 2.0))
            began = time.monotonic()
            fault(world, drawn)
            hit[fault.__name__] = hit.get(fault.__name__, 0) + 1
            if not world.wait_until_led():
                raise SystemExit(f"no service leads after {fault.__name__}: {world.describe()}")
            if fault is SharedWorld.kill_leader:
                world.slowest_s = max(world.slowest_s, time.monotonic() - began)
    finally:
        world.done.set()
        for client in clients:
            client.join()
    until = time.monotonic() + chaos_outside.DRAIN_S
    rows: dict[str, list[dict]] = {}
    while time.monotonic() < until:
        rows = world.rows() or {}
        if rows and all(row["status"] in ("finished", "failed", "cancelled") for own in rows.values() for row in own):
            break
        time.sleep(0.2)
    ((term,),) = world.server.sql("SELECT term FROM leader", world.direct)
    return {
        "faults": hit,
        "terms": term,
        "jobs": chaos_outside.ARRAY * len(world.accepted),
        "unsure": len(world.unsure),
        "attempts": len({(words[1], words[2]) for words in world.lines()}),
        "slowest_failover_s": round(world.slowest_s, 1),
        "violations": chaos_outside.judge(world, rows) + judge_journal(world, rows),
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", action="append", default=[], help="kind of fault; repeatable")
    parser.add_argument("--log", type=Path, help="where the log of the services is kept")
    given = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="carpool-shared-", ignore_cleanup_errors=True) as folder:
        server = PostgresServer().start()
        world = SharedWorld(Path(folder), server)
        try:
            result = run(world, given.faults, random.Random(given.seed), given.only)
        finally:
            world.close()
            if given.log:
                given.log.write_text(world.log.read_text())
            server.close()
        if PASSWORD in world.log.read_text():
            result["violations"].append("the password is in the log")
        print(json.dumps({**result, "seconds": round(time.monotonic() - began, 1)}))
    return 1 if result["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
