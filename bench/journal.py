"""Speed of the journal in SQLite and in PostgreSQL, and the time until a service that stands by leads.

    python bench/journal.py [--database postgresql://user@host/database] [--commits 500] [--failovers 3]

The database must be empty, because it is filled. Without one, only SQLite is measured, in a temporary folder (give
`--folder` for a certain disk). For each place: commits of one event, one after another; commits of 100 events; how many
events a second a restart reads. Then, with a database, `carpool serve` runs twice on one home, the leader is killed,
and the time is taken until the other one answers a request; and the same with a leader that is asked to end. Prints
JSON.
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from carpool.core import events as ev
from carpool.live.home import Home
from carpool.live.http.client import Client
from carpool.live.journal.postgres import PostgresJournal
from carpool.live.journal.reader import JournalPlace
from carpool.live.journal.sqlite import SqliteJournal
from carpool.live.journal.store import Commit, Store

BATCH = 100
WAIT_S = 60.0


async def measure(place: JournalPlace, commits: int) -> dict[str, float]:
    store = Store(place)
    store.open()
    await store.lead()
    times = []
    for number in range(commits):
        began = time.perf_counter()
        await store.write(Commit(events=[ev.Held(float(number), "1")]))
        times.append(time.perf_counter() - began)
    began = time.perf_counter()
    for number in range(commits // 10):
        await store.write(Commit(events=[ev.Held(float(number), "1")] * BATCH))
    batched = time.perf_counter() - began
    began = time.perf_counter()
    read = sum(1 for _ in store.events_after(0))
    reading = time.perf_counter() - began
    store.close()
    times.sort()
    return {
        "commits_per_s": len(times) / sum(times),
        "commit_p50_ms": 1e3 * statistics.median(times),
        "commit_p99_ms": 1e3 * times[int(0.99 * len(times))],
        "events_per_s_in_batches": commits // 10 * BATCH / batched,
        "read_events_per_s": read / reading,
    }


class Services:
    """Two services on one home."""

    def __init__(self, home: Path, database: str) -> None:
        self.home = home
        words = ["serve", "--home", str(home), "--port", "0", "--gpus", "1", "--database", database]
        self.command = [sys.executable, "-m", "carpool.cli", *words]
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self) -> subprocess.Popen[bytes]:
        self.running.append(subprocess.Popen(self.command, stderr=subprocess.DEVNULL))
        return self.running[-1]

    def until_led_by(self, process: subprocess.Popen[bytes]) -> float:
        """Return the time at which a service answers as the leader."""
        until = time.monotonic() + WAIT_S
        while time.monotonic() < until:
            address = Home(self.home).read_address()
            if address is not None and address["pid"] == process.pid:
                Client.find(self.home).get("/v1/jobs")
                return time.monotonic()
            time.sleep(0.01)
        raise SystemExit("no service leads")

    def failover(self, number: int) -> float:
        """End the leader, start another service afterwards, and return the seconds in between."""
        leader, standby = self.running
        began = time.monotonic()
        leader.send_signal(number)
        leader.wait()
        took = self.until_led_by(standby) - began
        self.running = [standby]
        self.start()
        time.sleep(3.0)  # until it stands by
        return took


def measure_failover(database: str, times: int) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        services = Services(Path(folder) / "home", database)
        try:
            services.until_led_by(services.start())
            services.start()
            time.sleep(3.0)
            killed = [round(services.failover(signal.SIGKILL), 2) for _ in range(times)]
            ended = [round(services.failover(signal.SIGTERM), 2) for _ in range(times)]
        finally:
            for process in services.running:
                process.terminate()
                process.wait()
    return {"failover_killed_s": killed, "failover_ended_s": ended}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--database", default=os.environ.get("CARPOOL_DATABASE"))
    parser.add_argument("--folder", help="where the SQLite file is made")
    parser.add_argument("--commits", type=int, default=500)
    parser.add_argument("--failovers", type=int, default=3)
    given = parser.parse_args()
    result: dict[str, object] = {}
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        result["sqlite"] = asyncio.run(measure(SqliteJournal(Path(folder) / "journal.db"), given.commits))
    if given.database:
        result["postgresql"] = asyncio.run(measure(PostgresJournal(given.database), given.commits))
        if given.failovers:
            _clear(given.database)
            result |= measure_failover(given.database, given.failovers)
    print(json.dumps(result, indent=1))


def _clear(database: str) -> None:
    """Remove the rows of the measurement, which are no journal that a service could read."""
    store = Store(PostgresJournal(database))
    store.open()

    async def clear() -> None:
        from sqlalchemy import text

        await store.lead()
        await store.transact(lambda connection: connection.execute(text("DELETE FROM events")) and None)

    asyncio.run(clear())
    store.close()


if __name__ == "__main__":
    main()
