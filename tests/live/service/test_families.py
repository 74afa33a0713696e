"""Families: jobs are alike by what they run, not by what they are called."""

import os
from dataclasses import replace

import pytest

from carpool.core.perf import ConstantInterference, FittedModel
from carpool.live.service import families
from carpool.live.service.estimator import JobEstimator, JobKind
from carpool.live.service.families import MOST_BYTES, family_of, is_training
from carpool.live.spec import Spec
from carpool.profile.schema import load
from tests.support.services import one, serving

SCRIPT = "print('trains')\n"


@pytest.fixture
def family(tmp_path):
    """Returns the family of a command in a folder with a script and a configuration."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "big.yaml").write_text("width: 4096\n")

    def of(*command, counted=True, **more):
        return family_of(Spec(command=command, directory=str(tmp_path), **more)).model(counted)

    return of


def test_run_numbers_seeds_outputs_and_hyperparameters_do_not_split_a_family(family):
    base = family("python", "train.py", "--seed", "1", "--width", "512")
    for more in (
        ("python3.12", "train.py", "--seed", "17", "--width", "512"),
        ("/opt/env/bin/python", "train.py", "--width=512", "--output-dir", "/data/run-17", "--run_name", "run-17"),
        ("python", "./train.py", "--lr", "3e-4", "--width", "512", "--weight-decay=0.1", "--master-port", "29501"),
    ):
        assert family(*more) == base
    assert (
        family("python", "train.py", "--width", "512", env={"WANDB_PROJECT": "x", "PATH": "/x/bin", "SEED": "3"})
        == base
    )


def test_sizes_models_configurations_and_programs_split_a_family(family, tmp_path):
    commands = [
        ("python", "train.py"),
        ("python", "train.py", "--batch-size", "64"),
        ("python", "train.py", "--batch-size", "128"),
        ("python", "train.py", "--model", "resnet18"),
        ("python", "train.py", "--model", "resnet50"),
        ("python", "train.py", "--config", "big.yaml"),
        ("python", "train.py", "--max-seq-length", "128"),
        ("python", "train.py", "model.width=7"),
        ("python", "-m", "pkg.train"),
        ("python", "-c", "pass"),
        ("sleep", "3"),
    ]
    found = [family(*command) for command in commands]
    assert len(set(found)) == len(commands)
    assert all(one.startswith("script:") for one in found)
    assert "train.py" in family("python", "-u", "train.py")
    assert family("python", "train.py", env={"WIDTH": "9"}) not in found
    (tmp_path / "train.py").write_text("print('trains otherwise')\n")
    assert family("python", "train.py") not in found, "another content is another family"
    (tmp_path / "big.yaml").write_text("width: 64\n")
    assert family("python", "train.py", "--config", "big.yaml") not in found


def test_the_number_of_steps_and_the_data_count_only_where_iterations_are_not_given(family):
    short, long = ("python", "train.py", "--epochs", "1"), ("python", "train.py", "--epochs", "9", "--data", "/d/x")
    assert family(*short) == family(*long)
    assert family(*short, counted=False) != family(*long, counted=False)
    assert family(*short, counted=False).partition("/")[0] == family(*short), "slow-downs carry over"


def test_what_cannot_be_read_counts_by_its_path(family, tmp_path):
    os.mkfifo(tmp_path / "pipe.py")
    assert family("python", "pipe.py") != family("python", "gone.py") != family("python", "nul\0.py")
    (tmp_path / "large.py").write_bytes(bytes(2**20 + 1))
    assert family("python", "large.py") == family("python", "large.py")
    assert family_of(Spec(command=(), directory="/")) is None


async def test_run_17_knows_what_run_16_taught(home, tmp_path):
    (tmp_path / "train.py").write_text("import time; time.sleep(0.3)")
    async with serving(home) as service:
        for number, source in ((16, "time"), (17, "history")):
            command = ("python3", "train.py", "--seed", str(number))
            job = await one(
                service, Spec(command=command, directory=str(tmp_path), name=f"r-{number}", duration_s=900.0)
            )
            assert service.queries.show(job)["source"]["kind"] == source
            assert service.queries.show(job)["source"]["alone_s"] == pytest.approx(
                900 if number == 16 else 0.4, abs=0.4
            )
            if number == 17:
                assert "1 earlier run of the same command (train.py)" in service.queries.show(job)["source"]["detail"]
            assert await service.queries.wait(job) == "finished"


@pytest.mark.parametrize(
    ("text", "before", "trains"),
    [
        ("import torch\nfor x in data:\n    optimizer.step()\n", ("python",), True),
        ("from transformers import Trainer\nTrainer(model).train()\n", ("torchrun", "--nproc=2"), True),
        ("def go():\n    import torch.nn as nn\n    opt.step()\n", ("python", "-u"), True),
        ("import torch\nmodel(data)\n", ("python",), False),  # it computes, and makes no step
        ("import numpy\nwhile True: solver.step()\n", ("python",), False),
        ("# import torch\nopt.step()\n", ("python",), False),
        ("import torch\nopt.step()\n", ("python", "-IS"), False),  # nothing can watch it
        ("import torch\nopt.step()\n", ("python", "-c"), False),
    ],
)
def test_a_training_is_known_by_what_its_script_imports_and_calls(tmp_path, text, before, trains):
    (tmp_path / "run.py").write_text(text)
    script = ("pass",) if "-c" in before else ("run.py", "--epochs", "3")
    assert is_training(Spec(command=(*before, *script), directory=str(tmp_path))) is trains


def test_a_script_that_cannot_be_read_is_no_training(tmp_path):
    os.mkfifo(tmp_path / "fifo.py")
    (tmp_path / "large.py").write_bytes(b"import torch\nopt.step()\n" + b"#" * MOST_BYTES)
    for name in ("none.py", "fifo.py", "large.py", "/dev/zero.py"):
        assert not is_training(Spec(command=("python", name), directory=str(tmp_path)))


def test_the_script_of_an_array_is_read_once(tmp_path, monkeypatch):
    (tmp_path / "run.py").write_text("import torch\nopt.step()\n")
    reads, really = [], families.os.open
    monkeypatch.setattr(families.os, "open", lambda *given, **named: reads.append(1) or really(*given, **named))
    spec = Spec(command=("python", "run.py"), directory=str(tmp_path))
    estimator = JobEstimator(1, "logical")
    kinds = estimator.kinds([replace(spec, name=f"a[{number}]", array_index=number) for number in range(100)], None)
    assert len(set(kinds)) == 1
    assert kinds[0].trains
    assert len(reads) == 2, "once for its family, and once for what it imports"


@pytest.mark.parametrize(
    ("fields", "source"),
    [
        ({"model": "bert", "iterations": 100}, ("profile", "the profile of bert")),
        ({"duration_s": 60.0}, ("time", "the duration that was given")),
        ({}, ("default", "no information; 3600 s is assumed")),
    ],
)
def test_a_service_that_does_not_learn_says_where_an_estimate_comes_from(fields, source):
    perf = FittedModel(load("t4").core_tasks(), ConstantInterference(1.5), 4)
    spec = Spec(command=("bash",), directory="/", **fields)
    estimator = JobEstimator(4, "logical", perf=perf)
    _, found = estimator.job(perf, spec, JobKind(spec.model or "name:bash"), "1", "", 0.0)
    assert (found.kind, found.detail) == source
