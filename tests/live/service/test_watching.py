"""A script that imports nothing of Carpool, under the service: it is counted while it runs, unless it asked not to be.

PyTorch is played by a module with the hook that the real one has; tests/watch has the real one.
"""

import pytest

from carpool.live.service import service as service_module
from carpool.live.service.estimator import JobEstimator
from tests.support.services import journalled, one, python, serving, until

pytestmark = pytest.mark.slow

TORCH = """
hooks = []
def register_optimizer_step_post_hook(hook):
    hooks.append(hook)
class Optimizer:
    param_groups = [{"params": [type("Parameter", (), {"device": type("Device", (), {"type": "cpu"})})]}]
    def step(self):
        for hook in hooks:
            hook(self, (), {})
"""
TRAIN = """
import time
from torch.optim.optimizer import Optimizer
optimizer = Optimizer()
for _ in range(400):
    optimizer.step()
    time.sleep(0.05)
"""
SECONDS = 0.05


@pytest.fixture
def path(tmp_path):
    """A folder with the module that plays PyTorch."""
    folder = tmp_path / "path" / "torch" / "optim"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    (folder / "__init__.py").touch()
    (folder / "optimizer.py").write_text(TORCH)
    return str(folder.parent.parent)


async def test_the_iterations_of_an_unmodified_script_are_counted(home, path):
    async with serving(home) as service:
        job = await one(service, python(TRAIN, iterations=400, env={"PYTHONPATH": path}))
        row = await until(lambda: (row := service.queries.show(job))["watched"] and row["progress"] > 0.02 and row)
        assert row["measured"]
        (started,), (computing,) = journalled(service, "Started"), journalled(service, "Computing")
        assert started["computes"] is False
        assert started["at"] <= computing["at"]
        assert row["reported_iteration_s"] == pytest.approx(SECONDS, rel=0.5)
        assert any(
            "It is watched: an iteration takes 0.0" in line for line in service.queries.explain(job)["sentences"]
        )
        await service.requests.cancel(job)
        await service.queries.wait(job)


async def test_without_a_number_of_iterations_the_speed_is_known_and_the_progress_is_not(home, path):
    async with serving(home) as service:
        job = await one(service, python(TRAIN, duration_s=1000.0, env={"PYTHONPATH": path}))
        row = await until(lambda: (row := service.queries.show(job))["reported_iteration_s"] and row)
        assert (row["watched"], row["measured"]) == (True, False)
        assert row["progress"] < 0.02, "as its stated duration says, not 1 of 1,000 for each iteration"
        (seen, *_) = await until(lambda: journalled(service, "Observed"))
        assert (seen["relative"], seen["iteration_s"]) == (True, pytest.approx(1.0, rel=0.01)), "a thousandth alone"
        await service.requests.cancel(job)
        await service.queries.wait(job)


async def test_the_import_of_pytorch_is_a_sign_of_a_training(home, path):
    code = "import time, torch.optim.optimizer; time.sleep(60)"
    async with serving(home) as service:
        job = await one(service, python(code, env={"PYTHONPATH": path}))
        report = await until(lambda: service.executor.report((job, 1)))
        assert (report.watched, report.iteration, report.attempt) == (True, 0, 1)
        assert service.state.jobs[job].warming_up
        await service.requests.cancel(job)
        await service.queries.wait(job)


async def test_a_pair_of_scripts_of_which_nothing_is_known_is_tried(home, path, monkeypatch):
    """Neither tells how many iterations it makes: ratios of speeds decide."""
    monkeypatch.setattr(service_module, "_estimator", lambda config, inventory: JobEstimator(1, "mps", ["H200"]))
    async with serving(home, "carpool", gpus=1) as service:
        env = {"PYTHONPATH": path}
        host = await one(service, python(TRAIN, "host", duration_s=20.0, env=env))
        await until(lambda: service.state.jobs[host].alone_seen)
        guest = await one(service, python(TRAIN, "guest", duration_s=15.0, env=env))
        (trial,) = await until(lambda: service.state.trials.ended)
        assert (trial.guest.job, trial.hosts[0].job, trial.kept) == (guest, host, True)
        assert 0.0 < sum(trial.costs_s) < 6.0
        jobs = [service.state.jobs[job] for job in (host, guest)]
        assert [record.slowdown for record in jobs] == [pytest.approx(1.0, abs=0.3)] * 2, "they only sleep"
        assert service.queries.accuracy()["trials"]["kept"] == 1
        for job in (host, guest):
            await service.requests.cancel(job)
            await service.queries.wait(job)


async def test_a_job_that_asked_for_it_is_left_alone(home, path):
    code = "import os, torch.optim.optimizer as o; print(len(o.hooks), 'carpool' in os.environ['PYTHONPATH'])"
    async with serving(home) as service:
        for watch, printed in ((True, "1 True"), (False, "0 False")):
            job = await one(service, python(code, env={"PYTHONPATH": path}, watch=watch))
            assert await service.queries.wait(job) == "finished"
            assert (await service.executor.read_log((job, 1), 0, "stdout", limit=100)).data.decode().strip() == printed


async def test_a_script_that_reports_nothing_ran_from_its_start(home):
    async with serving(home) as service:
        job = await one(service, python("import time; time.sleep(2)"))
        assert await service.queries.wait(job) == "finished"
        assert journalled(service, "Started")[0]["computes"] is False
        row = service.queries.show(job)
        assert row["ran_s"] == pytest.approx(row["finished"] - row["started"], abs=0.01)
        assert row["receipt"]["slowdown"] == pytest.approx(1.0)
