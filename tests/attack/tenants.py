"""Attacks on what users share: groups, limits, closures, accounts, notices, streams, and all routes of the API."""

import contextlib
import http.client
import http.server
import json
import socket
import threading
import time
from collections.abc import Iterator

from tests.attack.case import ROOT_ONLY, case
from tests.attack.faults import RUN, lose_journal
from tests.attack.world import ENDED, PATIENCE_S, World, hold

OPEN_TO_ALL = ("/v1/jobs", "/v1/jobs/dry-run", "/v1/jobs/cancel", "/v1/snapshots", "/v1/what-if")
"""Paths that change nothing of others by themselves."""
STREAMS = ("/v1/events", "/v1/jobs/{job}/terminal")
TYPED = {"typist": "0123456789abcdef", "number": 1}
BODIES = {
    "/v1/groups/{name}": {"weight": 9}, "/v1/fair-share": {"strength": 1.0}, "/v1/users/{name}/group": {"group": "x"},
    "/v1/drains": {"gpus": "node0"}, "/v1/users": {"name": "eve"}, "/v1/users/{name}/limits": {"max_jobs": 9},
    "/v1/reservations": {"gpus": "node0", "group": "x", "start": 0.0, "end": 9e9}, "/v1/nodes": {"name": "n1"},
    "/v1/nodes/{name}": {"state": "drained"}, "/v1/jobs/{job}/priority": {"priority": 3},
    "/v1/jobs/{job}/exec": {"command": ["id"]}, "/v1/jobs/{job}/terminal": TYPED,
    "/v1/jobs/{job}/exec/{command}": TYPED,
}  # fmt: skip
WRONG_SETTINGS = [
    ("PUT", "/v1/groups/red", [b'{"weight":NaN}', b'{"weight":1e999}', b'{"weight":-1}', b'{"cap":-1}', b'{"cap":true}',
                               b'{"weight":null}', b'{"cap":1,"guarantee":2}', b'{"x":1}', b"[]", b"[" * 5000,
                               b'{"default_limit_s":9,"max_limit_s":5}', b'{"cap":1,"cap":9}']),
    ("PUT", "/v1/fair-share", [b'{"strength":2}', b'{"strength":NaN}', b'{"half_life_s":0}']),
    ("POST", "/v1/drains", [b'{"gpus":"node0:99"}', b'{"gpus":""}', b'{"gpus":"node0:0-999999999"}', b'{"gpus":"../x"}',
                            b'{"gpus":"node0","at":NaN}', b'{"gpus":"node0","at":1e99}', b'{"gpus":7}']),
    ("POST", "/v1/reservations", [b'{"gpus":"node0","group":"x","start":9,"end":1}', b'{"gpus":"node0","group":"../x",'
                                  b'"start":0,"end":9e9}', b'{"gpus":"node0","start":0,"end":9e9}']),
    ("DELETE", "/v1/drains/node9", [b""]), ("DELETE", "/v1/reservations/r999", [b""]),
    ("PUT", "/v1/groups/..%2fx", [b"{}"]), ("PUT", "/v1/groups/" + "x" * 99, [b"{}"]),
]  # fmt: skip
PRIVATE_HOSTS = ["127.0.0.1", "localhost", "0.0.0.0", "0x7f.1", "2130706433", "[::1]", "[::ffff:127.0.0.1]",
                 "[::127.0.0.1]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]"]  # fmt: skip


def _filled(path: str, job: str) -> str:
    return path.replace("{job}", job).replace("{name}", "bob").replace("{command}", "1")


@case("every route of the API's own description, as another user than the owner", "nothing is shown, nothing changes",
      short=True)  # fmt: skip
