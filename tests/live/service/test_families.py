"""Families: jobs are alike by what they run, not by what they are called."""

import os

import pytest

from carpool.live.service.families import family_of
from carpool.live.spec import Spec
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
                assert "1 earlier run of the same train.py" in service.queries.show(job)["source"]["detail"]
            assert await service.queries.wait(job) == "finished"
