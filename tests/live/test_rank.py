"""The wrapper of a worker is a program of its own."""

import ast
import sys
from pathlib import Path

from carpool.live import rank


def test_the_wrapper_imports_only_the_standard_library():
    tree = ast.parse(Path(rank.__file__).read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not any(name.startswith("carpool") for name in names)
    assert names <= set(sys.stdlib_module_names) | {"collections.abc"}