def every_route(world: World) -> None:
    hook = {"end": "https://notices.example/SECRETHOOK"}
    job = world.submit("echo SECRETOUT; sleep 600 # SECRETCMD", "bob", env={"K": "SECRETENV"}, notify=hook)
    world.reach(job, "running")
    paths = world.ask("GET", "/openapi.json").data["paths"]
    hold(len(paths) > 30, "the description has all routes")
    for path, ways in paths.items():
        if "get" in ways and path not in STREAMS:
            hold(b"SECRET" not in world.ask("GET", _filled(path, job), user="ann").body, f"GET {path} shows no secret")
        for way in {"post", "put", "delete", "patch"} & set(ways) if path not in OPEN_TO_ALL else ():
            answer = world.ask(way.upper(), _filled(path, job), BODIES.get(path), "ann")
            hold(answer.status == 403, f"{way} {path} is forbidden, not {answer.status} {answer.body[:80]!r}")
    stream = world.ask("GET", "/v1/events?after=0&wait_s=0", user="ann")
    hold(stream.status == 200 and b"SECRET" not in stream.body, "nor does the stream of events")
    hold(world.show(job)["status"] == "running", "the job runs on")
    hold(not world.ask("GET", "/v1/closures").data["closures"], "no GPU is closed")
    world.ask("POST", f"/v1/jobs/{job}/cancel", user="bob")
    world.reach(job, "cancelled")


@case("wrong numbers and names for groups, shares, drains and reservations", "each is refused in one line", short=True)
def wrong_settings(world: World) -> None:
    for way, path, bodies in WRONG_SETTINGS:
        for body in bodies:
            answer = world.ask(way, path, body)
            hold(answer.refused, f"{way} {path[:40]} {body[:40]!r} is refused in one line, not {answer.status}")
    hold(not world.ask("GET", "/v1/closures").data["closures"], "no GPU is closed")


@case("a user submits for another user, another group, and a longer time than the group allows", "it is refused, and "
      "accounts name the user of the token")  # fmt: skip
def other_accounts(world: World) -> None:
    for way, path, body in [("PUT", "/v1/groups/small", {"cap": 1, "max_limit_s": 60.0}),
                            ("PUT", "/v1/users/ann/group", {"group": "small"})]:  # fmt: skip
        hold(world.ask(way, path, body).status == 200, f"{path} is settled")
    spec = {"command": ["true"], "directory": "/tmp"}
    try:
        for more in ({"user": "bob"}, {"group": "large"}, {"limit_s": 61.0}, {"limit_s": 0}, {"limit_s": 1e99},
                     {"grace_s": 86_400.0}, {"gpus": 2}):  # fmt: skip
            hold(world.ask("POST", "/v1/jobs", {**spec, **more}, "ann").refused, f"{more} is refused in one line")
        jobs = [world.submit("sleep 1", "ann", project="of-bob") for _ in range(3)]
        most = 0
        while (left := [row for row in world.jobs() if row["job"] in jobs]) and time.sleep(0.05) is None:
            most = max(most, sum(row["status"] not in ("pending",) for row in left))
        hold(most == 1, f"one of them runs at a time, not {most}")
        rows = world.ask("GET", "/v1/usage?by=user,group,project", user="bob").data["rows"]
        own = [row for row in rows if row["project"] == "of-bob"]
        hold([(row["user"], row["group"]) for row in own] == [("ann", "small")], f"they count for ann, not {own}")
    finally:
        world.ask("PUT", "/v1/users/ann/group", {"group": None})


@case("a job ignores its time limit and SIGTERM", "it is gone within its time to leave", short=True)
def ignored_limit(world: World) -> None:
    job = world.submit("trap '' TERM HUP INT; while :; do sleep 0.2; done", limit_s=1.0, retries=5)
    began = time.monotonic()
    row = world.reach(job, *ENDED)
    hold(row["reason"].startswith("ran to its limit"), f"its limit ended it, not {row['reason']!r}")
    hold(time.monotonic() - began < 20.0, "within seconds")


