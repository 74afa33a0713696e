"""The direction of imports in all of `carpool` (docs/decisions/0019-package-direction.md).

`DEPENDS_ON` names every part of the source and the parts that it may import. Imports count wherever they stand: at the
top of a file, inside a function, or under TYPE_CHECKING. A part that imports nothing of ours can be understood alone.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

import carpool

SOURCE = Path(carpool.__file__).parent
BOTTOM = {
    "errors",
    "units",
    "gpu_names",
    "files",
    "interrupts",
    "field_types",
    "fields",
    "notices",
    "sweeps",
    "job_schema",
}
SCHEDULER = {"core", "policies", "belief", "profile"}
DEPENDS_ON: dict[str, set[str]] = {
    # helpers that every package may use
    "errors": set(),
    "units": {"errors"},
    "interrupts": set(),
    "field_types": {"errors", "units"},
    "fields": {"errors", "field_types"},
    "gpu_names": {"errors"},
    "sweeps": {"field_types"},
    "notices": {"field_types"},
    "job_schema": {"errors", "field_types", "notices", "sweeps"},
    "files": {"errors", "interrupts"},
    # what a training process imports; it knows the scheduler only through the channel
    "channel": set(),
    "train": {"channel"},
    # what runs in a job's own interpreter, which need not have Carpool: it loads the channel by its path
    "watch": set(),
    # the scheduler
    "gpu": {"errors"},
    "core": set(),
    "policies": {"core", "errors"},
    "profile": {"core", "gpu", "channel"} | BOTTOM,
    "belief": {"core", "profile", "errors"},
    "sim": SCHEDULER | BOTTOM,
    "report": SCHEDULER | BOTTOM | {"sim"},
    # workers of emulated GPUs, and how these are described; `live` has the processes' states
    "emulate": {"core", "profile", "channel", "live", "errors", "units"},
    # the live service, by folder; "live" stands for the files at its top
    "live": {"core", "channel", "gpu"} | BOTTOM,
    "live.executors": {"live", "live.grounds", "emulate", "core", "channel", "gpu", "watch"} | BOTTOM,
    "live.journal": {"live", "core"} | BOTTOM,
    "live.insight": {"live", "live.executors", "channel", "sim"} | SCHEDULER | BOTTOM,
    "live.service": {"live", "live.executors", "live.grounds", "live.journal", "live.insight", "channel", "gpu"}
    | SCHEDULER
    | BOTTOM,
    "live.http": {"live", "live.service", "live.executors", "live.grounds", "core"} | BOTTOM,
    "live.grounds": {"live"} | BOTTOM,
    "live.agent": {"live", "live.executors", "live.grounds", "live.http", "core", "channel", "gpu"} | BOTTOM,
    # the Python client of a running service
    "client": {"live", "live.http"} | BOTTOM,
    # the command line
    "commands": SCHEDULER | BOTTOM | {"channel", "gpu", "sim", "report", "train"},
    "live.commands": {
        "live",
        "live.service",
        "live.journal",
        "live.insight",
        "live.http",
        "live.agent",
        "live.grounds",
        "emulate",
        "gpu",
        "sim",
        "report",
        "train",
    }
    | SCHEDULER
    | BOTTOM,
    "cli": {"errors"},
    "__main__": {"cli"},
}
PURE = (
    "errors",
    "units",
    "field_types",
    "fields",
    "gpu_names",
    "notices",
    "sweeps",
    "job_schema",
    "interrupts",
    "files",
    "channel",
    "core",
    "policies",
    "belief",
)
"""Parts that import the standard library and nothing else from outside."""
ONLY_IN = {
    "torch": ("train", "profile", "live.commands"),
    "numpy": ("profile", "sim"),
    "scipy": ("profile", "sim"),
    "matplotlib": ("report",),
    "click": ("commands", "live.commands", "cli"),
    "fastapi": ("live.http",),
    "pydantic": ("live.http",),
}
"""Packages from outside that are confined to some parts."""
HEAVY = ("torch", "numpy", "scipy", "matplotlib", "fastapi", "pydantic", "sqlalchemy", "rich", "click")


class Import(NamedTuple):
    """One import statement: where it stands and the full name that it imports."""

    path: Path
    line: int
    name: str

    def __str__(self) -> str:
        return f"src/carpool/{self.path.relative_to(SOURCE)}:{self.line} imports {self.name}"


def imports(path: Path, text: str | None = None) -> Iterator[Import]:
    """Yield every import of a file, also those inside functions and under TYPE_CHECKING."""
    for node in ast.walk(ast.parse(path.read_text("utf-8") if text is None else text)):
        if isinstance(node, ast.Import):
            yield from (Import(path, node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:  # as if it were written out
                parents = path.relative_to(SOURCE.parent).parts[: -node.level]
                module = ".".join((*parents, *filter(None, (module,))))
            yield from (Import(path, node.lineno, f"{module}.{alias.name}") for alias in node.names)


def part_of(module: str) -> str | None:
    """Return the part of `DEPENDS_ON` that holds a module such as carpool.live.http.api, or None if no part does."""
    names = module.split(".")[1:]
    for length in range(len(names), 0, -1):
        if (part := ".".join(names[:length])) in DEPENDS_ON:
            return part
    return None


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts)


def problems(path: Path, text: str | None = None) -> list[str]:
    """Return a sentence for every import of a file that breaks a rule."""
    part = part_of(module_of(path))
    if part is None:
        return [] if path == SOURCE / "__init__.py" else [f"{path}: DEPENDS_ON does not list this file; add its part"]
    found = []
    for one in imports(path, text):
        outside = one.name.partition(".")[0]
        if outside == "carpool":
            other = part_of(one.name)
            if other not in (None, part, *DEPENDS_ON[part]):
                allowed = ", ".join(sorted(DEPENDS_ON[part])) or "no other part"
                found.append(f"{one}: {part} must not import {other}; it may import {allowed}")
        elif outside not in sys.stdlib_module_names:
            if part in PURE:
                found.append(f"{one}: {part} must import nothing but the standard library")
            elif part not in ONLY_IN.get(outside, (part,)):
                found.append(f"{one}: {outside} belongs in {', '.join(ONLY_IN[outside])}, not in {part}")
    return found


@pytest.mark.parametrize("part", DEPENDS_ON)
def test_a_part_imports_only_the_parts_below_it(part):
    files = [path for path in SOURCE.rglob("*.py") if part_of(module_of(path)) == part]
    assert files, f"DEPENDS_ON lists {part}, which has no files; remove it"
    broken = [sentence for path in files for sentence in problems(path)]
    assert not broken, "\n".join(broken)


def test_every_file_belongs_to_a_part():
    unknown = [path for path in SOURCE.rglob("*.py") if part_of(module_of(path)) is None]
    assert unknown == [SOURCE / "__init__.py"]
    folders = {path.parent.name for path in SOURCE.glob("live/*/__init__.py")}
    assert folders == {part.removeprefix("live.") for part in DEPENDS_ON if part.startswith("live.")}


def test_the_rules_themselves_have_no_cycle():
    TopologicalSorter(DEPENDS_ON).prepare()


@pytest.mark.parametrize(
    ("file", "text", "sentence"),
    [
        ("sim/run.py", "def f():\n    from carpool.report.tables import describe", ":2 imports carpool.report.tables"),
        ("profile/fit.py", "from carpool import report", "profile must not import report"),
        ("core/state.py", "from ..sim import engine", "core must not import sim; it may import no other part"),
        ("live/journal/store.py", "import carpool.live.service.service", "live.journal must not import live.service"),
        ("core/perf.py", "import numpy", "core must import nothing but the standard library"),
        ("report/tables.py", "import torch", "torch belongs in train, profile, live.commands, not in report"),
        ("core/perf.py", "if TYPE_CHECKING:\n    from carpool.sim.run import Setup", "core must not import sim"),
    ],
)
def test_a_broken_rule_is_told_in_a_sentence(file, text, sentence):
    (found,) = problems(SOURCE / file, text)
    assert found.startswith(f"src/carpool/{file}:")
    assert sentence in found


def loaded_by(code: str) -> list[str]:
    """Return which of the heavy packages a fresh interpreter has loaded after running `code`."""
    code += f"\nimport sys; print(*(name for name in {HEAVY!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1].split()


def test_the_core_and_the_policies_load_nothing_from_outside():
    files = [path for part in ("core", "policies", "belief") for path in (SOURCE / part).rglob("*.py")]
    assert loaded_by(f"import {', '.join(sorted(module_of(path).removesuffix('.__init__') for path in files))}") == []


@pytest.mark.slow
def test_the_list_of_commands_loads_nothing_heavy():
    listing = "from carpool.cli import cli\ncli.main(['--help'], standalone_mode=False)"
    assert loaded_by(listing) == ["click"]


def test_no_class_name_means_two_things():
    """Two classes of one name make a reader ask which one is meant."""
    places: dict[str, list[str]] = {}
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(path.relative_to(SOURCE)))
    twice = [f"{name} is a class in {' and '.join(sorted(files))}" for name, files in places.items() if len(files) > 1]
    assert not twice, "\n".join(twice)
