"""Faults: kills, a lost or damaged journal, removed folders, a full disk, signals, and a policy that fails."""

import contextlib
import os
import resource
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

from tests.attack.case import PLAIN_ONLY, ROOT_ONLY, case
from tests.attack.world import ENDED, UIDS, World, hold

RUN = ("--jobs-per-gpu", "1")
BAD_POLICIES = '''
from carpool.core.model import Allocation, Decision
from carpool.policies.simple.fifo import Fifo
class Raises(Fifo):
    """It raises."""
    def decide(self, view):
        raise RuntimeError("oops")
class Exits(Fifo):
    """It ends the process, and wants to be asked at a time that is over."""
    def decide(self, view):
        raise SystemExit(3)
    def wake(self, view):
        return view.now - 1.0
class Illegal(Fifo):
    """All its plans break a rule."""
    def decide(self, view):
        return [Decision(job.job.id, Allocation((99,)), "there") for job in view.queue]
'''


def lose_journal(world: World) -> None:
    for path in world.home.glob("journal.db*"):
        path.unlink()


def flip_bit(world: World) -> None:
    """Damage the middle of the write-ahead log, or of the journal where there is none."""
    path = next(
        path
        for path in (world.home / "journal.db-wal", world.home / "journal.db")
        if path.exists() and path.stat().st_size
    )
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def run_as_owners(world: World, damage: Callable[[World], None]) -> None:
    """Kill a service with jobs of two users, damage its home, and see under which uids the jobs run."""
    jobs = {user: world.submit(f"id -u >> {world.out}/{user}; sleep 3", user, gpus=2) for user in UIDS}
    waiting = world.submit(f"id -u >> {world.out}/ann", "ann", gpus=4)
    for job in jobs.values():
        world.reach(job, "running")
    world.kill()
    damage(world)
    world.serve()
    for job in (*jobs.values(), waiting):
        row = world.reach(job, *ENDED)
        hold(row["status"] == "finished", f"job {job} finishes, not {row['status']} ({row['reason']})")
    for user, uid in UIDS.items():
        ran = (world.out / user).read_text().split()
        hold(set(ran) == {str(uid)}, f"the jobs of {user} ran as {uid}, not as {ran}")


@case(
    "a root service with jobs of two users is killed and its journal deleted",
    "the jobs run as their owners",
    where=ROOT_ONLY,
    short=True,
    own=RUN,
)
def lost_journal(world: World) -> None:
    run_as_owners(world, lose_journal)
    hold(world.ask("GET", "/v1/jobs", user="ann").status == 200, "users and tokens survive the journal")


@case("the same with one bit of the log flipped", "the jobs run as their owners", where=ROOT_ONLY, own=RUN, fresh=True)
def flipped_bit(world: World) -> None:
    run_as_owners(world, flip_bit)


@case(
    "the same with the journal and the list of users deleted",
    "the jobs run as their owners, and lost tokens open nothing",
    where=ROOT_ONLY,
    own=RUN,
    fresh=True,
)
def lost_users(world: World) -> None:
    def damage(world: World) -> None:
        lose_journal(world)
        (world.home / "users.json").unlink()

    run_as_owners(world, damage)
    hold(world.ask("GET", "/v1/jobs", user="ann").status == 401, "a token that was lost opens nothing")


@case(
    "a name goes to another uid while jobs wait; the journal is lost, and the new owner of the name releases them",
    "none runs under the other uid, and it is said why",
    where=ROOT_ONLY,
    own=RUN,
    fresh=True,
)
def reassigned_name(world: World) -> None:
    def join(uid: int) -> None:
        world.tokens["eve"] = world.ask("POST", "/v1/users", {"name": "eve", "uid": uid}).data["token"]

    def told(job: str) -> bool:
        explained = " ".join(world.ask("GET", f"/v1/jobs/{job}/explain").data["sentences"])
        return all("owner is not certain" in text for text in (world.show(job)["reason"], explained))

    join(7_000_401)
    first = world.submit("sleep 600", "ann", gpus=4)
    world.reach(first, "running")
    jobs = [world.submit(f"id -u >> {world.out}/eve", "eve") for _ in range(2)]
    world.ask("DELETE", "/v1/users/eve")
    join(7_000_402)
    world.ask("POST", f"/v1/jobs/{jobs[0]}/hold", user="eve")
    world.kill()
    lose_journal(world)
    world.serve()
    world.ask("POST", f"/v1/jobs/{first}/cancel")
    for _ in range(2):
        for job in jobs:
            hold(world.ask("POST", f"/v1/jobs/{job}/release", user="eve").refused, f"job {job} is not released")
            hold(told(job), f"it is said why job {job} never starts, not {world.show(job)['reason']!r}")
        world.kill()
        world.serve()
    world.reach(world.submit("true", "ann"), *ENDED)
    hold(not (world.out / "eve").exists(), "none ran")


