"""Adapters, examples and plain frameworks under the watch: every step leaves the very same weights as without it.

The hook is attached to the PyTorch of this process; tests/watch has the injection into processes of their own.
"""

import hashlib
from contextlib import contextmanager

import pytest
import torch
from torch.optim import optimizer as optimizers

from carpool import channel
from carpool.train import link
from carpool.watch import steps
from tests.support import training_frameworks as frameworks
from tests.train.test_examples import ADAPTERS, ALL, in_process, run

pytestmark = pytest.mark.slow  # imports three frameworks
assert in_process, "the fixture of the examples applies here, too"


@contextmanager
def fingerprints():
    """Collect a hash of all weights after every step of any optimizer."""
    found = []

    def note(optimizer, args, kwargs):
        digest = hashlib.sha256()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                digest.update(parameter.detach().numpy().tobytes())
        found.append(digest.hexdigest())

    handle = optimizers.register_optimizer_step_post_hook(note)
    try:
        yield found
    finally:
        handle.remove()


@contextmanager
def watched(monkeypatch):
    """Attach the watch, as the import of PyTorch does in a job."""
    handles, register = [], optimizers.register_optimizer_step_post_hook
    with monkeypatch.context() as patch:
        attach = lambda hook: handles.append(register(hook))  # noqa: E731
        patch.setattr(optimizers, "register_optimizer_step_post_hook", attach)
        patch.setattr(steps.atexit, "register", lambda end: handles.append(end))
        steps.attach(optimizers)
    hook, end = handles
    try:
        yield
        end()
    finally:
        hook.remove()


def twice(monkeypatch, train):
    """Return the fingerprints of a training without the watch and under it."""
    results = []
    for under_watch in (False, True):
        torch.manual_seed(0)
        with fingerprints() as found:
            if under_watch:
                with watched(monkeypatch):
                    train()
            else:
                train()
        results.append(found)
    return results


@pytest.mark.parametrize("name", ALL)
def test_an_example_trains_the_same(name, worker, monkeypatch):
    worker.control(accumulation=2, can_shrink=True)
    options = ("--iterations", "2", "--batch-size", "4", *(["--frames", "32"] if name == "deepspeech2" else []))
    plain, under_watch = twice(monkeypatch, lambda: run(name, monkeypatch, *options))
    assert len(plain) >= 2
    assert under_watch == plain
    assert not worker.report.watched, "the training library's report counts"


@pytest.mark.parametrize("name", ADAPTERS.values())
def test_a_framework_without_carpool_trains_the_same(name, worker, monkeypatch, tmp_path):
    pytest.importorskip(name, reason=f"{name} is not installed: pip install 'carpool[adapters]'")
    train = {
        "lightning": lambda: frameworks.lightning_fit(tmp_path),
        "accelerate": frameworks.accelerate_alone,
        "transformers": lambda: frameworks.hf_trainer(
            tmp_path, frameworks.language_model(), frameworks.Sentences()
        ).train(),
    }[name]
    monkeypatch.setattr(link, "_links", 0)  # the examples of other tests used the training library in this process
    plain, under_watch = twice(monkeypatch, train)
    assert len(plain) >= 2
    assert under_watch == plain
    report = channel.read_report(worker.directory)
    assert report.watched
    assert report.iteration == len(plain)
