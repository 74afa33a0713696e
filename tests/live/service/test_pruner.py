"""Retention: which files of ended jobs are removed, when, and what is said before and after."""

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest

from carpool.errors import InputError
from carpool.live.commands.doctor import _retention as doctor_retention
from carpool.live.commands.tables import _files as files_lines
from carpool.live.home import write_private
from carpool.live.service import pruner as module
from carpool.live.service.pruner import Pruner, size_of
from carpool.live.service.retention import DAY_S, RetentionLedger, RetentionLimits
from tests.support.fakes import FakeClock
from tests.support.folders import nest
from tests.support.services import notes, one, serving, shell

LIMITS = RetentionLimits(files_s=30 * DAY_S, checkpoints_s=90 * DAY_S, size=250_000)


class Told:
    """A home with ended jobs, and what the pruner says."""

    def __init__(self, home, ends):
        home.create()
        self.home, self.ends_, self.said = home, ends, []
        self.pruner = self.restarted()

    def restarted(self, now=0.0) -> Pruner:
        return Pruner(self.home, self, self, FakeClock(now), LIMITS, RetentionLedger(self.home.retention))

    def ends(self):
        return self.ends_

    def note(self, text, level=0):
        self.said.append(text)

    def make(self, job, log=100_000, checkpoint=0):
        (self.home.job(job) / "attempt-1").mkdir(parents=True)
        write_private(self.home.job(job) / "attempt-1" / "stdout.log", "x" * log, sync=False)
        if checkpoint:
            self.home.checkpoints(job).mkdir()
            write_private(self.home.checkpoints(job) / "model", "x" * checkpoint, sync=False)

    def there(self):
        return sorted(os.listdir(self.home.jobs), key=int)

    def said_about(self, word):
        return [text for text in self.said if word in text]


async def test_one_users_files_never_cost_another_user_anything(home):
    told = Told(home, [("1", "alice", 10.0), ("2", "bob", 20.0), ("3", "bob", 30.0), ("4", "bob", 40.0)])
    told.make("1", checkpoint=100_000)
    for job in ("2", "3", "4"):
        told.make(job, checkpoint=10_000_000)
    await told.pruner.look(60.0)
    assert told.there() == ["1", "2", "3", "4"], "nothing is removed before it was announced"
    assert "bob's jobs 2 " in told.said[0]
    assert "will be removed in 1 d" in told.said[0]
    await told.pruner.look(DAY_S)
    assert told.there() == ["1", "2", "3", "4"], "no checkpoint is removed because of a size"
    gone = [job for job in told.there() if not (home.job(job) / "attempt-1").exists()]
    assert gone == ["2"], "the oldest of the user who holds too much, and no more than needed"
    assert len(told.said_about("were removed")) == 1
    assert not told.said_about("alice")
    assert all(size_of(home.checkpoints(job)) for job in told.there())


async def test_files_and_checkpoints_go_after_their_own_times_announced_before(home):
    told = Told(home, [("1", "alice", 10.0), ("2", "alice", 20.0)])
    told.make("1", checkpoint=10_000)
    told.make("2")
    await told.pruner.look(60.0)
    assert not told.said
    await told.pruner.look(29.5 * DAY_S)
    assert told.pruner.describe("1")["files_kept_s"] == DAY_S, "a whole day of notice"
    assert len(told.said) == 1
    assert told.there() == ["1", "2"]
    await told.pruner.look(DAY_S)
    assert told.there() == ["1"]
    assert told.pruner.describe("2")["removed"]["files"]["why"].startswith("they are kept 30 d after the job's end")
    for _ in range(60):
        await told.pruner.look(DAY_S)
    assert told.there() == []
    assert len(told.said_about("checkpoints")) == 2, "announced once, removed once"


async def test_each_removal_has_its_own_reason_and_a_job_counts_once(home):
    ends = [("1", "bob", 10.0), ("2", "bob", 20.0), ("3", "alice", 30.0)]
    told = Told(home, ends)
    told.make("1", log=1_000)
    await told.pruner.look(60.0)
    await told.pruner.look(29.5 * DAY_S)  # the age of the first, announced by its time
    told.make("2", log=300_000, checkpoint=10_000)
    limits = replace(LIMITS, checkpoints_s=DAY_S / 2)
    told.pruner = Pruner(home, told, told, FakeClock(0.0), limits, told.pruner.ledger)
    await told.pruner.look(60.0)
    found = told.pruner.describe("2")
    assert found["files_why"].endswith("(--keep-size)")
    assert found["checkpoints_why"] == "they are kept 12 h after the job's end (--keep-checkpoints)"
    assert any("--keep-size" in line for line in files_lines(found, 0.0)[:1])
    assert any("--keep-checkpoints" in line for line in files_lines(found, 0.0)[1:])
    client = SimpleNamespace(get=lambda path: told.pruner.overview(None))
    assert [line.found.split(" (")[0] for line in doctor_retention(client)][1:] == ["files of 2 of bob's jobs"]
    told.ends_ = ends[1:]
    await told.pruner.look(60.0)
    assert [line.found.split(" (")[0] for line in doctor_retention(client)][1:] == ["files of bob's job 2"]


async def test_jobs_that_different_limits_remove_are_named_apart(home):
    told = Told(home, [("1", "bob", 10.0), ("2", "bob", 20.0)])
    told.make("1", log=1_000)
    await told.pruner.look(60.0)
    told.make("2", log=300_000)
    await told.pruner.look(30.5 * DAY_S)
    assert len(told.said) == 2
    assert ["bob's jobs 1 " in told.said[0], "--keep-files" in told.said[0]] == [True, True]
    assert ["bob's jobs 2 " in told.said[1], "--keep-size" in told.said[1]] == [True, True]


async def test_a_clock_that_is_far_ahead_removes_nothing(home):
    told = Told(home, [("1", "alice", 10.0)])
    told.make("1", checkpoint=10_000)
    await told.pruner.look(60.0)
    later = told.restarted(now=400 * DAY_S)
    for _ in range(5):
        await later.look(3600.0)
    assert told.there() == ["1"]
    assert not told.said
    home.retention.write_text("[1, 2")
    again = told.restarted(now=4e9)
    await again.look(3600.0)
    assert again.ledger.age("1") == 0.0, "a damaged ledger starts again"


async def test_a_deep_directory_is_removed_and_stops_nothing(home):
    told = Told(home, [("1", "alice", 10.0)])
    told.make("1")
    nest(home.job("1"), 3000)
    module.remove(home, "1", module.FILES)
    assert told.there() == []


async def test_an_owner_releases_the_files_of_an_ended_job(home):
    async with serving(home) as service:
        job = await one(service, shell("echo hello; echo x > $CARPOOL_CHECKPOINT_DIR/model"))
        await service.queries.wait(job)
        assert service.queries.show(job)["files"]["checkpoints_kept_s"] > 80 * DAY_S
        assert await service.requests.prune(job, "admin") > 0
        assert not home.job(job).exists()
        assert "released by admin" in service.queries.show(job)["files"]["removed"]["checkpoints"]["why"]
        running = await one(service, shell("sleep 30"))
        with pytest.raises(InputError, match="only files of jobs that have ended"):
            await service.requests.prune(running, "admin")
        await service.driver.turn()
        assert any("released by admin" in text for text in notes(service))
        await service.requests.cancel(running)