@case(
    "the service is killed and its journal deleted after caps, time limits and drains were settled",
    "they come back, also for jobs that wait",
    own=RUN,
    fresh=True,
)
def lost_settings(world: World) -> None:
    settled = [("PUT", "/v1/groups/red", {"cap": 1, "default_limit_s": 50.0, "max_limit_s": 60.0}),
               ("PUT", "/v1/users/ann/group", {"group": "red"}), ("PUT", "/v1/fair-share", {"strength": 0.5}),
               ("POST", "/v1/drains", {"gpus": "node0:1"})]  # fmt: skip
    for way, path, body in settled:
        hold(world.ask(way, path, body).status in (200, 201), f"{path} is settled")
    jobs = [world.submit("sleep 5", "ann") for _ in range(2)]
    world.reach(jobs[0], "running")
    world.kill()
    lose_journal(world)
    world.serve()
    (group,) = world.ask("GET", "/v1/groups").data["groups"]
    hold((group["cap"], group["max_limit_s"]) == (1, 60.0), f"cap and limit are as before, not {group}")
    hold(world.ask("GET", "/v1/groups").data["fair_share"]["strength"] == 0.5, "shares, too")
    hold([one["name"] for one in world.ask("GET", "/v1/closures").data["closures"]] == ["node0:1"], "and the drain")
    hold(all(world.show(job)["limit_s"] == 50.0 for job in jobs), "jobs that are found have the limit of their group")
    longer = world.ask("POST", "/v1/jobs", {"command": ["true"], "directory": "/tmp", "limit_s": 99.0}, "ann")
    hold(longer.refused, "a longer limit is refused")


@case("a token is revoked, and its user gets a new one at once", "the streams of the old one end")
def renewed_token(world: World) -> None:
    uid = {"uid": 7_000_309} if world.root else {}
    token = world.ask("POST", "/v1/users", {"name": "eve", **uid}).data["token"]
    connection = http.client.HTTPConnection("127.0.0.1", world.port, timeout=PATIENCE_S)
    connection.request("GET", "/v1/events", headers={"Authorization": f"Bearer {token}"})
    stream = connection.getresponse()
    hold(b"Hello" in stream.readline() + stream.readline(), "the stream begins")
    world.ask("DELETE", "/v1/users/eve")
    world.ask("POST", "/v1/users", {"name": "eve", **uid})
    began = time.monotonic()
    with contextlib.suppress(TimeoutError):
        stream.read()
        connection.close()
        hold(time.monotonic() - began < 5.0, "the stream ends at once, although nothing happens")
        return
    hold(False, "the stream has ended")


