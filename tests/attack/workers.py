"""Attacks by jobs: their files, their processes, their reports, and what they can reach of others."""

import json
import os
import signal
import struct
import time
import zlib
from pathlib import Path

from tests.attack.case import PLAIN_ONLY, ROOT_ONLY, case
from tests.attack.world import ENDED, World, hold

FILES = "report watch control.json process.json exit.json stop.json pause.json paused.json stdout.log stderr.log"
REPLACE = {
    "FIFOs": "rm -f $f; mkfifo $f",
    "links to /dev/zero": "rm -f $f; ln -s /dev/zero $f",
    "sparse files of 4 GiB": "rm -f $f; truncate -s 4G $f",
    "folders": "rm -f $f; mkdir $f",
    "nonsense": "rm -f $f; echo '[[], {}]' > $f",
}


def quick(world: World, what: str) -> None:
    """The service answers at once and has not read gigabytes."""
    began = time.monotonic()
    listed = world.carpool("jobs")
    hold(listed.returncode == 0, f"{what}: `carpool jobs` works, not {listed.stderr[-200:]!r}")
    hold(time.monotonic() - began < 15.0, f"{what}: `carpool jobs` takes a moment only")
    hold(world.memory() < 600 << 20, f"{what}: memory stays bounded, not {world.memory() >> 20} MiB")


@case("a worker replaces all files of its directory", "only its own job is harmed", where=PLAIN_ONLY)
def replaced_files(world: World) -> None:
    for how, command in REPLACE.items():
        script = f"cd $CARPOOL_WORKER_DIR; for f in {FILES} ../gang.json; do {command}; done; sleep "
        ends, stays = world.submit(script + "1; exit 3"), world.submit(script + "60")
        world.reach(stays, "running")
        time.sleep(0.7)
        quick(world, how)
        world.reach(ends, *ENDED)
        world.ask("POST", f"/v1/jobs/{stays}/cancel", user="ann")
        world.reach(stays, "cancelled")


@case(
    "a worker makes its report 4 GiB large, or writes into files of root",
    "only its report can be written",
    where=ROOT_ONLY,
    short=True,
)
def huge_report(world: World) -> None:
    files = "control.json process.json exit.json new ../gang.json"
    script = f"cd $CARPOOL_WORKER_DIR; truncate -s 4G report watch; for f in {files}"
    job = world.submit(script + "; do (echo {} > $f) 2>/dev/null && echo WROTE $f; done; sleep 60")
    world.reach(job, "running")
    time.sleep(1.0)
    quick(world, "a report of 4 GiB")
    hold("WROTE" not in world.stdout(job), f"nothing else can be written: {world.stdout(job)[:200]}")
    world.ask("POST", f"/v1/jobs/{job}/cancel", user="ann")
    world.reach(job, "cancelled")


def report(iteration: int, status: int = 0, shrinking: int = 0, serial: int = 1) -> bytes:
    """Return a sealed report, as docs/reference/workers.md describes it."""
    head = struct.pack("<4sHH", b"CPR1", 1, 0) + struct.pack("<QQddd", serial, iteration, 0.01, 1.0, time.time())
    rest = struct.pack("<IIQQqIIIBBBB240s", 1, 1, 0, 0, -1, 0, 0, 0, status, shrinking, 0, 0, b"")
    return (head + rest + struct.pack("<I", zlib.crc32(head + rest))).ljust(1024, b"\0")


@case(
    "reports of unknown statuses, and of progress that cannot be",
    "the job ends; the lie is dropped, and that is said",
    short=True,
)
def false_reports(world: World) -> None:
    (world.out / "strange").write_bytes(report(5, status=77, shrinking=99))
    (world.out / "far").write_bytes(report(900_000))
    (world.out / "back").write_bytes(report(3, serial=9))
    strange = world.submit(f"cat {world.out}/strange > $CARPOOL_WORKER_DIR/report; sleep 1")
    script = "for f in far back; do cat {0}/$f > $CARPOOL_WORKER_DIR/report; sleep 1.5; done; sleep 60"
    liar = world.submit(script.format(world.out), iterations=1000, duration_s=5000)
    hold(world.reach(strange, *ENDED)["status"] == "finished", "an unknown status keeps no job running")
    world.until(lambda: world.show(liar).get("report_dropped"), "show says that a report was dropped", 20.0)
    hold(world.show(liar)["progress"] <= 1.0, "progress stays possible")
    world.ask("POST", f"/v1/jobs/{liar}/cancel", user="ann")
    world.reach(liar, "cancelled")


@case(
    "a job looks for open files, the environment and the tokens of the service",
    "it finds none",
    own=("--jobs-per-gpu", "1"),
)
def inherited_files(world: World) -> None:
    secret = world.folder / "secret"
    secret.write_text("TOPSECRET")
    secret.chmod(0o600)
    world.kill()
    descriptor = os.open(secret, os.O_RDONLY)
    try:
        os.set_inheritable(descriptor, True)
        world.serve(pass_fds=(descriptor,))
        script = (
            "for p in self $PPID; do ls -l /proc/$p/fd; timeout 1 head -qc 200 /proc/$p/fd/[3-9] 2>&1 </dev/null; done"
        )
        job = world.submit(f"{script}; cat <&{descriptor}; env; cat {world.home}/admin.token {world.home}/users.json")
        world.reach(job, *ENDED)
        found = world.stdout(job)
        hold("TOPSECRET" not in found, "no open file of the service reaches a job")
        hold(world.admin not in found or not world.root, "no job of a user reads the administrator's token")
        hold(f"CARPOOL_TOKEN={world.tokens['ann']}" not in found, "no token is in a job's environment")
    finally:
        os.close(descriptor)


