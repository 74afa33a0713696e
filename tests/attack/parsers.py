"""Every parser that reads what others wrote: with what, where its valid inputs are, and how it may refuse.

`PARSERS` is the table. A parser is called with the bytes of an input and an empty folder. It returns, or raises one of
the errors that its callers handle; anything else is a defect. A parser whose `refuses` is empty must never raise: its
callers take what they get.
"""

import asyncio
import contextlib
import io
import json
import random
import shutil
import sqlite3
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from carpool import channel
from carpool.channel import Report
from carpool.core import codec, snapshot
from carpool.core.perf import ConstantInterference, FittedModel
from carpool.core.scheduler import Scheduler
from carpool.errors import InputError
from carpool.field_types import FieldError
from carpool.job_schema import FIELDS
from carpool.live import unpack
from carpool.live.commands import job_file
from carpool.live.executors import gang, wire
from carpool.live.executors.cluster_gang import END_FILE, PARTS_FILE, read_end, read_parts
from carpool.live.executors.memory import MemoryExecutor
from carpool.live.executors.nodes import NodeBook
from carpool.live.executors.processes import ProcessIdentity
from carpool.live.executors.registry import check_executor
from carpool.live.home import Home
from carpool.live.http import gate, sessions
from carpool.live.journal.store import DAMAGE
from carpool.live.service.cancellations import CancelFile
from carpool.live.service.config import ServiceConfig
from carpool.live.service.operator_settings import OperatorSettings
from carpool.live.service.retention import RetentionLedger
from carpool.live.service.service import open_service
from carpool.live.service.users import Users
from carpool.live.spec import from_json
from carpool.live.worker_directory import GO
from carpool.policies import make
from carpool.profile import rows, schema
from carpool.profile.interference import read_interference
from carpool.profile.measure import raw
from carpool.report.paper import config as paper
from carpool.sim import sources, study, workload
from carpool.sim.run import parse_cluster
from tests.attack.mutate import variant

HERE = Path(__file__).parent
CORPUS = HERE / "corpus"
OLD = HERE.parent / "compat" / "data" / "v0.1"
EXAMPLES = HERE.parents[1] / "examples"
LIBRARY = Path(schema.__file__).parent / "library"


@dataclass(frozen=True)
class Parser:
    """A parser and its inputs."""

    parse: Callable[[bytes, Path], object]
    refuses: tuple[type[Exception], ...] = (InputError,)
    """Errors that its callers handle."""
    seeds: tuple[Path, ...] = ()
    """Valid inputs besides those in the corpus's folder of its name."""
    weight: float = 1.0
    """Share of the usual number of inputs that it gets, because it is slow."""


def written(name: str, read: Callable[[Path], object]) -> Callable[[bytes, Path], object]:
    """Return a parser of a file with this name."""

    def parse(data: bytes, folder: Path) -> object:
        (folder / name).write_bytes(data)
        return read(folder / name)

    return parse


def lines(read: Callable[[str], object]) -> Callable[[bytes, Path], object]:
    """Return a parser of one line of text, such as an option."""
    return lambda data, folder: read(data.decode("utf-8", "replace"))


def archive(data: bytes, folder: Path) -> None:
    """Unpack, and look that nothing was written beside the target."""
    unpack.unpack(io.BytesIO(data), folder / "in" / "target", most_bytes=1 << 20, most_files=100)


def unpacked(data: bytes, folder: Path) -> None:
    (folder / "in").mkdir()
    try:
        archive(data, folder)
    finally:
        assert [path.name for path in folder.iterdir()] == ["in"]
        assert [path.name for path in (folder / "in").iterdir()] in ([], ["target"])
        for path in (folder / "in").rglob("*"):
            assert path.resolve().is_relative_to(folder.resolve() / "in" / "target") or path.is_symlink()


def event(data: bytes, folder: Path) -> None:
    """As `Store` reads a row; what it cannot read is set aside."""
    for line in filter(None, data.split(b"\n")):
        codec.encode(codec.decode(json.loads(line)))


def state(data: bytes, folder: Path) -> None:
    read = json.loads(data)
    snapshot.restore(
        read, FittedModel(schema.load("t4").core_tasks(), ConstantInterference(1.0), 4), lambda job, now: (0.0,), 2, 8
    )


def reports(data: bytes, folder: Path) -> None:
    for name in (channel.REPORT, channel.WATCH):
        (folder / name).write_bytes(data)
        channel.read_report(folder)
    # a worker can make the checksum right
    if len(data) > channel._BODY_BYTES:
        record = bytearray(channel.pack(Report(), 1))
        record[channel._HEAD.size : channel._BODY_BYTES] = data[channel._HEAD.size : channel._BODY_BYTES]
        channel._SEAL.pack_into(record, channel._BODY_BYTES, channel.zlib.crc32(record[: channel._BODY_BYTES]))
        (folder / channel.REPORT).write_bytes(record)
        assert channel.read_report(folder) is not None


