"""`bench/unknown_sim.py`: the simulator on the cases that were measured on a real GPU."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("machine", ["machine-1", "machine-2"])
def test_the_table_of_the_docs_is_what_the_simulator_says(monkeypatch, machine):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import unknown_sim

    page = (ROOT / "docs" / "experiments" / "unknown.md").read_text(encoding="utf-8")
    rows = list(unknown_sim.rows(ROOT / "docs" / "experiments" / "unknown" / machine))
    assert rows
    assert [row for row in rows if row not in page] == []
