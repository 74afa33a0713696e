"""Checkpoints on their way between a node and the service: pieces, hashes, hostile archives, and what is said."""

import hashlib
import io
import os
import tarfile

import pytest

from carpool.errors import InputError
from carpool.live.agent.checkpoints import CheckpointCopies
from carpool.live.agent.road import NoAnswer, Turned
from carpool.live.checkpoint_archive import pack_folder, unpack_folder
from carpool.live.executors.base import Launch
from carpool.live.executors.fetched_checkpoints import FetchedCheckpoints
from carpool.live.home import Home

KEY = ("7", 1)
MOST = 1 << 20


def made(home):
    home.create()
    return home


@pytest.fixture
def store(tmp_path):
    return FetchedCheckpoints(made(Home(tmp_path / "service")), MOST)


class DirectRoad:
    """A road to a store without HTTP, which may lose answers and cut pieces short."""

    def __init__(self, store, node="a"):
        self.store, self.node = store, node
        self.lost, self.refusal, self.damaged, self.pieces = 0, None, 0, 0

    def _answer(self):
        if self.refusal is not None:
            raise self.refusal
        if self.lost:
            self.lost -= 1
            raise NoAnswer("the answer was lost")

    def send_checkpoint(self, data, job, attempt, offset, size, sha256):
        self.pieces += 1
        found = self.store.receive((job, attempt), None, offset, data[: 1 << 16], size, sha256)
        self._answer()
        return found

    def leave_checkpoint(self, job, attempt, why):
        self.store.leave(job, attempt, self.node, why)

    def offered_checkpoint(self, job):
        self._answer()
        found = self.store.offer(job, self.node)
        if found is None:
            raise Turned(404, "there is none")
        return found.size, found.sha256

    def read_checkpoint(self, job, offset):
        self._answer()
        data = self.store.read(job, offset)[: 1 << 16]
        if self.damaged:
            self.damaged -= 1
            return bytes(len(data))
        return data

    def took_checkpoint(self, job):
        self.store.taken(job)


def node(tmp_path, road, name="a"):
    found = CheckpointCopies(made(Home(tmp_path / name)), road)
    found.most_bytes = MOST
    return found


def save(copies, data, job="7"):
    folder = copies._home.checkpoints(job)
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(data)
    (folder / "deep").mkdir()
    (folder / "last").symlink_to("weights")
    return folder


def launch(attempt):
    return Launch("7", attempt, (0,), ("true",), "/", {})


@pytest.mark.parametrize("lost", [0, 1, 5])
def test_a_checkpoint_moves_from_node_to_node(tmp_path, store, lost, monkeypatch):
    monkeypatch.setattr("carpool.live.agent.checkpoints.AGAIN_S", 0.0)
    road, data = DirectRoad(store), os.urandom(300_000)
    first, second = node(tmp_path, road), node(tmp_path, DirectRoad(store, "b"), "b")
    folder = save(first, data)
    road.lost = lost
    first.send(KEY, lambda: True)
    assert road.pieces >= 5
    assert not folder.exists()
    assert store.left("7") == ""
    assert (store._home.checkpoints("7") / "last").read_bytes() == data
    second._road.lost = lost
    second.fetch(launch(2), lambda: True)
    assert (second._home.checkpoints("7") / "last").read_bytes() == data
    for home in (first._home, second._home, store._home):
        assert not [
            path for path in home.path.rglob(".*") if path.name[1:].startswith(("sending", "fetch", "arr", "l"))
        ]


def test_a_first_attempt_fetches_nothing(tmp_path, store):
    copies = node(tmp_path, None)
    copies.fetch(launch(1), lambda: True)


def test_what_does_not_arrive_as_it_was_sent_is_fetched_again(tmp_path, store):
    road = DirectRoad(store)
    copies = node(tmp_path, road)
    save(copies, os.urandom(100_000))
    copies.send(KEY, lambda: True)
    road.damaged = 1
    copies.fetch(launch(2), lambda: True)
    assert copies._home.checkpoints("7").exists()
    road.damaged = 10_000
    with pytest.raises(OSError, match="did not arrive as it was sent"):
        copies.fetch(launch(3), lambda: True)


