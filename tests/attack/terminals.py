"""Attacks on the terminals of jobs and on commands beside workers."""

import base64
import http.client
import json
import time

from tests.attack.case import ROOT_ONLY, case
from tests.attack.world import PATIENCE_S, World, hold

TYPIST = "0123456789abcdef"


def _keys(data: bytes = b"", number: int = 1, **more: object) -> dict[str, object]:
    return {"typist": TYPIST, "number": number, "data": base64.b64encode(data).decode(), **more}


def _terminal(world: World, script: str = "echo ready; exec cat", user: str = "ann") -> str:
    """Start a job with a terminal and wait until it shows something."""
    job = world.submit(script, user, terminal=True)
    world.until(lambda: "ready" in world.stdout(job), "a terminal shows what its program prints")
    return job


def _stream(world: World, method: str, path: str, data: object, user: str) -> http.client.HTTPConnection:
    """Open a stream that is never read."""
    connection = http.client.HTTPConnection("127.0.0.1", world.port, timeout=PATIENCE_S)
    headers = {"Authorization": f"Bearer {world.tokens[user]}", "Content-Type": "application/json"}
    connection.request(method, path, json.dumps(data) if data else None, headers)
    return connection


@case("keys for, output of, and commands beside the job of another user", "all of it is refused, and nothing arrives")
def terminals_of_others(world: World) -> None:
    job = _terminal(world)
    tries = [("GET", "terminal", None), ("POST", "terminal", _keys(b"stolen\r")),
             ("POST", "exec", {"command": ["id"]}), ("POST", "exec/1", _keys(b"stolen\r"))]  # fmt: skip
    for method, path, data in tries:
        answer = world.ask(method, f"/v1/jobs/{job}/{path}", data, user="bob")
        hold(answer.status == 403 and answer.refused, f"{method} {path} of another user is refused")
    hold(world.ask("POST", f"/v1/jobs/{job}/terminal", _keys(b"own\r"), user="ann").status == 200, "the owner may type")
    world.until(lambda: "own" in world.stdout(job), "what the owner types arrives")
    hold("stolen" not in world.stdout(job), "what another user types does not")
    world.ask("POST", f"/v1/jobs/{job}/cancel", user="ann")


@case("keys and commands that are none: huge, wrong, deep, for jobs without terminals", "each is refused in one line")
def keys_that_are_none(world: World) -> None:
    job, plain = _terminal(world), world.submit("sleep 60")
    world.reach(plain, "running")
    wrong: list[object] = [
        b"", b"null", b"[" * 5000, {}, _keys(b"x" * 100_000), _keys(rows=0, columns=0), _keys(rows=10**9, columns=1),
        _keys(number=-1), _keys(number=10**30), {**_keys(), "typist": "../../x"}, {**_keys(), "data": "\0"},
        {**_keys(), "data": "é"}, {**_keys(), "do": "run"},
    ]  # fmt: skip
    for data in wrong:
        answer = world.ask("POST", f"/v1/jobs/{job}/terminal", data, user="ann")
        hold(answer.refused, f"{str(data)[:60]} is refused in one line, not {answer.status}")
    for command in ([], [1], "id", ["x" * 200_000], ["id"] * 20_000, None):
        answer = world.ask("POST", f"/v1/jobs/{plain}/exec", {"command": command}, user="ann")
        hold(answer.refused, f"{str(command)[:40]} is refused in one line, not {answer.status}")
    half = world.ask("POST", f"/v1/jobs/{plain}/exec", {"command": ["id"], "rows": 5}, user="ann")
    hold(half.status == 422 and half.refused, f"half of a size is refused in one line, not {half.status}")
    hold(world.ask("POST", f"/v1/jobs/{plain}/terminal", _keys(b"x"), user="ann").status == 409, "there is no terminal")
    hold(
        world.ask("POST", f"/v1/jobs/{job}/terminal", _keys(b"alive\r"), user="ann").status == 200, "one that is works"
    )
    for one in (job, plain):
        world.ask("POST", f"/v1/jobs/{one}/cancel", user="ann")


@case("floods of output and of keys that nobody reads, from a terminal and from commands", "others are answered, memory"
      " stays bounded, and all of it ends with its job")  # fmt: skip
def floods_of_terminals(world: World) -> None:
    flooding, deaf = _terminal(world, "echo ready; exec yes"), _terminal(world, "echo ready; exec sleep 600")
    before = world.memory()
    streams = [_stream(world, "GET", f"/v1/jobs/{flooding}/terminal", None, "ann") for _ in range(20)]
    commands = [_stream(world, "POST", f"/v1/jobs/{deaf}/exec", {"command": ["yes"]}, "ann") for _ in range(30)]
    for number in range(20):
        world.ask("POST", f"/v1/jobs/{deaf}/terminal", _keys(b"x" * 40_000, number), user="ann")
    began = time.monotonic()
    hold(world.ask("GET", "/v1/jobs", user="bob").status == 200, "another user is answered")
    hold(time.monotonic() - began < 5.0, "within seconds")
    hold(world.memory() - before < 100 << 20, "the service keeps little for clients that do not read")
    for job in (flooding, deaf):
        world.ask("POST", f"/v1/jobs/{job}/cancel", user="ann")
        world.reach(job, "cancelled")
    for connection in streams + commands:
        connection.close()


@case("a service of root: files of root by a terminal, its door and its log", "a terminal may what its owner may",
      where=ROOT_ONLY)  # fmt: skip
def rights_of_terminals(world: World) -> None:
    tricks = "cd $CARPOOL_WORKER_DIR; mv door x; rm -f door stdout.log rank.json; ln -sf /etc/shadow stdout.log"
    job = _terminal(
        world, f"({tricks}) 2>/dev/null; cat /etc/shadow $CARPOOL_WORKER_DIR/rank.json; id -u; echo ready; cat"
    )
    printed = world.stdout(job)
    hold("root:" not in printed and '"nonce"' not in printed, "it reads no file of root")
    uid = str(world.show(job)["user"] == "ann" and 7_000_301)
    hold(uid in printed, "it runs as its owner")
    answer = world.ask(
        "POST", f"/v1/jobs/{job}/exec", {"command": ["sh", "-c", "id -u; kill -9 $PPID; echo tried"]}, "ann"
    )
    shown = b"".join(base64.b64decode(json.loads(line[6:])["data"]) for line in answer.body.splitlines()
                     if line.startswith(b"data:") and b'"stream": "stdout"' in line)  # fmt: skip
    hold(shown.decode().split() == [uid, "tried"], "a command beside it, too, and it cannot kill its wrapper")
    hold(
        world.ask("POST", f"/v1/jobs/{job}/terminal", _keys(b"alive\r"), user="ann").status == 200,
        "the door still opens",
    )
    world.ask("POST", f"/v1/jobs/{job}/cancel", user="ann")
