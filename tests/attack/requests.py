"""Attacks by requests: hostile HTTP, wrong tokens, archives, specs, and other users' jobs."""

import gzip
import io
import json
import socket
import tarfile
import time

from tests.attack.case import ROOT_ONLY, case
from tests.attack.world import ENDED, World, hold

DEEP = b"[" * 5000
SPEC = {"command": ["true"], "directory": "/tmp"}
PATHS = [
    "/v1/jobs/../../etc/passwd", "/v1/jobs/..%2f..%2fadmin.token", "/v1/jobs/1%00", "/v1/jobs/-1", "/v1/jobs/1e3",
    "/v1/jobs/99999999999999999999999999", "/v1/jobs/%F0%9F%98%80", "/v1/jobs/1/logs?rank=-1", "/v1/jobs/" + "1" * 9000,
    "/v1/jobs/1/logs?stream=../../exit.json", "/v1/jobs/1/logs?offset=-5&tail=1", "/v1/history?limit=1e99",
    "/v1/jobs?limit=-1", "/v1/jobs?limit=1&limit=2", "/v1/jobs?before=' OR 1=1 --".replace(" ", "%20"), "//etc/passwd",
    "/v1/users/..%2f..", "/v1/jobs/1/wait?timeout_s=nan",
]  # fmt: skip
WRONG_FIELDS = [
    {"gpus": 0}, {"gpus": 10**30}, {"gpus": 1.5}, {"name": "\x1b[2J\n"}, {"name": "\ud800"}, {"env": {"A=B": "x"}},
    {"env": {"A": "\0"}}, {"command": []}, {"command": ["a\0b"]}, {"duration_s": -1}, {"directory": "relative"},
    {"directory": "/does/not/exist"}, {"array": "0-999999999"}, {"after": ["999999"]}, {"user": "admin"}, {"uid": 0},
    {"snapshot": "../../home"}, {"priority": 10**9},
]  # fmt: skip
OTHER_CODES = [
    ('{"a":"\u2200","b":' + "[" * levels + "]" * levels + ',"c":1}').encode(code)
    for code in ("utf-16", "utf-16-le", "utf-16-be", "utf-32-le")
    for levels in (40, 100_000)
]
BODIES = [
    *OTHER_CODES, b'"' + b'\\"' * 500_000, b"[]" * 500_000,
    b"", b"null", b"[]", b"{", DEEP, b'{"a":' * 500, b"\xff\xfe", b"9" * 5000,
    b'{"command":["true"],"command":["id"],"directory":"/"}', b'{"command":["true"],"directory":"/","batch":NaN}',
    b'{"command":["true"],"directory":"/","duration_s":1e999}',
    *(json.dumps({**SPEC, **wrong}).encode() for wrong in WRONG_FIELDS),
]  # fmt: skip


@case("paths out of the API's tree, ids that are none, wrong queries", "each is refused in one line", short=True)
def traversal(world: World) -> None:
    for path in PATHS:
        answer = world.ask("GET", path, user="ann")
        hold(answer.refused, f"{path[:60]} is refused in one line, not {answer.status} {answer.body[:200]!r}")
        hold(b"root:" not in answer.body, f"{path[:60]} gives no file away")


@case("bodies that are no job: broken, deep, doubled, out of range", "each is refused in one line", short=True)
def bodies(world: World) -> None:
    for body in BODIES:
        answer = world.ask("POST", "/v1/jobs", body, user="ann")
        hold(answer.refused, f"{body[:60]!r} is refused in one line, not {answer.status} {answer.body[:200]!r}")
    hold(not [row for row in world.jobs() if row["user"] == "admin"], "no job of the administrator came of it")


@case("wrong, cut, doubled and empty tokens", "none opens anything but /health", short=True)
def tokens(world: World) -> None:
    wrong = ["", "x", world.tokens["ann"][:-1], world.tokens["ann"] + "x", world.tokens["ann"].swapcase(), "\xe9" * 20]
    for token in wrong:
        for scheme in ("Bearer ", "Basic ", "bearer  ", ""):
            answer = world.ask("GET", "/v1/jobs", Authorization=f"{scheme}{token}".encode("latin-1").decode("latin-1"))
            hold(answer.status in (400, 401), f"{scheme}{token[:5]}... is refused, not {answer.status}")
    head = f"GET /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {world.tokens['ann']}\r\n"
    both = world.raw(f"{head}Authorization: Bearer x\r\nConnection: close\r\n\r\n".encode())
    hold(both.startswith((b"HTTP/1.1 400", b"HTTP/1.1 401")), "two tokens are refused")


