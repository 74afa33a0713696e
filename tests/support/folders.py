"""Folders that are hard on those who walk through them."""

import os
from pathlib import Path


def nest(folder: Path, levels: int) -> None:
    """Make folders within each other, deeper than a path can be long."""
    inner = os.open(folder, os.O_DIRECTORY)
    for _ in range(levels):
        os.mkdir("d", dir_fd=inner)
        below = os.open("d", os.O_DIRECTORY, dir_fd=inner)
        os.close(inner)
        inner = below
    os.close(inner)