def test_what_stays_on_its_node_is_said_and_goes_on_there(tmp_path, store):
    copies = node(tmp_path, DirectRoad(store))
    folder = save(copies, os.urandom(2 * MOST))
    copies.send(KEY, lambda: True)
    assert "attempt 1 is on node a only (it holds more than 1 MiB" in store.left("7")
    assert "starts from its beginning" in store.left("7")
    copies.fetch(launch(2), lambda: True)
    assert (folder / "weights").stat().st_size == 2 * MOST
    store.written_here("7", 3)
    assert store.left("7") == ""


def test_an_older_checkpoint_goes_to_other_nodes_and_does_not_replace_a_later_one(tmp_path, store):
    copies, other = node(tmp_path, DirectRoad(store)), node(tmp_path, DirectRoad(store, "b"), "b")
    save(copies, b"older")
    copies.send(KEY, lambda: True)
    folder = save(copies, os.urandom(2 * MOST))
    copies.send(("7", 2), lambda: True)
    assert "elsewhere it goes on from that of attempt 1" in store.left("7")
    copies.fetch(launch(3), lambda: True)
    assert (folder / "weights").stat().st_size == 2 * MOST
    other.fetch(launch(3), lambda: True)
    assert (other._home.checkpoints("7") / "weights").read_bytes() == b"older"
    (other._home.checkpoints("7") / "weights").write_bytes(b"newest")
    other.send(("7", 3), lambda: True)
    assert store.left("7") == ""
    copies.fetch(launch(4), lambda: True)
    assert (folder / "weights").read_bytes() == b"newest"


def test_a_job_that_the_service_gave_up_keeps_its_files(tmp_path, store):
    road = DirectRoad(store)
    copies = node(tmp_path, road)
    folder = save(copies, b"x")
    road.refusal = Turned(404, "no such job")
    copies.send(KEY, lambda: True)
    assert folder.exists()
    assert store.left("7") == ""
    road.refusal = NoAnswer("away")
    copies.send(KEY, lambda: False)
    assert folder.exists()


def archive(*members):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as packed:
        for name, kind, content in members:
            info = tarfile.TarInfo(name)
            info.type = kind
            if kind == tarfile.REGTYPE:
                info.size = len(content)
                packed.addfile(info, io.BytesIO(content))
            else:
                info.linkname = content
                packed.addfile(info)
    return file.getvalue()


HOSTILE = [
    archive(("../outside", tarfile.REGTYPE, b"x")),
    archive(("/outside", tarfile.REGTYPE, b"x")),
    archive(("link", tarfile.SYMTYPE, "/etc"), ("link/passwd", tarfile.REGTYPE, b"x")),
    archive(("link", tarfile.SYMTYPE, "../../..")),
    archive(("pipe", tarfile.FIFOTYPE, "")),
    archive(("large", tarfile.REGTYPE, bytes(4 * MOST))),
    b"no archive",
]


@pytest.mark.parametrize("data", HOSTILE, ids=range(len(HOSTILE)))  # an archive has the time in it
def test_a_hostile_archive_is_refused_and_what_was_there_stays(tmp_path, store, data):
    before = store._home.checkpoints("7")
    before.mkdir(parents=True)
    (before / "kept").touch()
    with pytest.raises(InputError):
        store.receive(KEY, None, 0, data, len(data), hashlib.sha256(data).hexdigest())
    assert [path.name for path in before.iterdir()] == ["kept"]
    assert [path.name for path in before.parent.iterdir()] == ["checkpoints"], "nothing is left over"
    assert not (tmp_path / "service" / "jobs" / "outside").exists()
    assert store.record("7").attempt == 0


def test_a_link_that_leads_outside_is_named(store):
    data = archive(("last", tarfile.SYMTYPE, "/elsewhere/weights"))
    with pytest.raises(InputError, match=r"^file 'last': is a link that leaves the directory"):
        store.receive(KEY, None, 0, data, len(data), hashlib.sha256(data).hexdigest())