@case(
    "bytes that are no HTTP: foreign hosts, smuggled and endless heads", "no 5xx, and the service goes on", short=True
)
def no_http(world: World) -> None:
    token = world.tokens["ann"]
    heads = [
        b"GET / HTTP/9.9\r\n\r\n", b"\0" * 100, b"\x16\x03\x01\x02\x00",
        b"GET " + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET /v1/jobs HTTP/1.1\r\nHost: evil@127.0.0.1\r\n\r\n", b"GET /health HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil\r\n\r\n",
        b"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"0\r\n\r\n",
        b"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99999999999\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + b"".join(b"X-%d: y\r\n" % n for n in range(2000)) + b"\r\n",
    ]  # fmt: skip
    for head in heads:
        got = world.raw(
            head.replace(b"\r\n\r\n", b"\r\nConnection: close\r\nAuthorization: Bearer %s\r\n\r\n" % token.encode(), 1)
        )
        status = got.split(b" ")[1:2]
        hold(not status or status[0][:1] in b"4", f"{head[:40]!r} is refused or dropped, not {got[:80]!r}")
    hold(world.answers(), "the service answers")


def archive(*members: tuple[str, bytes, str, dict[str, object]]) -> bytes:
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb") as plain, tarfile.TarFile(fileobj=plain, mode="w") as tar:
        for name, kind, link, more in members:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, link
            for key, value in more.items():
                setattr(info, key, value)
            tar.addfile(info, io.BytesIO(b"x" * info.size))
    return packed.getvalue()


@case(
    "archives with links, devices, deep paths, wrong times and bombs",
    "none is unpacked, nothing is written beside",
    short=True,
)
def archives(world: World) -> None:
    plain, link, hard = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE
    hostile = [
        archive(("../escaped", plain, "", {})), archive(("/tmp/escaped", plain, "", {})),
        archive(("l", link, "/etc", {}), ("l/escaped", plain, "", {})), archive(("h", hard, "/etc/shadow", {})),
        archive(("f", tarfile.FIFOTYPE, "", {})), archive(("d", tarfile.CHRTYPE, "", {"devmajor": 1, "devminor": 5})),
        archive(("/".join(["d"] * 2000), plain, "", {})),
        archive(("d", tarfile.DIRTYPE, "", {}), ("l", link, "d", {}), ("m", link, "l/../..", {})),
        b"\x1f\x8b", b"", b"x" * 1000,
        gzip.compress(archive(("a", plain, "", {})))[:-20],
    ]  # fmt: skip
    for data in hostile:
        answer = world.ask("POST", "/v1/snapshots", data, "ann", **{"Content-Type": "application/octet-stream"})
        hold(answer.refused, f"{data[:20]!r} is refused in one line, not {answer.status} {answer.body[:100]!r}")
    hold(not list(world.folder.rglob("escaped")), "nothing is written outside")


@case("an archive of half a gigabyte in half a megabyte", "it is refused in bounded memory")
def bombs(world: World) -> None:
    large = io.BytesIO()
    with gzip.GzipFile(fileobj=large, mode="wb") as plain, tarfile.TarFile(fileobj=plain, mode="w") as tar:
        info = tarfile.TarInfo("large")
        info.size = 500 << 20
        tar.addfile(info, io.BytesIO(bytes(info.size)))
    binary = {"Content-Type": "application/octet-stream"}
    answer = world.ask("POST", "/v1/snapshots", large.getvalue(), "ann", **binary)
    hold(answer.refused, f"it is refused in one line, not {answer.status} {answer.body[:100]!r}")
    hold(world.memory() < 600 << 20, f"memory stays bounded, not {world.memory() >> 20} MiB")


@case("many jobs with a copy of a small upload each, over several requests", "one user gets a bounded part of the disk",
      own=("--max-snapshots", "64MiB"))  # fmt: skip
def many_copies(world: World) -> None:
    packed = archive(("large", tarfile.REGTYPE, "", {"size": 8 << 20}))
    said = []
    for _ in range(5):
        binary = {"Content-Type": "application/octet-stream"}
        name = world.ask("POST", "/v1/snapshots", packed, "ann", **binary).data["snapshot"]
        spec = {"command": ["sleep", "60"], "directory": "/tmp", "watch": False, "snapshot": name, "array": "0-2"}
        said.append(world.ask("POST", "/v1/jobs", spec, "ann"))
    hold(
        [one.status for one in said] == [201, 201, 422, 422, 422], f"two arrays fit, not {[one.status for one in said]}"
    )
    hold(all(one.refused for one in said[2:]), "the others are refused in one line")
    copies = len(list((world.home / "jobs").glob("*/snapshot/large")))
    hold(copies == 6, f"there are six copies, not {copies}")
    world.ask("POST", "/v1/jobs/cancel", {"jobs": [row["job"] for row in world.jobs()]}, "ann")