@case(
    "a job of one user writes into the directories of another's, signals its processes, reads its log",
    "it cannot",
    where=ROOT_ONLY,
    short=True,
)
def other_uid(world: World) -> None:
    victim = world.submit("echo PRIVATE; echo $$ > $CARPOOL_CHECKPOINT_DIR/pid; sleep 60", "bob")
    world.reach(victim, "running")
    place = world.home / "jobs" / victim
    pid = int(
        world.until(lambda: (place / "checkpoints/pid").exists() and (place / "checkpoints/pid").read_text(), "a pid")
    )
    script = (
        f"cat {place}/attempt-1/rank-0/stdout.log; echo x > {place}/attempt-1/rank-0/report && echo WROTE;"
        f"touch {place}/checkpoints/x && echo WROTE; kill -9 {pid} && echo KILLED;"
        f"cat {world.home}/journal.db | head -c 99;"
        f"mkdir {world.home}/jobs/999 && echo WROTE; touch {world.home}/running/999-1 && echo WROTE; true"
    )
    job = world.submit(script, "ann")
    world.reach(job, *ENDED)
    found = world.stdout(job)
    hold(not any(word in found for word in ("PRIVATE", "WROTE", "KILLED", "SQLite")), f"nothing of it works: {found!r}")
    hold(world.show(victim)["status"] == "running", "the other job runs on")
    world.ask("POST", f"/v1/jobs/{victim}/cancel", user="bob")
    world.reach(victim, "cancelled")


@case(
    "a job ignores SIGTERM, forks away with setsid and clears its environment",
    "cancel leaves no process of it",
    short=True,
)
def daemons(world: World) -> None:
    mark = f"sleep {1000 + os.getpid() % 1000}.{time.time_ns() % 10**6}"
    script = f"trap '' TERM HUP INT; (setsid env -i sh -c 'trap \"\" TERM; {mark}' &) ; (setsid {mark} &); {mark}"
    job = world.submit(script)
    world.reach(job, "running")
    world.until(lambda: len(_running(mark)) >= 3, "all three run")
    world.ask("POST", f"/v1/jobs/{job}/cancel", user="ann")
    world.reach(job, "cancelled")
    world.until(lambda: not _running(mark), f"no process is left: {_running(mark)}", 15.0)


def _running(mark: str) -> list[int]:
    words = mark.encode().replace(b" ", b"\0")
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if (path / "cmdline").read_bytes().rstrip(b"\0") == words:
                found.append(int(path.name))
        except OSError:
            continue
    return found


@case("wrappers and workers are killed and stopped", "their jobs end or start again, and no process is left")
def killed_wrappers(world: World) -> None:
    mark = f"sleep {2000 + os.getpid() % 1000}.{time.time_ns() % 10**6}"
    job = world.submit(f"test $CARPOOL_ATTEMPT = 2 || {{ setsid env -i {mark} & sleep 60; }}", retries=1)
    world.reach(job, "running")
    record = world.home / "jobs" / job / "attempt-1/rank-0/process.json"
    found = world.until(
        lambda: json.loads(record.read_text()).get("worker") and json.loads(record.read_text()), "a record"
    )
    world.until(lambda: _running(mark), "its orphan runs")
    os.kill(found["pid"], signal.SIGSTOP)
    os.kill(found["pid"], signal.SIGKILL)
    world.reach(job, "finished")
    hold(world.show(job)["attempt"] == 2, "it used its retry")
    state = Path(f"/proc/{found['worker']['pid']}/stat")  # it may still wait to be reaped
    hold(not state.exists() or ") Z " in state.read_text(), "the worker of a killed wrapper is gone")
    hold(not _running(mark), "and so is what hid from it")


@case(
    "one user leaves 64 MiB of logs and checkpoints under a limit of 1 MiB",
    "the files of another user stay",
    own=("--keep-size", "1MiB"),
)
def disk_use(world: World) -> None:
    small = world.submit("echo RESULT; echo model > $CARPOOL_CHECKPOINT_DIR/model", "bob")
    world.reach(small, "finished")
    large = world.submit(
        "head -c 64M /dev/zero | tr '\\0' x; head -c 64M /dev/zero > $CARPOOL_CHECKPOINT_DIR/model", "ann"
    )
    world.reach(large, "finished")
    world.kill(signal.SIGTERM)
    world.serve()
    time.sleep(3.0)
    hold("RESULT" in world.stdout(small), "the other user's log is there")
    for job in (small, large):
        hold((world.home / "jobs" / job / "checkpoints/model").exists(), f"the checkpoint of job {job} is kept")
    planned = world.ask("GET", "/v1/retention").data["planned"]
    hold({one["user"] for one in planned} <= {"ann"}, "only files of the user who is over the limit are announced")