def control(data: bytes, folder: Path) -> None:
    (folder / channel.CONTROL).write_bytes(data)
    channel.read_control(folder)
    reader = channel.ControlReader(folder)
    reader.read()
    reader.close()


def gang_files(data: bytes, folder: Path) -> None:
    """Each file of an attempt takes its turn to be the damaged one."""
    whole = folder / "whole"
    shutil.copytree(CORPUS / "gang-home", whole)
    (whole / GO).write_text('"nonce"')
    for name in ("gang.json", "broken.json", "rank-0/exit.json", "rank-0/process.json", "rank-0/pause.json"):
        before = (whole / name).read_bytes() if (whole / name).exists() else b""
        (whole / name).write_bytes(data)
        found = gang.open_gang(whole, ("1", 1))
        if found is not None:
            found.ended()
            assert found.started_at is None or found.started_at == found.started_at
            assert len(found.ranks) < 10_000
        ProcessIdentity.of(gang.read_object(whole / name))
        (whole / name).write_bytes(before)


def home_files(data: bytes, folder: Path) -> None:
    """The files of the service itself, after a fault of the disk."""
    home = Home(folder)
    for path in (home.users, home.address, home.retention, home.cancelled, home.settings):
        path.write_bytes(data)
    tasks = schema.load("t4").core_tasks()
    scheduler = Scheduler(make("fifo"), FittedModel(tasks, ConstantInterference(1.0), 4), 2, 8)
    settings = OperatorSettings(home, scheduler.state, "")
    for event in (*settings.lost_groups(1.0), *settings.lost_closures(1.0)):
        scheduler.state.apply(event)
    users = Users.load(home, {"ann": {"uid": 5}})
    users.lost_limits({})
    for name in users.rows:
        users.doubt(name)
    assert users.separate in (True, False)
    home.read_address()
    ledger = RetentionLedger(home.retention)
    ledger.count(1.0, ["1"])
    ledger.announce("1", "files")
    ledger.removed("1", "files", "old", 1.0)
    ledger.write()
    CancelFile(home.cancelled).prepare()


def options(text: str) -> None:
    for field in FIELDS:
        try:
            field.type.from_option(text)
        except FieldError as error:
            one_line(error)
        try:
            field.type.from_cell(text)
        except FieldError as error:
            one_line(error)
    for read in (sources.parse_seeds, sources.parse_loads, sources.expand_selection, parse_cluster):
        try:
            read(text)
        except InputError as error:
            one_line(error)
    if len(text) % 4 == 0:  # it looks through all installed packages
        with contextlib.suppress(InputError):
            check_executor(text)
    if "/" not in text and ".py" not in text:  # no file of somebody else is loaded as a policy
        try:
            make(text)
        except InputError as error:
            one_line(error)
    try:
        read_interference(text)
    except InputError as error:
        one_line(error)


def body(data: bytes, folder: Path) -> None:
    """What the gate of the API does with a body before any route sees it."""
    gate.check_body(data)


def session(data: bytes, folder: Path) -> None:
    """Read a Cookie header and the key of a page, with a line between them."""
    cookie, _, key = data.partition(b"\n")
    token = sessions.join(sessions.find_cookie([cookie]), key.decode("latin-1"))
    assert isinstance(token, str)


def one_line(error: Exception) -> None:
    text = str(error)
    assert text, "an error must say something"
    assert len(text.splitlines()) == 1, f"not one line: {text!r}"
    assert len(text) < 2000, f"a very long line: {text[:300]!r}"


def journal(data: bytes, folder: Path) -> None:
    """Start a service on a journal with some cells changed or replaced by the input, and ask everything of it."""
    home = Home(folder / "home")
    shutil.copytree(_sound_home(), home.path)
    with sqlite3.connect(home.journal) as base:
        drawn = random.Random(data)
        for table, column in drawn.sample(CELLS, drawn.choice((1, 1, 2, 5))):
            cells = base.execute(f"SELECT rowid, {column} FROM {table}").fetchall()
            if cells:
                row, before = drawn.choice(cells)
                old = str(before).encode()
                new = data if drawn.random() < 0.3 else variant(old, [old, data], drawn)
                text = new.decode("utf-8", "replace")
                base.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (text, row))
    base.close()
    asyncio.run(_ask_everything(home))


CELLS = [
    (table, column)
    for table, columns in {
        "meta": ("value",),
        "events": ("data", "at", "uptime"),
        "jobs": ("spec", "source", "story", "user", "name", "state", "ended", "submitted"),
        "snapshots": ("data",),
        "users": ("row",),
        "estimates": ("source", "value"),
    }.items()
    for column in columns
]
_MADE: list[Path] = []


def _sound_home() -> Path:
    """Return a home with jobs that wait, run and have ended; it is made once in a process."""
    if not _MADE:
        folder = Path(tempfile.mkdtemp(prefix="carpool-fuzz-"))
        asyncio.run(_fill(Home(folder / "home")))
        _MADE.append(folder / "home")
    return _MADE[0]