@case("one user asks for another's job, environment, log and users", "nothing is shown and nothing changes", short=True)
def other_users(world: World) -> None:
    job = world.submit("echo SECRETOUT; sleep 60", "bob", env={"KEY": "SECRETENV"})
    world.reach(job, "running")
    own = f"/v1/jobs/{job}"
    for method, path, body in [
        ("POST", f"{own}/cancel", None), ("POST", f"{own}/hold", None), ("DELETE", f"{own}/files", None),
        ("POST", f"{own}/pause", None), ("POST", f"{own}/requeue", None), ("GET", f"{own}/logs", None),
        ("PUT", f"{own}/priority", {"priority": 5}), ("GET", "/v1/users", None), ("DELETE", "/v1/users/bob", None),
        ("POST", "/v1/users", {"name": "eve", "uid": 1}), ("PUT", "/v1/users/ann/limits", {"max_jobs": 99}),
    ]:  # fmt: skip
        answer = world.ask(method, path, body, "ann")
        hold(answer.status in (403, 404), f"{method} {path} is forbidden, not {answer.status}")
    world.ask("POST", "/v1/jobs/cancel", {"jobs": [job]}, "ann")
    for path in (f"/v1/jobs/{job}", "/v1/jobs", f"/v1/jobs/{job}/explain", "/v1/history"):
        body_text = world.ask("GET", path, user="ann").body
        hold(b"SECRET" not in body_text, f"{path} shows neither environment nor output")
    hold(world.show(job)["status"] == "running", "the job runs on")
    world.ask("POST", f"/v1/jobs/{job}/cancel", user="bob")
    world.reach(job, "cancelled")


@case("500 idle connections without a token", "a user with a token is answered within seconds")
def idle_connections(world: World) -> None:
    idle = []
    try:
        for _ in range(500):
            idle.append(socket.create_connection(("127.0.0.1", world.port), 10))
        began = time.monotonic()
        hold(world.ask("GET", "/v1/jobs", user="ann").status == 200, "the queue is shown")
        hold(time.monotonic() - began < 10.0, "it takes a moment only")
    finally:
        for connection in idle:
            connection.close()


@case(
    "a user without a right to them asks for uid 0, and for a uid of another",
    "no job runs as root",
    where=ROOT_ONLY,
    short=True,
)
def uid_zero(world: World) -> None:
    for uid in (0, -1, True, "0", 1.5, 2**40):
        answer = world.ask("POST", "/v1/users", {"name": "zero", "uid": uid})
        hold(answer.refused, f"uid {uid!r} is refused even from the administrator, not {answer.status}")
    job = world.submit("id -u; id -G")
    world.reach(job, "finished")
    hold(world.stdout(job).split()[0] == "7000301", "the job runs under its owner's uid")
    hold("0" not in world.stdout(job).split()[1:], "and not in root's group")


@case(
    "a script that only root can read, beside a guess at its content that ran before",
    "nothing tells that the guess was right",
    where=ROOT_ONLY,
)
def guessed_script(world: World) -> None:
    script, guess, secret = "exit 0  # password", world.out / "train.sh", world.folder / "closed" / "train.sh"
    secret.parent.mkdir(exist_ok=True)
    for path, mode in ((guess, 0o644), (secret, 0o600)):
        path.write_text(script)
        path.chmod(mode)
    command = {"directory": "/tmp", "duration_s": 900}
    job = world.ask("POST", "/v1/jobs", {"command": ["/bin/sh", str(guess)], **command}, "ann").data["job"]
    hold(world.reach(str(job), *ENDED)["status"] == "finished", "the guess runs")
    for path, known in ((guess, True), (secret, False)):
        said = world.ask("POST", "/v1/jobs/dry-run", {"command": ["/bin/sh", str(path)], **command}, "ann").data
        hold(("earlier run" in said["run"]["source"]) is known, f"{path}: {said['run']['source']}")


@case(
    "a user puts a link in place of a folder of a code snapshot while root gives the files to that user",
    "no file behind the link changes its owner",
    where=ROOT_ONLY,
)
def swapped_snapshot(world: World) -> None:
    victim, names = world.folder / "of-root", [f"f{number}" for number in range(3000)]
    victim.mkdir()
    for name in names:
        (victim / name).touch()
    packed = archive(("sub", tarfile.DIRTYPE, "", {}), *((f"sub/{name}", tarfile.REGTYPE, "", {}) for name in names))
    answer = world.ask("POST", "/v1/snapshots", packed, "ann", **{"Content-Type": "application/octet-stream"})
    hold(answer.status in (200, 201), f"the snapshot is taken, not {answer.status} {answer.body[:200]!r}")
    target = world.home / "jobs" / str(int(world.submit("true")) + 2) / "snapshot"
    swap = f"mv {target}/sub {target}/aside; ln -s {victim} {target}/sub"
    attacker = world.submit(f"echo looks; while ! [ -O {target}/sub ]; do :; done; {swap}; sleep 60")
    world.until(lambda: "looks" in world.stdout(attacker), "the attacker looks")
    job = world.submit("true", snapshot=answer.data["snapshot"])
    hold(int(job) == int(attacker) + 1, f"the attacker guessed the number {job}")
    world.reach(job, *ENDED)
    owners = {path.stat().st_uid for path in victim.iterdir()}
    hold(owners == {0}, f"all files stay root's, not {owners}")
    world.ask("POST", f"/v1/jobs/{attacker}/cancel", user="ann")
    world.reach(attacker, *ENDED)
