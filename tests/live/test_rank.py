"""The wrapper starts in a bare interpreter."""

import ast
import sys
from pathlib import Path

import pytest

from carpool.live import door, freezer, rank


@pytest.mark.parametrize("module", [rank, freezer, door])
def test_the_wrapper_imports_only_the_standard_library(module):
    """Except `freezer` and `door`, which the wrapper loads from beside its own file, and the type checker by name."""
    names = set()
    for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").partition(".")[0])
    assert names <= set(sys.stdlib_module_names) | ({"carpool"} if module is rank else set())
