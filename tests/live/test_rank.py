"""The wrapper starts in a bare interpreter."""

import ast
import sys
from pathlib import Path

import pytest

from carpool.live import door, freezer, may_run, rank, worker_directory


@pytest.mark.parametrize("module", [rank, freezer, worker_directory, may_run, door])
def test_the_wrapper_imports_only_the_standard_library(module):
    """Except the files that the wrapper loads from beside its own one, and the type checker by name."""
    names = set()
    for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").partition(".")[0])
    assert names <= set(sys.stdlib_module_names) | ({"carpool"} if module in (rank, may_run) else set())
