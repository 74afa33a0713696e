"""A service of root looks at a user's files with that user's rights, and at nothing else."""

import os
import threading

import pytest

from carpool.live.foreign_files import with_rights_of
from carpool.live.home import Home
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