@case(
    "the service is killed, and jobs end while it is away",
    "they do not run again, and their own times are kept",
    short=True,
    own=RUN,
)
def ended_meanwhile(world: World) -> None:
    job = world.submit(f"echo x >> {world.out}/once; sleep 0.7")
    world.reach(job, "running")
    world.kill()
    time.sleep(4.0)
    world.serve()
    row = world.reach(job, *ENDED)
    hold(
        row["status"] == "finished" and row["attempt"] == 1,
        f"it finished once: {row['status']}, attempt {row['attempt']}",
    )
    hold((world.out / "once").read_text() == "x\n", "it ran once")
    hold(
        row["finished"] - row["started"] < 3.0,
        f"it ran for its own 0.7 s, not {row['finished'] - row['started']:.1f} s",
    )


@case(
    "the service is killed six times while short jobs come and end",
    "each accepted job runs to its end exactly once",
    own=RUN,
)
def kills(world: World) -> None:
    jobs = []
    for _ in range(6):
        jobs += [world.submit(f"echo $CARPOOL_JOB >> {world.out}/ledger; sleep 0.3") for _ in range(4)]
        time.sleep(0.4)
        world.kill()
        world.serve()
    for job in jobs:
        hold(world.reach(job, *ENDED)["status"] == "finished", f"job {job} finishes")
    hold(sorted((world.out / "ledger").read_text().split()) == sorted(jobs), "each ran once")


@case(
    "rm -rf running/ with the service up, and jobs/ with it down",
    "nothing runs twice at once, and later jobs start",
    own=RUN,
)
def removed_folders(world: World) -> None:
    script = f"echo start $$ >> {world.out}/l.$CARPOOL_JOB; sleep 4; echo end $$ >> {world.out}/l.$CARPOOL_JOB"
    shutil.rmtree(world.home / "running")
    first = world.submit("true")
    hold(world.reach(first, *ENDED)["status"] == "finished", "a job starts without running/")
    jobs = [world.submit(script) for _ in range(3)]
    for job in jobs:
        world.reach(job, "running")
    world.kill()
    shutil.rmtree(world.home / "jobs", ignore_errors=True)
    world.serve()
    for job in jobs:
        world.reach(job, *ENDED)
        pids = [line.split()[1] for line in (world.out / f"l.{job}").read_text().splitlines()]
        runs = [pid for number, pid in enumerate(pids) if pid not in pids[:number]]
        hold(pids == sorted(pids, key=runs.index), f"job {job}: one run ended before the next began: {pids}")


@contextlib.contextmanager
def small_world(world: World, mebibytes: int) -> Iterator[World | None]:
    """A service whose home is on a small file system of its own; None: none can be mounted here."""
    place = world.folder / "small"
    place.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m,mode=755", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True).returncode:
        yield None
        return
    other = World(True, *RUN)
    shutil.rmtree(other.folder)
    other.folder, other.home, other.log = place, place / "home", world.folder / "small.log"
    other.out = place
    try:
        other.serve()
        yield other
    finally:
        folder, other.folder = other.folder, world.folder / "nothing"
        other.close()
        subprocess.run(["umount", "-l", str(folder)], capture_output=True)


@case(
    "a job fills the disk",
    "submitting is refused in one line, cancelling works, and a restart goes on",
    where=ROOT_ONLY,
)
def full_disk(world: World) -> None:
    with small_world(world, 12) as other:
        if other is None:
            return  # no file system can be mounted here
        job = other.submit("cat /dev/zero > $CARPOOL_CHECKPOINT_DIR/big; sleep 60", retries=3)
        other.until(lambda: shutil.disk_usage(other.folder).free == 0, "the disk is full")
        said = [
            other.ask("POST", "/v1/jobs", {"command": ["true"], "directory": "/", "name": "x" * 200}, "ann")
            for _ in range(40)
        ]
        hold(any(one.status == 503 for one in said), "a full disk is said")
        hold(all(one.status in (201, 503) for one in said), f"nothing else goes wrong: {[one.status for one in said]}")
        hold(other.ask("POST", f"/v1/jobs/{job}/cancel", user="ann").status == 200, "cancel works")
        other.until(lambda: other.show(job)["status"] in ("stopping", "cancelled"), "the job stops")
        (other.home / "jobs" / job / "checkpoints/big").unlink()
        other.reach(job, "cancelled")
        hold(other.reach(other.submit("true"), *ENDED)["status"] == "finished", "jobs run again")


