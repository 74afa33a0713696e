"""What the tests of the training library share: one thread, a clean environment, third-party warnings let through."""

import os

import pytest

from carpool import channel

try:
    import torch
except ModuleNotFoundError:
    torch = None
else:
    torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


class WithoutTorch(pytest.Module):
    def collect(self):
        pytest.skip("PyTorch is not installed: pip install 'carpool[train]'", allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    return None if torch is not None else WithoutTorch.from_parent(parent, path=module_path)


# Warnings of other people's code, each by its words and its module; ours stay errors.
THIRD_PARTY = (
    "ignore:.*does not have many workers:UserWarning",
    "ignore:.*is smaller than the logging interval:UserWarning",
    "ignore:.*pin_memory.*:UserWarning:torch.utils.data",
    "ignore:Starting from v1.9.0, `tensorboardX`.*:UserWarning",
    "ignore:.*treespec, LeafSpec.*:FutureWarning",
    "ignore:The `srun` command is available on your system but is not used:UserWarning",
)


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent.name == "train":
            for words in THIRD_PARTY:
                item.add_marker(pytest.mark.filterwarnings(words))


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    """No test sees another's seed, a setting of the user or the Slurm job that it may run in."""
    for name in list(os.environ):
        if name.startswith(("CARPOOL_", "SLURM_")):
            monkeypatch.delenv(name)
    torch.manual_seed(0)


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """A worker's directory with its control file, as an executor would make it."""
    directory = tmp_path / "worker"
    directory.mkdir()
    monkeypatch.setenv(channel.ENV_DIRECTORY, str(directory))
    monkeypatch.setenv(channel.ENV_ATTEMPT, "3")
    return Worker(directory)


class Worker:
    def __init__(self, directory):
        self.directory = directory
        self.sequence = 0

    def control(self, **wishes):
        self.sequence += 1
        channel.write_control(self.directory, channel.Control(sequence=self.sequence, **wishes))

    @property
    def report(self):
        return channel.read_report(self.directory)
