"""A service of root looks at a user's files with that user's rights, and at nothing else."""

import asyncio
import contextlib
import os
import threading

import pytest

from carpool.live import accounts, foreign_files
from carpool.live.foreign_files import with_rights_of
from carpool.live.home import Home
from carpool.live.service.user_files import UserFiles
from carpool.live.spec import Spec
from tests.support.services import one, serving

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can take the rights of other users")
ALICE = 7_000_101


@pytest.fixture
def place(tmp_path):
    """A folder that all users can enter."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.getuid() and str(folder).startswith("/tmp/"):
            folder.chmod(0o755)
    return tmp_path


def private_file(place):
    (place / "train.py").touch(mode=0o600)


def file_of_roots_group(place):
    (place / "train.py").touch()
    (place / "train.py").chmod(0o640)


def file_in_a_private_folder(place):
    (place / "closed").mkdir(mode=0o700)
    (place / "closed/train.py").touch()
    (place / "train.py").symlink_to("closed/train.py")


def public_file(place):
    (place / "train.py").touch()
    (place / "train.py").chmod(0o644)


def own_file(place):
    private_file(place)
    os.chown(place / "train.py", ALICE, ALICE)


CLOSED, READABLE = (private_file, file_of_roots_group, file_in_a_private_folder), (public_file, own_file)


@pytest.mark.parametrize("make", CLOSED + READABLE)
async def test_only_what_its_owner_can_read_decides_the_family_of_a_job(place, make):
    make(place)
    spec, families = Spec(command=("python3", "train.py"), directory=str(place)), set()
    async with serving(Home(place / "home"), gpus=1, jobs_per_gpu=1) as service:
        await service.requests.put_user("alice", {"uid": ALICE})
        for content in ("guess", "truth"):
            (place / "train.py").write_text(content)
            job = await one(service, spec, "alice")
            families.add(service.state.jobs[job].job.model)
            await service.requests.cancel(job)
    assert len(families) == (2 if make in READABLE else 1)


async def test_a_code_snapshot_belongs_to_the_user(place):
    upload = place / "upload"
    upload.mkdir(mode=0o700)
    spec, families = Spec(command=("python3", "train.py"), directory=str(upload), snapshot=True), set()
    async with serving(Home(place / "home"), gpus=1, jobs_per_gpu=1) as service:
        await service.requests.put_user("alice", {"uid": ALICE})
        for content in ("one", "another"):
            (upload / "train.py").write_text(content)
            families.add(service.state.jobs[await one(service, spec, "alice")].job.model)
    assert len(families) == 2


async def test_a_user_who_swaps_folders_of_a_code_snapshot_while_it_is_made_gets_no_other_file(place, monkeypatch):
    upload, victim, chown = place / "upload", place / "victim", os.chown
    for folder in (upload / "sub", victim):
        folder.mkdir(parents=True)
        (folder / "secret").write_text("of root")
    home = Home(place / "home")

    def swap():
        folder = home.snapshot("1") / "sub"  # numbers of jobs can be guessed
        folder.rename(folder.with_name("aside"))
        folder.symlink_to(victim)

    def chown_and_be_attacked(path, *given, **named):
        chown(path, *given, **named)
        if str(path).endswith("sub"):  # the moment that an attacker waits for
            with contextlib.suppress(OSError):
                with_rights_of(ALICE, swap)

    monkeypatch.setattr(os, "chown", chown_and_be_attacked)
    async with serving(home, gpus=1, jobs_per_gpu=1) as service:
        await service.requests.put_user("alice", {"uid": ALICE})
        spec = Spec(command=("cat", "sub/secret"), directory=str(upload), snapshot=True)
        job = await one(service, spec, "alice")
        assert (victim / "secret").stat().st_uid == 0
        owners = [path.lstat().st_uid for path in home.snapshot(job).rglob("*")]
        assert owners == [ALICE] * len(owners)
        left = {path.name for path in home.job(job).iterdir()} - {"attempt-1", "checkpoints"}  # it may run by now
        assert left == {"job.json", "snapshot"}


def test_other_threads_keep_their_rights(place):
    private_file(place)
    inside, done = threading.Event(), threading.Event()

    def look():
        inside.set()
        done.wait(10.0)
        with pytest.raises(PermissionError):
            (place / "train.py").read_text()
        return os.getuid()

    others = threading.Thread(target=lambda: (inside.wait(10.0), (place / "train.py").write_text("x"), done.set()))
    others.start()
    assert with_rights_of(ALICE, look) == 0
    others.join()
    assert (place / "train.py").read_text() == "x"


def test_what_goes_wrong_is_raised(place):
    with pytest.raises(PermissionError):
        with_rights_of(ALICE, (place / "home").mkdir)
    assert with_rights_of(None, lambda: 5) == with_rights_of(0, lambda: 5) == 5


def test_files_that_do_not_answer_are_given_up_and_few_threads_wait_for_them(monkeypatch):
    monkeypatch.setattr(foreign_files, "LONGEST_LOOK_S", 0.05)
    monkeypatch.setattr(foreign_files, "MOST_UNANSWERED", 2)
    answer, looked = threading.Event(), []

    def look():
        looked.append(1)
        answer.wait(20.0)

    for _ in range(4):
        with pytest.raises(TimeoutError, match="do not answer"):
            with_rights_of(ALICE, look)
    assert len(looked) == 2, "the others are refused at once"
    assert with_rights_of(ALICE + 1, lambda: 5) == 5, "another user is not harmed"
    answer.set()
    for thread in [found for found in threading.enumerate() if found.name == f"uid {ALICE}"]:
        thread.join(10.0)
    assert with_rights_of(ALICE, lambda: 5) == 5


def test_a_directory_that_does_not_answer_is_refused(monkeypatch):
    monkeypatch.setattr(accounts, "LONGEST_S", 0.05)
    assert not accounts.runs_as(ALICE, "sleep 60")
    monkeypatch.setattr(accounts, "LONGEST_S", 20.0)
    assert accounts.runs_as(ALICE, "true")
    assert not accounts.runs_as(ALICE, "false")


async def test_a_user_whose_files_do_not_answer_delays_no_other_user():
    files, answer = UserFiles(), threading.Event()
    stuck = [asyncio.create_task(files.look("alice", lambda: answer.wait(20.0))) for _ in range(50)]
    await asyncio.sleep(0.05)
    assert await asyncio.wait_for(files.look("bob", lambda: 5), 5.0) == 5
    assert await asyncio.wait_for(asyncio.to_thread(lambda: 6), 5.0) == 6, "the other work of the service goes on"
    answer.set()
    await asyncio.gather(*stuck)