@case(
    "a job fills the disk, and the service is killed",
    "a service starts, and the job can be cancelled",
    where=ROOT_ONLY,
)
def start_on_full_disk(world: World) -> None:
    with small_world(world, 24) as other:
        if other is None:
            return  # no file system can be mounted here
        other.until(lambda: (other.home / "reserve").exists(), "room is kept for a start")
        job = other.submit("cat /dev/zero > $CARPOOL_CHECKPOINT_DIR/big; sleep 600", retries=3)
        other.until(lambda: shutil.disk_usage(other.folder).free == 0, "the disk is full")
        other.kill()
        other.serve()
        hold(not (other.home / "reserve").exists(), "the room is used")
        hold(other.ask("POST", f"/v1/jobs/{job}/cancel", user="ann").status == 200, "cancel works")
        other.reach(job, "cancelled")


@case("the home is deleted under a running service", "a job is refused, not acknowledged and forgotten", own=RUN)
def deleted_home(world: World) -> None:
    port, token = world.port, world.tokens["ann"]
    aside = world.folder / "aside"
    world.home.rename(aside)
    try:
        body = b'{"command": ["true"], "directory": "/"}'
        head = f"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer {token}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        with socket.create_connection(("127.0.0.1", port), 30) as connection:
            connection.sendall(head.encode() + body)
            answer = connection.recv(65536)
        hold(answer.split(b" ")[1] == b"503", f"it is refused for now, not {answer[:80]!r}")
        env = world.env(CARPOOL_URL=f"http://127.0.0.1:{port}", CARPOOL_TOKEN=token)
        command = [sys.executable, "-m", "carpool.cli", "doctor"]
        doctor = subprocess.run(command, capture_output=True, text=True, env=env, cwd="/", timeout=60)
        hold(doctor.returncode == 1 and "cannot write" in doctor.stdout, f"`carpool doctor` says so: {doctor.stdout}")
    finally:
        aside.rename(world.home)
        world.kill()


@case("the home is away while a job with retries ends", "it ran once, and its own end is recorded", own=RUN)
def absent_home(world: World) -> None:
    job = world.submit(f"echo x >> {world.out}/absent; sleep 2", retries=2)
    world.reach(job, "running")
    aside = world.home.rename(world.folder / "aside")
    time.sleep(4.0)
    aside.rename(world.home)
    row = world.reach(job, *ENDED)
    hold((row["status"], row["attempt"]) == ("finished", 1), f"it finished: {row['status']}, attempt {row['attempt']}")
    hold((world.out / "absent").read_text() == "x\n", "it ran once")


@case("a home that nothing may be written into", "one line, no traceback", where=PLAIN_ONLY, own=RUN)
def read_only_home(world: World) -> None:
    world.kill(signal.SIGTERM)
    subprocess.run(["chmod", "-R", "a-w", str(world.home)], check=True)
    try:
        said = world.carpool("serve", "--gpus", "1", "--port", "0")
        hold(
            said.returncode == 2 and len(said.stderr.strip().splitlines()) == 1, f"one line, not {said.stderr[-300:]!r}"
        )
        doctor = world.carpool("doctor")
        hold(doctor.returncode == 1, "`carpool doctor` finds it")
    finally:
        subprocess.run(["chmod", "-R", "u+w", str(world.home)], check=True)


@case(
    "signals to the service: HUP, USR1, STOP and CONT, PIPE, then INT",
    "it goes on, or ends in order and comes back",
    short=True,
    own=RUN,
)
def signals(world: World) -> None:
    job = world.submit("sleep 3; echo through")
    assert world.service is not None
    for number in (signal.SIGPIPE, signal.SIGSTOP, signal.SIGCONT, signal.SIGWINCH, signal.SIGURG):
        world.service.send_signal(number)
    hold(world.answers(), "it answers")
    world.kill(signal.SIGINT)
    hold("Traceback" not in world.log.read_text(), "it ends without a traceback")
    world.serve()
    hold(world.reach(job, *ENDED)["status"] == "finished", "the job ran through")
    hold(world.show(job)["attempt"] == 1, "once")


