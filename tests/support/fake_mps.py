"""A stand-in for nvidia-cuda-mps-control: `-f` is the daemon; without it, one command is read from standard input.

Both sides meet in the pipe directory, as the real ones do. `servers.json` there lists the servers with their clients
and status; tests write it.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

pipe = Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
control, gone = pipe / "control", pipe / "quit"


def daemon():
    if os.environ.get("FAKE_MPS_FAILS") or lives():  # as the real one, it leaves a directory that is in use
        sys.exit(1)
    if os.environ.get("FAKE_MPS_STUBBORN") == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (pipe / "environment.json").write_text(json.dumps(dict(os.environ)))
    gone.unlink(missing_ok=True)
    control.write_text(str(os.getpid()))
    while not (gone.exists() and "FAKE_MPS_STUBBORN" not in os.environ):
        time.sleep(0.01)
    control.unlink()


def lives():
    """Return whether the daemon runs. One that was killed leaves its socket behind."""
    try:
        return Path(f"/proc/{control.read_text()}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def answer(words, servers):
    if words[0] == "get_server_list":
        return servers
    if words[0] == "get_client_list":
        return map(str, servers[words[1]]["clients"])
    if words[0] == "get_server_status":
        return [servers[words[1]].get("status", "ACTIVE")]
    if words[0] == "quit":
        gone.touch()
    return []


if sys.argv[1:] == ["-f"]:
    daemon()
elif not lives():
    print("Cannot find MPS control daemon process")
    sys.exit(1)
else:
    state = pipe / "servers.json"
    known = json.loads(state.read_text()) if state.exists() else {}
    for line in answer(sys.stdin.readline().split(), known):
        print(line)
