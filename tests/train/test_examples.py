"""Every example runs at its small size, follows a scheduler, and gets the verdict that its model deserves."""

import json
import runpy
import sys

import pytest
import torch

from carpool import channel
from carpool.channel import WorkerStatus
from tests.support import ROOT

EXAMPLES = ROOT / "examples" / "training"
PAPER = {
    "bert": ("warned", "dropout (Dropout)"),
    "cifar10": ("refused", "stem.0.1 (BatchNorm2d)"),
    "deepspeech2": ("refused", "conv.1 (BatchNorm2d)"),
    "imagenet": ("refused", "stem.0.1 (BatchNorm2d)"),
    "neumf": ("certified", ""),
    "yolov3": ("refused", "stages.0.1 (BatchNorm2d)"),
}
ADAPTERS = {"with_lightning": "lightning", "with_accelerate": "accelerate", "with_transformers": "transformers"}
ALL = [*PAPER, *ADAPTERS]


@pytest.fixture(autouse=True)
def in_process(monkeypatch, tmp_path):
    """Importing PyTorch nine times would take longer than the examples; their helpers must not outlive the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    before = set(sys.modules)
    random = torch.get_rng_state()
    yield
    torch.set_rng_state(random)
    for name in set(sys.modules) - before:
        if name in ("common", "resnet"):
            del sys.modules[name]


def run(name, monkeypatch, *options):
    if needed := ADAPTERS.get(name):
        pytest.importorskip(needed, reason=f"{needed} is not installed: pip install 'carpool[adapters]'")
    monkeypatch.setattr(sys, "argv", [name, "--device", "cpu", "--size", "small", *options])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


def test_all_examples_are_here():
    scripts = {path.stem for path in EXAMPLES.glob("*.py")} - {"common", "resnet"}
    assert scripts == set(ALL)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_an_example_trains_as_the_scheduler_says(name, worker, monkeypatch, capsys):
    worker.control(accumulation=2, can_shrink=True)
    run(name, monkeypatch, "--iterations", "3", "--batch-size", "5")
    report = worker.report
    assert (report.iteration, report.accumulation, report.status) == (3, 2, WorkerStatus.DONE)
    assert report.seconds > 0
    printed = capsys.readouterr().out
    assert "3 iterations" in printed
    assert "accumulation 2" in printed
    assert "nan" not in printed


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_the_verdict_on_an_example(name, tmp_path, monkeypatch):
    destination = tmp_path / "verdict.json"
    monkeypatch.setenv(channel.ENV_CHECK, str(destination))
    monkeypatch.setenv(channel.ENV_CHECK_OPTIONS, json.dumps({"accumulation": 2, "steps": 2}))
    with pytest.raises(SystemExit):
        run(name, monkeypatch, "--batch-size", "4", *(["--frames", "32"] if name == "deepspeech2" else []))
    verdict = json.loads(destination.read_text())
    expected, where = PAPER.get(name, ("warned" if name == "with_transformers" else "certified", ""))
    assert verdict["shrinking"] == expected
    assert any(finding["where"].startswith(where) for finding in verdict["findings"]) or not where
    if expected == "refused":
        assert verdict["measurement"]["difference"] > 1e-12
    else:
        assert verdict["measurement"]["difference"] < 1e-11


def test_an_example_resumes(tmp_path, monkeypatch, capsys):
    run("neumf", monkeypatch, "--iterations", "4", "--checkpoints", str(tmp_path / "whole"))
    whole = capsys.readouterr().out.splitlines()[0]
    monkeypatch.setenv(channel.ENV_DIRECTORY, str(tmp_path))
    channel.write_control(tmp_path, channel.Control(sequence=1, stop=True))
    with pytest.raises(SystemExit) as caught:
        run("neumf", monkeypatch, "--iterations", "4", "--checkpoints", str(tmp_path / "saved"))
    assert caught.value.code == channel.EXIT_STOPPED
    channel.write_control(tmp_path, channel.Control(sequence=2))
    capsys.readouterr()
    run("neumf", monkeypatch, "--iterations", "4", "--checkpoints", str(tmp_path / "saved"))
    assert capsys.readouterr().out.splitlines()[0] == whole
