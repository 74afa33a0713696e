"""The glossary has one word for each thing, and the statuses are the same wherever users meet them."""

import re
from collections import Counter
from pathlib import Path
from typing import get_args

from carpool.live.http.messages import JobStatus
from carpool.live.service import metrics
from carpool.live.statuses import ENDED, SHOWN

GLOSSARY = Path(__file__).parents[2] / "docs/reference/glossary.md"
ROWS = re.findall(r"^\| (.+?) \| (.*?) ?\| (.+) \|$", GLOSSARY.read_text(), re.MULTILINE)


def test_no_word_is_listed_twice():
    words = [word for first, *_ in ROWS for word in re.sub(r"<.*?>", "", first).split(", ")]
    repeated = [word for word, times in Counter(words).items() if times > 1 and word not in ("word", "---")]
    assert len(words) > 80
    assert repeated == []


def test_the_statuses_are_one_list():
    (meaning,) = [meaning for word, _, meaning in ROWS if word == "status"]
    listed = meaning.partition(": ")[2].partition(".")[0].split(", ")
    assert sorted(listed) == sorted(SHOWN)
    assert sorted(get_args(JobStatus)) == sorted(set(SHOWN) - {"held"}), "a row says that it is held in a field"
    assert sorted(metrics.STATUSES) == sorted(set(SHOWN) - set(ENDED))