def test_links_that_name_the_folder_by_its_path_lead_to_the_new_one(tmp_path, store):
    copies, other = node(tmp_path, DirectRoad(store)), node(tmp_path, DirectRoad(store, "b"), "b")
    folder = save(copies, b"weights")
    (folder / "deep" / "latest").symlink_to(folder / "weights")
    (folder / "newest").symlink_to(folder / "deep")
    copies.send(KEY, lambda: True)
    assert store.left("7") == ""
    other.fetch(launch(2), lambda: True)
    fetched = other._home.checkpoints("7")
    assert (os.readlink(fetched / "deep" / "latest"), os.readlink(fetched / "newest")) == ("../weights", "deep")
    assert (fetched / "newest" / "latest").read_bytes() == b"weights"


def test_an_archive_with_another_hash_begins_anew(store):
    data = archive(("a", tarfile.REGTYPE, b"x"))
    assert store.receive(KEY, None, 0, data, len(data), "0" * 64) == (0, False)
    assert not store._home.checkpoints("7").exists()


def test_the_same_folder_gives_the_same_archive(tmp_path, monkeypatch):
    """So an agent that starts anew goes on with what it had sent."""
    folder = tmp_path / "folder"
    for name in ("b/x", "a/y", "c"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    archives = []
    for now in (1e9, 2e9):
        monkeypatch.setattr("time.time", lambda now=now: now)
        archives.append(io.BytesIO())
        pack_folder(folder, archives[-1], MOST)
    assert archives[0].getvalue() == archives[1].getvalue()


def test_a_link_in_place_of_a_file_is_sent_as_a_link(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "secret").symlink_to("/etc/hostname")
    file = io.BytesIO()
    pack_folder(folder, file, MOST)
    file.seek(0)
    with tarfile.open(fileobj=file) as packed:
        assert packed.getmember("secret").issym()


@pytest.mark.skipif(os.getuid() != 0, reason="only root changes users")
def test_files_are_read_with_the_rights_of_their_owner(tmp_path):
    """A file that only root may read does not get into the archive of a user."""
    tmp_path.chmod(0o711)
    for above in tmp_path.parents:
        if above.stat().st_uid == 0 and not above.stat().st_mode & 0o001:
            above.chmod(above.stat().st_mode | 0o001)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "own").write_text("x")
    (folder / "roots").write_text("secret")
    (folder / "roots").chmod(0o600)
    os.chown(folder, 1, 1)
    os.chown(folder / "own", 1, 1)
    with pytest.raises(InputError, match="cannot be read"):
        pack_folder(folder, io.BytesIO(), MOST)


@pytest.mark.skipif(os.getuid() != 0, reason="only root changes users")
def test_a_checkpoint_is_packed_where_its_user_cannot_enter_the_folders_above(tmp_path):
    """A service whose nodes have homes of their own lets no user into its own."""
    above = tmp_path / "above"
    above.mkdir(mode=0o700)
    folder = above / "folder"
    folder.mkdir(mode=0o700)
    (folder / "own").write_text("x")
    os.chown(folder, 1, 1)
    os.chown(folder / "own", 1, 1)
    file = io.BytesIO()
    pack_folder(folder, file, MOST)
    file.seek(0)
    with tarfile.open(fileobj=file) as packed:
        assert packed.getnames() == ["own"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root changes users")
def test_all_that_is_unpacked_belongs_to_the_user_also_links_to_folders(tmp_path):
    folder = tmp_path / "folder"
    (folder / "step-1" / "deep").mkdir(parents=True)
    (folder / "step-1" / "deep" / "weights").write_text("x")
    (folder / "last").symlink_to("step-1")
    (folder / "newest").symlink_to("step-1/deep/weights")
    packed = tmp_path / "packed"
    with packed.open("wb") as file:
        pack_folder(folder, file, MOST)
    unpack_folder(packed, tmp_path / "unpacked", 1, MOST)
    found = [tmp_path / "unpacked", *(tmp_path / "unpacked").rglob("*")]
    assert len(found) == 6
    assert {(path.name, path.lstat().st_uid) for path in found} == {(path.name, 1) for path in found}