@contextlib.contextmanager
def _hook(answers: bool) -> Iterator[tuple[int, list[str]]]:
    """A web server that keeps what arrives, or one that answers byte by byte and never ends."""
    got: list[str] = []
    ended = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
            if answers:
                self.send_response(200)
                self.end_headers()
            with contextlib.suppress(OSError):
                while not answers and not ended.wait(0.2):
                    self.wfile.write(b"x")

        def log_message(self, *words: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port, got
    finally:
        ended.set()
        server.shutdown()
        server.server_close()


@case("webhooks of jobs name this machine in ten ways", "none of them is contacted", short=True)
def private_webhooks(world: World) -> None:
    with _hook(answers=True) as (port, got):
        jobs = []
        for host in PRIVATE_HOSTS:
            notify = {"notify": {"end": f"http://{host}:{port}/"}}
            answer = world.ask("POST", "/v1/jobs", {"command": ["true"], "directory": "/tmp", **notify}, "ann")
            jobs += [answer.data["job"]] if answer.status == 201 else []
        for job in jobs:
            world.reach(job, *ENDED)
        time.sleep(1.0)
        hold(not got, f"nothing arrives, not {got}")


@case("six webhooks of one user answer byte by byte and never end", "another user's notice arrives within seconds",
      own=("--notify-private",))  # fmt: skip
def slow_webhooks(world: World) -> None:
    with _hook(answers=False) as (slow, stuck), _hook(answers=True) as (quick, got):
        jobs = [world.submit("true", "ann", notify={"end": f"http://127.0.0.1:{slow}/"}) for _ in range(6)]
        for job in jobs:
            world.reach(job, *ENDED)
        world.until(lambda: stuck, "the slow ones are sent")
        world.reach(world.submit("true", "bob", notify={"end": f"http://127.0.0.1:{quick}/"}), *ENDED)
        world.until(lambda: got, "the notice of the other user arrives", 15.0)
        hold(json.loads(got[0])["user"] == "bob", "it is that one")


@case("a user, an agent's token and a browser use each other's paths of a service for agents", "each is refused in one "
      "line", where=ROOT_ONLY, own=("--executor", "agents"))  # fmt: skip
def paths_of_agents(world: World) -> None:
    token = world.ask("POST", "/v1/nodes", {"name": "n1"}).data["token"]
    agent = {"Authorization": f"Bearer {token}"}
    closed = [("GET", "/v1/jobs"), ("POST", "/v1/jobs"), ("GET", "/v1/users"), ("GET", "/v1/events"),
              ("PUT", "/v1/nodes/n1"), ("POST", "/v1/drains"), ("GET", "/v1/nodes"), ("GET", "/metrics")]  # fmt: skip
    for way, path in closed:
        answer = world.ask(way, path, {}, **agent)
        hold(answer.status == 403 and answer.refused, f"{way} {path} is closed to agents, not {answer.status}")
    hold(world.ask("POST", "/session", {"token": token}).status == 401, "an agent's token opens no browser session")
    for path in ("/v1/agents/sync", "/v1/agents/logs", "/v1/agents/snapshot?job=1"):
        way = "GET" if "snapshot" in path else "POST"
        hold(world.ask(way, path, {}, "ann").status == 403, f"{path} is closed to users")
        hold(world.ask(way, path, {}).status == 403, f"{path} is closed to the administrator")
    bodies = [b"", b"null", b"[]", b"{}", b"[" * 100_000, b'{"node":"n2"}', b"\xff", b'{"node":"n1"}', b"9" * 9999,
              b'{"node":"n1","node":"n2"}']  # fmt: skip
    for body in bodies:
        answer = world.ask("POST", "/v1/agents/sync", body, **agent)
        hold(answer.refused, f"{body[:30]!r} is refused in one line, not {answer.status} {answer.body[:99]!r}")
    log = "/v1/agents/logs?job=1&attempt=1&rank=0&stream=stdout&offset=0"
    hold(world.ask("POST", log, b"x", **agent).status == 404, "no log of a job that is not there is written")
    hold(world.ask("GET", "/v1/agents/snapshot?job=1", **agent).status == 404, "nor is a snapshot given away")
    world.ask("DELETE", "/v1/nodes/n1/token")
    hold(world.ask("POST", "/v1/agents/sync", {}, **agent).status == 401, "a revoked token opens nothing")


@case("a door of a worker is called by another user of the machine, and by its own job", "only the service may call it",
      where=ROOT_ONLY)  # fmt: skip
def called_doors(world: World) -> None:
    victim = world.submit("echo ready; exec cat", "bob", terminal=True)
    world.until(lambda: "ready" in world.stdout(victim), "the terminal is there")
    door = world.home / "jobs" / victim / "attempt-1" / "rank-0" / "door"
    hold(door.exists(), "its door is there")
    call = ("import socket,sys; s=socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]);"
            "s.sendall(b'{\"do\":\"run\",\"command\":[\"id\"]}\\n'); print('OPENED', s.recv(99))")  # fmt: skip
    for user in ("ann", "bob"):
        job = world.submit(f'PATH=/usr/bin:/bin; python3 -c "{call.replace(chr(34), chr(92) + chr(34))}" {door}', user)
        world.reach(job, *ENDED)
        hold("OPENED" not in world.stdout(job), f"{user} cannot call the door: {world.stdout(job)[:99]}")
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as caller:
        caller.connect(str(door))
        caller.sendall(b"[" * 5000 + b"\n")
        hold(caller.recv(99) == b"", "what is no request closes the connection")
    hold(world.show(victim)["status"] == "running", "the job runs on")
    world.ask("POST", f"/v1/jobs/{victim}/cancel", user="bob")