@case(
    "policies that raise, that exit, and whose plans are all illegal",
    "jobs run, and doctor, jobs and explain say it",
    own=RUN,
)
def bad_policies(world: World) -> None:
    file = world.folder / "bad.py"
    file.write_text(BAD_POLICIES)
    for name in ("Raises", "Exits", "Illegal"):
        world.kill(signal.SIGTERM)
        world.serve("--policy", f"{file}:{name}")
        job = world.submit("true")
        hold(world.reach(job, *ENDED)["status"] == "finished", f"{name}: the job runs")
        doctor = world.carpool("doctor")
        hold("fifo decides" in " ".join(doctor.stdout.split()), f"{name}: doctor says it: {doctor.stdout[-500:]}")
        hold("Traceback" not in world.log.read_text(), f"{name}: no traceback in the log")
    world.kill(signal.SIGTERM)
    world.serve()


@case(
    "`journal copy` from and to a text, an empty file, another program's database and a link",
    "each is refused in one line and left as it is",
)
def copied_onto(world: World) -> None:
    folder = world.folder / "copies"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    with contextlib.closing(sqlite3.connect(folder / "other.db")) as book:
        book.executescript("CREATE TABLE songs (name); INSERT INTO songs VALUES ('x')")
    (folder / "text").write_text("notes\n")
    (folder / "empty").touch()
    (folder / "link").symlink_to(folder / "made")
    for path in folder.iterdir():
        if not path.is_symlink():
            path.chmod(0o666)

    def content() -> dict[str, bytes | None]:
        return {path.name: path.read_bytes() if path.exists() else None for path in folder.iterdir()}

    before = content()
    names, journal = [str(folder / name) for name in before], str(world.out / "journal.db")
    own = sqlite3.connect(world.home / "journal.db")
    with contextlib.closing(own), contextlib.closing(sqlite3.connect(journal)) as twin:
        own.backup(twin)
    os.chmod(journal, 0o666)
    new = str(folder / "new.db")
    refused = [*((name, new) for name in names), *((journal, name, "--backup") for name in (*names, journal))]
    for words in refused:
        command = [*world.command("journal")[:-2], "copy", *words]
        said = subprocess.run(command, capture_output=True, text=True, env=world.env(), cwd="/", timeout=60)
        line = len(said.stderr.strip().splitlines()) == 1
        hold(said.returncode == 2 and line, f"{words}: one line, not {said.stderr[-300:]!r}")
    hold(content() == before, "no file changed, and none was made")


@case(
    "290 streams of one user, and 100 connections without a token, where 300 files can be open",
    "other users are answered, jobs run, and the log stays short",
    own=RUN,
)
def few_files(world: World) -> None:
    world.kill(signal.SIGTERM)
    size = world.log.stat().st_size
    world.serve(preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (200, 300)))
    head = f"GET /v1/events HTTP/1.1\r\nHost: 127.0.0.1:{world.port}\r\nAuthorization: Bearer {world.tokens['ann']}"
    streams = []
    try:
        for number in range(390):
            streams.append(socket.create_connection(("127.0.0.1", world.port), 30))
            with contextlib.suppress(OSError):
                streams[-1].sendall(f"{head}\r\n\r\n".encode() if number < 290 else b"GET / HT")
        hold(world.ask("GET", "/v1/jobs", user="bob").status == 200, "another user is answered")
        job = world.submit("true", "bob")
        hold(world.reach(job, *ENDED)["status"] == "finished", "and has a job run")
    finally:
        for stream in streams:
            stream.close()
    said = world.log.read_text()[size:]
    hold("Traceback" not in said and len(said) < 5000, f"the log has few lines, not {len(said)} bytes: {said[-300:]}")
    world.kill(signal.SIGTERM)
    world.serve()


@case("two services on one home, and a home of another user", "refused in one line", short=True)
def two_services(world: World) -> None:
    said = world.carpool("serve", "--gpus", "1", "--port", "0")
    hold(said.returncode == 2 and len(said.stderr.strip().splitlines()) == 1, f"one line, not {said.stderr[-300:]!r}")
    if world.root:
        foreign = world.folder / "foreign"
        foreign.mkdir()
        os.chown(foreign, UIDS["ann"], UIDS["ann"])
        command = [*world.command("serve")[:-1], str(foreign), "--gpus", "1", "--port", "0"]
        with contextlib.suppress(subprocess.TimeoutExpired):
            done = subprocess.run(command, capture_output=True, text=True, env=world.env(), timeout=30)
            hold(done.returncode == 2 and "belongs to uid" in done.stderr, f"refused, not {done.stderr[-300:]!r}")
