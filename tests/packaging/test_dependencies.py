"""The declared dependencies and the imports in `src` agree: no package is required in vain, and none is missing."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "carpool"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]

IMPORT_NAMES = {"nvidia-ml-py": "pynvml", "pyyaml": "yaml"}
"""Import names of distributions whose name differs."""
NEVER_IMPORTED = {"accelerate": "the script passes its Accelerator to carpool.train.accelerate, which needs no import"}
"""Distributions that an extra rightly requires although `src` does not import them, each with the reason."""
OF_JOBS = {"sitecustomize"}
"""Modules that a file in a job's interpreter imports there; no distribution has them."""
OF_NOTEBOOKS = {"IPython"}
"""Modules that are imported only where a notebook has them."""
FOR_USERS = ("plots", "fit", "live", "postgres", "ray", "client", "train", "adapters")
"""Extras that install what `src` imports; the others install tools of contributors."""


def modules(requirements):
    """Return the import names of the distributions in these requirements, without Carpool itself."""
    names = [re.split(r"[\[<>=!~; ]", requirement)[0].lower() for requirement in requirements]
    return {IMPORT_NAMES.get(name, name.replace("-", "_")) for name in names if name != "carpool"}


def third_party_imports(path):
    """Return the top-level names of other distributions that a source file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module.partition(".")[0])
    return found - sys.stdlib_module_names - {"carpool"}


IMPORTS = {path.relative_to(SOURCE): third_party_imports(path) for path in sorted(SOURCE.rglob("*.py"))}
CORE = modules(PROJECT["dependencies"])


def test_the_core_requires_only_click_and_rich():
    assert sorted(CORE) == ["click", "rich"]


@pytest.mark.parametrize("extra", FOR_USERS)
def test_every_required_package_is_imported(extra):
    imported = set().union(*IMPORTS.values())
    assert modules(EXTRAS[extra]) - imported - set(NEVER_IMPORTED) == set()


def test_every_imported_package_is_required():
    declared = CORE.union(*(modules(EXTRAS[extra]) for extra in FOR_USERS))
    declared |= OF_JOBS | OF_NOTEBOOKS
    undeclared = {str(path): names - declared for path, names in IMPORTS.items() if names - declared}
    assert undeclared == {}


@pytest.mark.parametrize("package", ["core", "policies", "belief"])
def test_the_scheduler_imports_no_optional_package(package):
    outside = {str(path): names - CORE for path, names in IMPORTS.items() if path.parts[0] == package}
    assert {path: names for path, names in outside.items() if names} == {}


def test_the_exceptions_are_still_needed():
    required = set().union(*(modules(EXTRAS[extra]) for extra in FOR_USERS))
    imported = set().union(*IMPORTS.values())
    assert set(NEVER_IMPORTED) <= required - imported


def test_every_requirement_is_pinned_in_the_constraints():
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in pins if "==" in line}
    required = {re.split(r"[\[<>=!~; ]", one)[0].lower() for extra in EXTRAS.values() for one in extra}
    assert required - {"carpool"} - pinned == set()
