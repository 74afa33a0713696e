"""How the documents are written. These checks are quick, so that they run before every commit."""

from tests.support import ROOT

WRITTEN = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
"""Documents outside the site."""
MOST_CHARACTERS = 120


def test_no_line_of_prose_is_longer_than_a_screen_is_wide():
    pages = [ROOT / name for name in WRITTEN] + sorted((ROOT / "docs").rglob("*.md"))
    for page in pages:
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            table = line.lstrip().startswith("|") and page.name not in ("README.md", "CONTRIBUTING.md")
            generated = page.name == "h200-tables.md"
            assert table or generated or len(line) <= MOST_CHARACTERS, f"{page.relative_to(ROOT)}:{number}"
