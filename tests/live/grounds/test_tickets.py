"""Tokens and tickets of pilots, and what Slurm's lists say about them."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.errors import InputError
from carpool.live.grounds.base import JoinTicket, PilotStatus
from carpool.live.grounds.slurm import read_row
from carpool.live.grounds.tickets import PilotKey, read_ticket, write_ticket
from carpool.live.http.auth import Keyring


def test_a_token_is_good_for_the_pilot_and_the_home_that_it_was_made_for(tmp_path):
    key, other = PilotKey(tmp_path / "key"), PilotKey(tmp_path / "other")
    token = key.token("abc")
    assert key.pilot_of(token) == "abc"
    assert PilotKey(tmp_path / "key").pilot_of(token) == "abc", "the next service knows it"
    assert other.pilot_of(token) is None
    assert key.pilot_of(token.replace("abc", "abd")) is None
    assert (tmp_path / "key").stat().st_mode & 0o077 == 0
    assert key.service != other.service


@given(token=st.text(max_size=80))
def test_no_other_text_is_a_token(token, tmp_path_factory):
    assert PilotKey(tmp_path_factory.getbasetemp() / "a-key").pilot_of(token) is None


def test_the_keyring_takes_a_pilot_for_an_agent_and_not_for_a_user(tmp_path):
    key, keyring = PilotKey(tmp_path / "key"), Keyring("0" * 64)
    assert keyring.who(key.token("abc")) is None
    keyring.pilot_of = key.pilot_of
    found = keyring.who(key.token("abc"))
    assert (found.pilot, found.agent, found.admin) == ("abc", True, False)


def test_a_key_or_a_ticket_that_others_can_write_is_refused(tmp_path):
    ticket = JoinTicket("abc", ("http://127.0.0.1:1",), "secret", gpus=2)
    path = write_ticket(tmp_path / "pilots", ticket)
    assert path.stat().st_mode & 0o077 == 0
    assert read_ticket(path) == ticket
    for mode in (0o620, 0o604):
        path.chmod(mode)
        with pytest.raises(InputError, match="no private file"):
            read_ticket(path)
    with pytest.raises(InputError, match="nodes must see the home"):
        read_ticket(tmp_path / "missing")
    (tmp_path / "key").write_text(json.dumps({"key": "00"}))
    (tmp_path / "key").chmod(0o622)
    with pytest.raises(InputError, match="cannot be trusted"):
        PilotKey(tmp_path / "key")


@pytest.mark.parametrize(
    ("line", "status", "ends_at"),
    [
        ("7|carpool-ab-p1|RUNNING|Gpu07|1794852229|None", PilotStatus.RUNNING, 1794852229.0),
        ("7|carpool-ab-p1|RUNNING|Gpu07|N/A|None", PilotStatus.RUNNING, None),
        ("7|carpool-ab-p1|PENDING||N/A|Resources", PilotStatus.WAITING, None),
        ("7|carpool-ab-p1|COMPLETING|Gpu07|1794852229|None", PilotStatus.ENDED, None),
        ("7|carpool-ab-p1|NODE_FAIL|Gpu07|1794852229|None", PilotStatus.ENDED, None),
        ("7|carpool-ab-p1|A_STATE_OF_LATER_RELEASES|Gpu07|1|None", PilotStatus.ENDED, None),
    ],
)
def test_a_row_of_squeue_is_a_pilot(line, status, ends_at):
    pilot = read_row(line, "carpool-ab-")
    assert (pilot.id, pilot.handle, pilot.status, pilot.ends_at) == ("p1", "7", status, ends_at)
    assert pilot.node in ("gpu07", "")


@pytest.mark.parametrize("line", ["", "7|other|RUNNING|n|1|x", "7|carpool-cd-p1|RUNNING|n|1|x", "7|carpool-ab-p1"])
def test_a_row_about_something_else_is_none(line):
    assert read_row(line, "carpool-ab-") is None
