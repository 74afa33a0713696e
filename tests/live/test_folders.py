"""The folders of `carpool.live` depend on each other in one direction only (`docs/explanation/architecture.md`)."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import carpool.live

LIVE = Path(carpool.live.__file__).parent
SHARED = "the files at the top"
IMPORTS = {
    SHARED: set(),
    "executors": {SHARED},
    "journal": {SHARED},
    "insight": {SHARED, "executors"},
    "service": {SHARED, "executors", "journal", "insight"},
    "http": {SHARED, "service"},
    "commands": {SHARED, "service", "http"},
}


def imported(path: Path) -> Iterator[str]:
    """Full names of all that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative imports hide what depends on what"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def folder_of(module: str) -> str:
    first = module.removeprefix("carpool.live.").partition(".")[0]
    return first if (LIVE / first).is_dir() else SHARED


def test_every_folder_has_its_place():
    assert {path.parent.name for path in LIVE.glob("*/__init__.py")} == IMPORTS.keys() - {SHARED}


@pytest.mark.parametrize("folder", IMPORTS)
def test_a_folder_imports_only_what_is_below_it(folder):
    files = list(LIVE.glob("*.py") if folder == SHARED else (LIVE / folder).rglob("*.py"))
    found = {folder_of(name) for path in files for name in imported(path) if name.startswith("carpool.live.")}
    assert files
    assert found - {folder} == IMPORTS[folder]
