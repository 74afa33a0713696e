"""A job that writes down when each of its workers starts, runs and ends, on the machine's own clock."""

import json
import os
import sys
import time

ledger = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND)
me = {
    "job": sys.argv[2],
    "attempt": int(os.environ["CARPOOL_ATTEMPT"]),
    "rank": int(os.environ["RANK"]),
    "size": int(os.environ["WORLD_SIZE"]),
    "gpu": os.environ["CARPOOL_GPUS"],
    "pid": os.getpid(),
    "wrapper": os.getppid(),
}


def say(what: str) -> None:
    line = {"what": what, "at": time.clock_gettime(time.CLOCK_BOOTTIME), **me}
    os.write(ledger, (json.dumps(line) + "\n").encode())


say("start")
until = time.monotonic() + float(sys.argv[3])
while time.monotonic() < until:
    time.sleep(0.05)
    say("beat")
say("end")
