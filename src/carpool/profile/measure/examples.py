"""The paper's six tasks as sources for `carpool profile`: the scripts of `examples/training` with usual batches."""

from pathlib import Path

import carpool
from carpool.errors import InputError, nearest
from carpool.profile.measure.plan import TaskSource
from carpool.profile.measure.worker import ENDLESS

SCRIPTS = {
    "bert": "bert.py",
    "cifar10": "cifar10.py",
    "deepspeech2": "deepspeech2.py",
    "imagenet": "imagenet.py",
    "ncf": "neumf.py",
    "yolov3": "yolov3.py",
}
BATCHES = {
    "bert": (12, 64),
    "cifar10": (128, 2048),
    "deepspeech2": (20, 128),
    "imagenet": (100, 256),
    "ncf": (2048, 262_144),
    "yolov3": (8, 32),
}
"""Usual batches of each task, and batches that saturate a large GPU."""
BATCH_NORM = ("cifar10", "deepspeech2", "imagenet", "yolov3")


def folder(given: str | None) -> Path:
    """Return the folder of the scripts: the given one, the checkout's, or one below the current folder."""
    tried = (
        [Path(given)] if given else [Path(carpool.__file__).parents[2] / "examples/training", Path("examples/training")]
    )
    for path in tried:
        if (path / "common.py").is_file():
            return path.resolve()
    raise InputError(f"{tried[-1]}: no example scripts found; give their folder with --examples")


def source(text: str, scripts: Path, python: str, on_gpu: bool, mate_only: bool = False) -> TaskSource:
    """Parse `bert`, `bert:12` or `bert:12,64`. The default batches are the usual ones on a GPU, else the script's."""
    name, colon, sizes = text.partition(":")
    if name not in SCRIPTS:
        raise InputError(f"example {name!r}: unknown; {nearest(name, SCRIPTS)}")
    batches = parse_batches(sizes, text) if colon else BATCHES[name] if on_gpu else ()
    command = (python, str(scripts / SCRIPTS[name]), "--iterations", str(ENDLESS))
    return TaskSource(name, command, "--batch-size", batches, mate_only)


def parse_batches(text: str, where: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise InputError(f"{where}: batches are whole numbers of at least 1, separated by commas, as bert:12,64")
    return sizes
