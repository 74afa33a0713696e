"""Usage in a service: counted through restarts, with and without snapshots and old events."""

import sqlite3

import pytest

from carpool.live.service import snapshots
from tests.support.services import one, serving, shell, started


def table(service) -> dict[tuple[str, str], dict]:
    rows = service.queries.usage(("user", "project"))["rows"]
    return {(row.pop("user"), row.pop("project")): {**row, "saved_gpu_s": row["saved_gpu_s"] or -1.0} for row in rows}


def adds_up(service) -> bool:
    found = service.queries.usage(())
    held = found["total"]["held_gpu_s"] + found["gpus"]["idle_gpu_s"] + found["gpus"]["closed_gpu_s"]
    return held == pytest.approx(found["gpus"]["existed_gpu_s"])


async def test_usage_is_the_same_after_restarts_without_snapshots_and_without_old_events(home, monkeypatch):
    async with serving(home, "sjf-ffs", gpus=1) as service:
        jobs = [await one(service, shell("sleep 0.3", duration_s=60.0, project="vision")) for _ in range(2)]
        failing = await one(service, shell("sleep 0.1; exit 3", exclusive=True))
        for job in (*jobs, failing):
            await service.queries.wait(job)
        before = table(service)
        vision, rest = before["admin", "vision"], before["admin", ""]
        assert (vision["jobs"], vision["failed"], rest["failed"]) == (2, 0, 1)
        assert (
            0.3 < vision["held_gpu_s"] < 1.2 * sum(service.queries.show(job)["receipt"]["gpu_s"] for job in jobs)
        )  # they shared the GPU
        assert vision["shared_gpu_s"] > 0.0
        assert vision["saved_gpu_s"] == -1.0  # unknown: jobs that report nothing were not measured alone
        assert rest["lost_gpu_s"] == pytest.approx(rest["held_gpu_s"])
        assert adds_up(service)
        assert service.queries.show(jobs[0])["project"] == "vision"

    with sqlite3.connect(home.journal) as journal:  # as after a kill: only the events are left
        journal.execute("DELETE FROM snapshots")
    monkeypatch.setattr(snapshots, "KEEP_EVENTS", 0)
    for _ in range(3):  # each writes a snapshot at its end, and removes the events before the older one
        async with serving(home, "sjf-ffs", gpus=1) as service:
            assert table(service) == {key: pytest.approx(row, rel=1e-9) for key, row in before.items()}
            assert adds_up(service)
    with sqlite3.connect(home.journal) as journal:
        assert not journal.execute("SELECT 1 FROM events WHERE kind = 'Submitted'").fetchall()


async def test_a_job_that_runs_while_no_service_does_is_charged_for_that_time(home):
    async with serving(home, gpus=1) as service:
        job = await one(service, shell("sleep 1.2", project="p"))
        await started(service, job)
    async with serving(home, gpus=1) as service:
        await service.queries.wait(job)
        assert 1.1 < table(service)["admin", "p"]["held_gpu_s"] < 10.0
        assert adds_up(service)
