"""Logs are read by chunks, from an offset or from the last lines."""

import os
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.errors import InputError
from carpool.live.executors.base import LogChunk
from carpool.live.executors.logs import read_log_file

LIMIT = 1 << 20


def test_a_log_is_read_in_chunks(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"abcdef")
    first = read_log_file(path, 0, 4)
    assert (first.data, first.next, first.last) == (b"abcd", 4, False)
    second = read_log_file(path, first.next, 4)
    assert (second.data, second.next, second.last) == (b"ef", 6, True)
    assert read_log_file(path, 100, LIMIT).data == b""
    assert read_log_file(tmp_path / "nothing", 0, LIMIT) == LogChunk(b"", 0, True)


short_lines = st.lists(st.text("ab é\r\x1b", max_size=5).map(str.encode), max_size=30)


@given(short_lines, st.integers(0, 35), st.booleans())
def test_the_last_lines_are_those_of_a_plain_split(tmp_path_factory, lines, wanted, ended):
    path = tmp_path_factory.mktemp("log") / "log"
    content = b"\n".join(lines) + (b"\n" if ended else b"")
    path.write_bytes(content)
    kept = re.findall(rb"[^\n]*\n|[^\n]+", content)
    assert read_log_file(path, 0, LIMIT, tail=wanted).data == b"".join(kept[-wanted:] if wanted else [])


def test_a_long_log_is_not_read_whole_for_its_last_lines(tmp_path, monkeypatch):
    path = tmp_path / "log"
    with path.open("wb") as file:
        file.truncate(1 << 33)  # sparse
        file.seek(0, os.SEEK_END)
        file.write(b"\none\ntwo\n")
    assert read_log_file(path, 0, LIMIT, tail=2).data == b"one\ntwo\n"


def test_only_a_regular_file_is_read(tmp_path):
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(InputError):
            read_log_file(tmp_path / name, 0, LIMIT)