def forget() -> None:
    """Remove what `_sound_home` made."""
    while _MADE:
        shutil.rmtree(_MADE.pop().parent)


async def _fill(home: Home) -> None:
    executor = MemoryExecutor(gpus=2)
    service = await open_service(ServiceConfig(home, "sjf-bsbf", executor=executor, jobs_per_gpu=1))
    running = asyncio.create_task(service.run())
    spec = from_json(json.dumps({"command": ["true"], "directory": "/", "name": "n", "duration_s": 50.0}))
    await service.requests.put_user("ann", {"uid": 7_000_201, "token_hash": "x", "max_jobs": 3, "max_gpus": 2})
    jobs = await service.requests.submit([spec] * 4, "admin")
    for number, job in enumerate(jobs[:2]):
        while (job, 1) not in executor.gangs:
            await asyncio.sleep(0.005)
        executor.start((job, 1))
        if number == 0:
            executor.end((job, 1))
            await service.queries.wait(job)
    await service.close()
    await running


async def _ask_everything(home: Home) -> None:
    service = await open_service(ServiceConfig(home, "sjf-bsbf", executor=MemoryExecutor(gpus=2), jobs_per_gpu=1))
    try:
        for _ in range(4):
            await service.driver.turn()
        queries = service.queries
        listed = [row["job"] for row in queries.jobs(all=True)]
        for job in {*listed, "1", "2"}:
            for ask in (queries.show, queries.explain, queries.status):
                try:
                    ask(job)
                except InputError as error:
                    one_line(error)
        queries.gpus()
        await queries.history(limit=50)
        queries.accuracy()
        await queries.workload()
        queries.users()
    finally:
        await service.close()


def exchange(data: bytes, folder: Path) -> None:
    """Both messages between an agent and its service."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        raise InputError("the body is not JSON") from None
    kind = wire.NodeOrders if isinstance(found, dict) and "orders" in found else wire.NodeState
    message = wire.read(kind, found)
    for name in (message.orders if kind is wire.NodeOrders else message.parts) or ():
        wire.read_key(name)


def cluster_files(data: bytes, folder: Path) -> None:
    """The files that the service keeps about its nodes and about gangs over nodes."""
    for name in (PARTS_FILE, END_FILE):
        (folder / name).write_bytes(data)
    read_parts(folder, ("1", 1))
    read_end(folder)
    (folder / "nodes.json").write_bytes(data)
    NodeBook(folder / "nodes.json").load()


PARSERS = {
    "yaml": Parser(written("job.yaml", job_file.read), seeds=tuple(OLD.glob("job_files/*.y*ml"))),
    "toml": Parser(written("job.toml", job_file.read), seeds=tuple(OLD.glob("job_files/*.toml"))),
    "spec": Parser(lines(from_json), seeds=tuple(OLD.glob("spec*.json"))),
    "body": Parser(body, (gate.Refused,), seeds=tuple(OLD.glob("spec*.json"))),
    "options": Parser(lines(options), (), weight=0.1),
    "workload": Parser(written("jobs.csv", workload.read), seeds=(*OLD.glob("workloads/*.csv"), EXAMPLES / "jobs.csv")),
    "profile": Parser(written("p.json", schema.load), seeds=(*OLD.glob("profiles/*.json"), LIBRARY / "gavel.json")),
    "measurements": Parser(written("raw.jsonl", raw.read), seeds=tuple(OLD.glob("profiles/*.raw.jsonl"))),
    "throughput": Parser(written("t.csv", rows.read_throughput)),
    "matrix": Parser(written("m.csv", rows.read_matrix)),
    "pairs": Parser(written("pairs.json", lambda path: rows.read_pairs(path, "mps"))),
    "solo": Parser(written("solo.json", rows.read_solo)),
    "paper": Parser(written("paper.toml", paper.load), seeds=(Path(paper.__file__).parent / "paper.toml",), weight=0.3),
    "study-cache": Parser(written("cache.jsonl", study.RunCache), seeds=(OLD / "study-cache.jsonl",)),
    "event": Parser(event, DAMAGE, seeds=(OLD / "logs" / "every-event.jsonl",)),
    "snapshot": Parser(state, DAMAGE, seeds=(OLD / "snapshots" / "elastic.json",), weight=0.3),
    "journal": Parser(journal, (InputError,), weight=0.05),
    "archive": Parser(unpacked),
    "report": Parser(reports, ()),
    "control": Parser(control, ()),
    "gang": Parser(gang_files, (), weight=0.5),
    "home": Parser(home_files, (), weight=0.5),
    "exchange": Parser(exchange),
    "session": Parser(session, ()),
    "cluster-files": Parser(cluster_files),
}
"""All of them, by name."""


def seeds_of(name: str) -> list[bytes]:
    """Return the valid and once harmful inputs of a parser."""
    return [path.read_bytes() for path in (*sorted((CORPUS / name).glob("*")), *PARSERS[name].seeds)]
