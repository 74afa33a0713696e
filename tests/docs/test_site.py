"""The documentation site builds without a warning, knows every command, and loads nothing from other servers."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

from tests.support import ROOT

pytestmark = pytest.mark.slow

WRITTEN = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
"""Documents outside the site."""
RESOURCE = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?([^"'\s>]+)|<link\b[^>]*\bhref=["']?([^"'\s>]+)"""
)


def build(folder: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Build the site of a checkout in `folder`."""
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=folder,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    return folder


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of what the site is built from, to be damaged. Pages about Python are left out: they take most time."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("*.gz", "*.pyc"))
    (tmp_path / "src").symlink_to(ROOT / "src")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    for page in (tmp_path / "docs" / "reference" / "python").glob("*.md"):
        page.write_text(re.sub(r"^:::.*\n(?: +.*\n)*", "", page.read_text(), flags=re.MULTILINE))
    for page in (tmp_path / "docs").rglob("*.md"):
        page.write_text(re.sub(r"(\]\([^)]*python/[^)#]*)#[^)]*\)", r"\1)", page.read_text()))
    return tmp_path


def test_the_site_builds_without_a_warning(site: Path):
    assert (site / "index.html").is_file()
    assert (site / "reference" / "commands.html").is_file()


DAMAGE = {
    "no-such-page.md": "\n[nowhere](no-such-page.md)\n",
    "no-such-heading": "\n[nowhere](tutorial.md#no-such-heading)\n",
    "nonsense": "\n<!-- generated: nonsense -->\n",
}
"""What is wrong with a page, by a word of the complaint about it."""


def test_every_damage_is_a_warning_which_fails_the_build(copy: Path):
    """All in one build, because a build takes seconds. A strict build counts the warnings and fails if there is one."""
    page = copy / "docs" / "index.md"
    page.write_text(page.read_text() + "".join(DAMAGE.values()))
    (copy / "docs" / "forgotten.md").write_text("# Forgotten\n")
    done = build(copy, copy / "site")
    complaints = (*DAMAGE, "forgotten.md")
    for complaint in complaints:
        assert complaint in done.stderr
    assert f"Aborted with {len(complaints)} warnings in strict mode" in done.stdout + done.stderr
    assert done.returncode != 0


def test_no_page_loads_anything_from_another_server(site: Path):
    for page in site.rglob("*.html"):
        for found in RESOURCE.findall(page.read_text(encoding="utf-8")):
            link = next(filter(None, found))
            assert not re.match(r"(https?:)?//", link), f"{page.relative_to(site)}: {link}"
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(\s*[\"']?(https?:)?//", style.read_text(encoding="utf-8")), style


def commands(command: click.Command, context: click.Context):
    yield context.command_path, command, context
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield from commands(child, click.Context(child, parent=context, info_name=name))


def test_every_command_and_option_is_on_the_page_of_commands(site: Path):
    from carpool.cli import cli

    page = (site / "reference" / "commands.html").read_text(encoding="utf-8")
    found = list(commands(cli, click.Context(cli, info_name="carpool", **cli.context_settings)))
    assert len(found) > 30
    for path, command, context in found[1:]:
        assert f'id="{path.replace(" ", "-")}"' in page, path
        section = page.split(f'id="{path.replace(" ", "-")}"')[1].split("<h")[0]
        for parameter in command.get_params(context):
            if isinstance(parameter, click.Option) and not parameter.hidden:
                assert parameter.opts[0] in section, f"{path} {parameter.opts[0]}"


def test_every_policy_is_on_the_page_of_policies(site: Path):
    from carpool.policies import registry

    page = (site / "reference" / "policies.html").read_text(encoding="utf-8")
    for name, policy in registry.BUILT_IN.items():
        assert f'id="{name}"' in page
        section = page.split(f'id="{name}"')[1].split("<h2")[0]
        for option in registry.options(policy):
            assert f"<code>{option.name}</code>" in section, f"{name}: {option.name}"


@pytest.mark.parametrize("document", WRITTEN)
def test_links_of_documents_outside_the_site_lead_somewhere(document: str):
    text = (ROOT / document).read_text(encoding="utf-8")
    for link, anchor in re.findall(r"\]\(([^)#:\s]*)(#[^)\s]*)?\)", text):
        target = ROOT / link if link else ROOT / document
        assert target.exists(), f"{document}: {link}"
        if anchor and target.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor[1:] in map(slug, headings), f"{document}: {link}{anchor}"


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub and MkDocs make it."""
    return re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", heading.strip().lower()))


def test_the_findings_about_robustness_are_those_of_the_data():
    import csv

    text = (ROOT / "docs" / "experiments" / "robustness.md").read_text(encoding="utf-8")
    with (ROOT / "docs" / "experiments" / "robustness_groups.csv").open(newline="", encoding="utf-8") as file:
        overall = {row["policy"]: row for row in csv.DictReader(file) if row["group"] == "all"}
    assert f"{overall['carpool']['ratio']} in the geometric mean of {overall['carpool']['scenarios']} scenarios" in text
    assert f"{overall['carpool, suspends']['ratio']} in the geometric mean" in text
    assert f"{overall['repair']['ratio']} in the geometric mean" in text
    assert [row["scenarios where worse"] for row in overall.values()] == ["3", "0", "0"]
