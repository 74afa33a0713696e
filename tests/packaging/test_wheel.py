"""The wheel and the source archive are complete: the commands work where only the wheel and what it requires exist.

The wheel is built from a clean copy of the checkout, since leftovers of earlier builds would hide a missing file. It is
installed into an empty virtual environment. Its dependencies, and theirs, are linked from the environment of the tests
instead of downloaded: exactly the packages that the wheel's metadata names for the extras, and no others.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
from email import message_from_bytes
from email.message import Message
from importlib.metadata import Distribution, distribution
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

from tests.support import ROOT
from tests.support.effort import THOROUGH, thorough_only

pytestmark = pytest.mark.slow
LEFTOVERS = ("*.egg-info", "__pycache__", ".*", "build", "dist", "out", "site")
PACKAGE = ROOT / "src" / "carpool"


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the results of `python -m build`: the source archive, and the wheel made from it."""
    checkout, out = tmp_path_factory.mktemp("checkout") / "carpool", tmp_path_factory.mktemp("dist")
    shutil.copytree(ROOT, checkout, ignore=shutil.ignore_patterns(*LEFTOVERS))
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(checkout)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def wheel(built) -> Path:
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def metadata(wheel) -> Message:
    with ZipFile(wheel) as files:
        (name,) = [name for name in files.namelist() if name.endswith(".dist-info/METADATA")]
        return message_from_bytes(files.read(name))


@pytest.fixture(scope="module")
def bare(wheel, tmp_path_factory) -> Path:
    """A virtual environment with the wheel and nothing else."""
    folder = tmp_path_factory.mktemp("installed") / "environment"
    venv.create(folder, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin/python"), "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True, env=environment())
    return folder


@pytest.fixture
def install(bare, metadata, tmp_path):
    """A function that gives the environment exactly the packages that the wheel requires with extras."""

    def installed(*extras: str) -> "Environment":
        found = Environment(bare, tmp_path / "elsewhere")
        found.unlink_all()
        for one in required(metadata.get_all("Requires-Dist", []), extras):
            found.link(one)
        return found

    return installed


class Environment:
    """A virtual environment, and an empty folder to call its commands from."""

    def __init__(self, folder: Path, elsewhere: Path) -> None:
        self.folder, self.elsewhere = folder, elsewhere
        (self.site,) = folder.glob("lib/python3*/site-packages")
        elsewhere.mkdir()

    def link(self, package: Distribution) -> None:
        for top in {path.parts[0] for path in package.files or ()} - {"..", "__pycache__"}:
            if not (self.site / top).exists():
                (self.site / top).symlink_to(package.locate_file(top))

    def unlink_all(self) -> None:
        for path in self.site.iterdir():
            if path.is_symlink():
                path.unlink()

    def run(self, program: str, *arguments: str) -> str:
        """Return what a program of the environment prints; it must succeed."""
        command = [str(self.folder / "bin" / program), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, cwd=self.elsewhere, env=environment())
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def carpool(self, *arguments: str) -> str:
        return self.run("carpool", *arguments)


def environment() -> dict[str, str]:
    """Return the variables for a process that must not see the checkout, the tests' environment or the user's."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("CARPOOL_", "PYTHON"))}
    return {**kept, "PYTHONNOUSERSITE": "1"}


def required(requirements: list[str], extras: tuple[str, ...]) -> list[Distribution]:
    """Return the installed packages that these requirements name with these extras, directly or not."""
    found: dict[str, Distribution] = {}
    todo, seen = [(requirements, ("", *extras))], set()
    while todo:
        texts, wanted = todo.pop()
        for requirement in map(Requirement, texts):
            if requirement.marker and not any(requirement.marker.evaluate({"extra": extra}) for extra in wanted):
                continue
            key = (requirement.name, *sorted(requirement.extras))
            if key not in seen:
                seen.add(key)
                package = found.setdefault(requirement.name, distribution(requirement.name))
                todo.append((package.requires or [], ("", *requirement.extras)))
    return list(found.values())


def files_below(folder: Path) -> set[str]:
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


# ---- what the files hold ---------------------------------------------------------------------------------------------


def test_the_wheel_holds_every_file_of_the_package(wheel):
    with ZipFile(wheel) as files:
        packed = {name.removeprefix("carpool/") for name in files.namelist() if name.startswith("carpool/")}
    assert packed == files_below(PACKAGE)


def test_the_source_archive_holds_what_contributors_need(built):
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        packed = {name.partition("/")[2] for name in files.getnames()}
    assert {path.name for path in ROOT.iterdir() if path.is_file() and not path.name.startswith(".")} <= packed
    for folder in ("bench", "docs", "examples", "tests", "src/carpool"):
        assert {f"{folder}/{name}" for name in files_below(ROOT / folder)} <= packed


def test_the_metadata_is_fit_to_publish(metadata):
    assert metadata["Name"] == "carpool"
    assert metadata["License-Expression"] == "MIT"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert str(metadata.get_payload()).lstrip().startswith("# Carpool")
    assert 20 < len(metadata["Summary"]) < 200
    assert metadata["Keywords"]
    classifiers = metadata.get_all("Classifier")
    assert "Programming Language :: Python :: 3.11" in classifiers
    assert "Typing :: Typed" in classifiers


# ---- what works where only it is installed ---------------------------------------------------------------------------


def test_policies_are_simulated_without_any_extra(install):
    bare = install()
    assert bare.carpool("--version").startswith("carpool, version ")
    assert bare.run("python", "-c", "import carpool; print(carpool.__file__)").startswith(str(bare.folder))
    assert "GPU utilisation" in bare.carpool("simulate", "--jobs", "20")
    assert "sjf-bsbf" in bare.carpool("compare", "--seeds", "1-2", "--loads", "1", "--jobs", "20")
    assert "h200" in bare.carpool("profiles", "list")
    assert list(bare.elsewhere.iterdir()) == []


READ_THE_PAPER = """
from importlib import resources
from carpool.report.paper import config, measured
print(len(measured.read_measured(config.load(quick=True)).cases))
print(len((resources.files("carpool.report.paper") / "page.css").read_text("utf-8")))
"""


def test_the_data_of_the_paper_are_in_the_wheel(install):
    """`test_paper` runs the whole command, from the checkout."""
    assert all(int(number) > 0 for number in install("plots").run("python", "-c", READ_THE_PAPER).split())


@thorough_only
def test_the_paper_is_reproduced_from_the_wheel(install):
    with_plots = install("plots")
    assert "claims:" in with_plots.carpool("paper", "--quick")
    report = (with_plots.elsewhere / "out/paper/paper.html").read_text(encoding="utf-8")
    assert "<style>" in report
    assert "H200" in report


DEMO = """
import sys
from carpool.live.commands import demo
demo.DOZEN = demo.DOZEN[-MOST:]
from carpool.cli import main
sys.argv = ["carpool", "demo", "--quick"]
main()
"""


def test_the_demo_trains_from_the_wheel(install):
    pytest.importorskip("torch", reason="PyTorch is not installed: pip install '.[train]'")
    live = install("live", "train")
    said = live.run("python", "-c", f"MOST = {12 if THOROUGH else 1}{DEMO}")  # `test_demo` runs a gang as well
    assert re.search(r"(1 of 1|12 of 12) jobs finished", said)
    assert list(live.elsewhere.iterdir()) == []
