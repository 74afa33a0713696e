"""What tests of several folders share: builders, oracles, fakes, and where things are."""

from pathlib import Path

SUPPORT = Path(__file__).parent
ROOT = SUPPORT.parents[1]
"""The checkout."""
