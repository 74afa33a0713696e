"""The adapters with the real libraries: the same weights as without Carpool, whatever the scheduler chooses."""

import os
import subprocess
import sys

import pytest
import torch

from carpool import channel
from carpool.channel import WorkerStatus
from carpool.train import TrainingStopped
from tests.support import training_frameworks as frameworks
from tests.support.effort import THOROUGH
from tests.support.training_models import weights

pytestmark = pytest.mark.slow  # imports three frameworks


@pytest.fixture
def lightning():
    return pytest.importorskip("lightning", reason="lightning is not installed: pip install 'carpool[adapters]'")


@pytest.fixture
def accelerate():
    return pytest.importorskip("accelerate", reason="accelerate is not installed: pip install 'carpool[adapters]'")


@pytest.fixture
def transformers(accelerate):
    return pytest.importorskip("transformers", reason="transformers is not installed: pip install 'carpool[adapters]'")


# Lightning


@pytest.mark.parametrize("own", [1, 2], ids=["plain", "with-own-accumulation"])
def test_lightning_trains_the_same(lightning, worker, tmp_path, own):
    from carpool.train.lightning import CarpoolCallback

    expected, trainer = frameworks.lightning_fit(tmp_path, accumulate_grad_batches=own)
    for accumulation in (1, 3, 4):
        worker.control(accumulation=accumulation)
        got, with_carpool = frameworks.lightning_fit(tmp_path, [CarpoolCallback()], accumulate_grad_batches=own)
        assert (weights(got) - weights(expected)).abs().max() <= 1e-13
        assert with_carpool.global_step == trainer.global_step == {1: 6, 2: 4}[own]
        assert with_carpool.lr_scheduler_configs[0].scheduler.get_last_lr() == pytest.approx(
            trainer.lr_scheduler_configs[0].scheduler.get_last_lr()
        )
        assert got.losses == pytest.approx(expected.losses, rel=1e-12)
        assert max(got.sizes) == -(-8 // accumulation)
        assert len(got.sizes) == 6 * accumulation
        report = worker.report
        assert (report.iteration, report.accumulation, report.status) == (
            trainer.global_step,
            accumulation,
            WorkerStatus.DONE,
        )


def test_lightning_follows_a_re_tune_and_a_shortage(lightning, worker, tmp_path):
    from lightning.pytorch import Callback

    from carpool.train.lightning import CarpoolCallback

    class Scheduler(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if trainer.global_step == 2:
                worker.control(accumulation=2, can_shrink=True)
            if trainer.global_step == 4:
                module.limit = 2

    expected, _ = frameworks.lightning_fit(tmp_path)
    carpool = CarpoolCallback(can_shrink=True)
    with pytest.warns(UserWarning, match="repeated with accumulation 4"):
        got, _ = frameworks.lightning_fit(tmp_path, [Scheduler(), carpool])
    assert (weights(got) - weights(expected)).abs().max() <= 1e-13
    assert got.sizes[:8] == [8, 8, 6, 4, 4, 4, 2, 2]  # the third 4 did not fit
    assert worker.report.accumulation == 4
    assert worker.report.out_of_memory == 1


def test_lightning_stops_and_resumes(lightning, worker, tmp_path):
    from lightning.pytorch import Callback

    from carpool.train.lightning import CarpoolCallback

    class Scheduler(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if trainer.global_step == 2:
                worker.control(stop=True)

    expected, _ = frameworks.lightning_fit(tmp_path)
    carpool = CarpoolCallback(accumulation=2, checkpoints=tmp_path / "saved")
    assert carpool.resume is None
    with pytest.raises(TrainingStopped):
        frameworks.lightning_fit(tmp_path, [Scheduler(), carpool])
    assert (worker.report.status, worker.report.checkpoint) == (WorkerStatus.STOPPED, 3)
    worker.control()
    again = CarpoolCallback(accumulation=2, checkpoints=tmp_path / "saved")
    got, trainer = frameworks.lightning_fit(tmp_path, [again], resume=again.resume)
    assert trainer.global_step == 6
    assert (weights(got) - weights(expected)).abs().max() <= 1e-13


def test_lightning_leaves_the_module_as_it_was(lightning, tmp_path):
    from carpool.train.lightning import CarpoolCallback

    model, trainer = frameworks.lightning_fit(tmp_path, [CarpoolCallback(accumulation=2)])
    assert "optimizer_zero_grad" not in model.__dict__
    assert "training_step" not in trainer.strategy.__dict__


def test_lightning_trains_where_slurm_is_installed(lightning, tmp_path, monkeypatch):
    """Lightning warns where it finds `srun` although nothing started it so."""
    from carpool.train.lightning import CarpoolCallback

    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(srun.parent), prepend=os.pathsep)
    _, trainer = frameworks.lightning_fit(tmp_path, [CarpoolCallback(accumulation=2)])
    assert trainer.global_step > 0


def test_lightning_manual_optimization_is_refused_in_words(lightning, tmp_path):
    from carpool.train.lightning import CarpoolCallback

    pl, module = frameworks.lightning_parts()

    class Manual(module):
        automatic_optimization = False

        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        callbacks=[CarpoolCallback()],
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    with pytest.raises(ValueError, match="automatic optimization"):
        trainer.fit(Manual(), frameworks.loader())


# Hugging Face Trainer


@pytest.mark.slow
@pytest.mark.parametrize("own", [1, 2], ids=["plain", "with-own-accumulation"])
@pytest.mark.parametrize("kind", ["tokens", "classes"])
def test_trainer_trains_the_same(transformers, worker, tmp_path, kind, own):
    """A language model divides by the tokens of the batch itself; a classifier takes the mean of what it is given."""
    from carpool.train.transformers import CarpoolTrainerCallback

    def run(accumulation):
        model = frameworks.language_model() if kind == "tokens" else frameworks.classifier()
        data = frameworks.Sentences(classes=kind == "classes")
        trainer = frameworks.hf_trainer(tmp_path, model, data, gradient_accumulation_steps=own)
        if accumulation:
            worker.control(accumulation=accumulation)
            CarpoolTrainerCallback(trainer)
        loss = trainer.train().training_loss
        return weights(model), trainer.state.global_step, trainer.lr_scheduler.get_last_lr(), loss

    expected = run(None)
    for accumulation in (1, 3, 4) if THOROUGH else (1, 3):  # 3 does not divide the batch
        got = run(accumulation)
        assert (got[0] - expected[0]).abs().max() <= 1e-12
        assert got[1:3] == expected[1:3]
        assert got[3] == pytest.approx(expected[3], rel=1e-6)  # transformers computes this loss in float32
        report = worker.report
        assert (report.iteration, report.accumulation, report.status) == (expected[1], accumulation, WorkerStatus.DONE)


@pytest.mark.parametrize("kind", ["smoothed", "own-function", "own-mean"])
def test_trainer_with_other_losses(transformers, tmp_path, kind):
    from carpool.train.transformers import CarpoolTrainerCallback

    def divided(outputs, labels, num_items_in_batch=None):
        logits, labels = outputs["logits"][:, :-1], labels[:, 1:]
        total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return total / num_items_in_batch

    def mean(outputs, labels, num_items_in_batch=None):
        return (outputs["logits"].square().mean((1, 2)) * (1 + labels.sum(1) % 3)).mean()

    def run(accumulation):
        model, data = frameworks.language_model(), frameworks.Sentences()
        options = {"label_smoothing_factor": 0.1} if kind == "smoothed" else {}
        trainer = frameworks.hf_trainer(tmp_path, model, data, **options)
        if kind != "smoothed":
            trainer.compute_loss_func = divided if kind == "own-function" else mean
        if accumulation:
            CarpoolTrainerCallback(trainer, accumulation=accumulation)
        trainer.train()
        return weights(model)

    expected = run(None)
    assert (run(3) - expected).abs().max() <= 1e-12


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Carpool. out of memory:UserWarning")
def test_trainer_repeats_a_step_that_does_not_fit(transformers, worker, tmp_path):
    from carpool.train.transformers import CarpoolTrainerCallback

    def run(limit):
        model = frameworks.language_model()
        trainer = frameworks.hf_trainer(tmp_path, model, frameworks.Sentences())
        plain = trainer.compute_loss

        def crowded(model, inputs, *args, **kwargs):
            loss = plain(model, inputs, *args, **kwargs)
            if len(inputs["input_ids"]) > limit and model.training:
                raise torch.OutOfMemoryError("injected")
            return loss

        trainer.compute_loss = crowded
        CarpoolTrainerCallback(trainer, can_shrink=True)
        trainer.train()
        return weights(model)

    expected = run(99)
    assert (run(2) - expected).abs().max() <= 1e-12
    assert (worker.report.accumulation, worker.report.out_of_memory) == (4, 2)


@pytest.mark.slow
def test_trainer_stops_and_resumes(transformers, worker, tmp_path):
    from transformers import TrainerCallback

    from carpool.train.transformers import CarpoolTrainerCallback

    class Scheduler(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 3:
                worker.control(stop=True)

    def trainer(name, *callbacks):
        made = frameworks.hf_trainer(tmp_path / name, frameworks.language_model(), frameworks.Sentences())
        for callback in callbacks:
            made.add_callback(callback)
        return made, CarpoolTrainerCallback(made, accumulation=2)

    whole, _ = trainer("whole")
    whole.train()
    first, carpool = trainer("stopped", Scheduler())
    assert carpool.resume is None
    with pytest.raises(TrainingStopped):
        first.train()
    assert (worker.report.status, worker.report.checkpoint, worker.report.iteration) == (WorkerStatus.STOPPED, 4, 4)
    worker.control()
    second, carpool = trainer("stopped")
    second.train(resume_from_checkpoint=carpool.resume)
    assert second.state.global_step == 6
    assert torch.equal(weights(second.model), weights(whole.model))


# Accelerate


def test_accelerate_trains_the_same(accelerate, worker, tmp_path):
    expected, plain = frameworks.accelerate_alone()
    for accumulation in (1, 3, 4):
        got, training, schedule = frameworks.accelerated(tmp_path / str(accumulation), accumulation)
        assert (got - expected).abs().max() <= 1e-13
        assert schedule.get_last_lr() == plain.get_last_lr()
        assert training.iteration == 6
        assert worker.report.accumulation == accumulation


def test_accelerate_with_its_own_accumulation_is_refused_in_words(accelerate):
    from accelerate import Accelerator

    from carpool.train.accelerate import AcceleratedTraining

    with pytest.raises(ValueError, match="at 1"):
        AcceleratedTraining(Accelerator(cpu=True, gradient_accumulation_steps=2), torch.nn.Linear(1, 1), None)


def test_without_torch_the_import_works_and_use_says_what_is_missing(tmp_path):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')")
    code = "import carpool.train, carpool.commands.check, carpool.channel; carpool.train.Training"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(tmp_path)}, check=False
    )
    assert done.returncode == 1
    assert "carpool.train.Training needs PyTorch: pip install 'carpool[train]'" in done.stderr
    assert channel.REPORT == "report"
