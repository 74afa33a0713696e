"""The home directory: where it is, and which users can read it."""

import os
import stat

import pytest

from carpool.errors import InputError
from carpool.live.errors import HomeInUse
from carpool.live.home import Home, default_home
from tests.support.services import one, serving, shell


async def test_no_other_user_can_read_the_home(home):
    async with serving(home) as service:
        job = await one(service, shell("echo secret", env={"TOKEN": "x"}))
        await service.queries.wait(job)
    open_to = stat.S_IRWXG | stat.S_IRWXO
    allowed = stat.S_IXGRP | stat.S_IXOTH if os.getuid() == 0 else 0
    files = 0
    for folder, _, names in os.walk(home.path):
        assert os.stat(folder).st_mode & open_to & ~allowed == 0, folder
        for name in names:
            files += 1
            if name != "control.json":  # has nothing that the job does not know
                assert os.stat(os.path.join(folder, name)).st_mode & open_to == 0, name
    assert files > 5
    assert (home.rank(job, 1, 0) / "stdout.log").exists()


def test_only_a_job_id_becomes_a_path(home):
    for bad in ("../x", "1/2", "", "1 ", "１", "x", "1" * 19):
        with pytest.raises(InputError):
            home.job(bad)


def test_the_home_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("CARPOOL_HOME", str(tmp_path / "mine"))
    assert default_home() == tmp_path / "mine"
    monkeypatch.delenv("CARPOOL_HOME")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_home() == tmp_path / "carpool"


def test_the_address_of_another_service_is_not_removed(home):
    home.create()
    home.write_address("http://127.0.0.1:1")
    home.remove_address("http://127.0.0.1:2")
    assert home.read_address()["url"] == "http://127.0.0.1:1"
    home.remove_address("http://127.0.0.1:1")
    assert home.read_address() is None


def test_a_leader_takes_over_the_lock_of_an_earlier_leader_of_the_same_journal(home, monkeypatch):
    monkeypatch.setattr("carpool.live.home.LOCK_S", 0.1)
    home.create()
    old, new, other = Home(home.path), Home(home.path), Home(home.path)
    old.acquire("a-journal")
    new.acquire("a-journal")
    for stranger in ("", "another-journal"):
        with pytest.raises(HomeInUse):
            other.acquire(stranger)
    old.release()
    with pytest.raises(HomeInUse):
        other.acquire("another-journal")
    new.release()
    other.acquire()
    other.release()
