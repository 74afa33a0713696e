"""Tokens: made once, kept as hashes, read only from private files."""

import os
import stat

import pytest

from carpool.errors import InputError
from carpool.live.auth import Keyring, Principal, admin_token, digest, new_token, read_token


def test_the_administrators_token_is_private_from_its_first_moment_and_kept(tmp_path):
    old = os.umask(0)
    try:
        token = admin_token(tmp_path / "admin.token")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "admin.token").stat().st_mode) == 0o600
    assert admin_token(tmp_path / "admin.token") == token == read_token(tmp_path / "admin.token")
    assert len(token) == 43  # 256 bits


def test_a_token_that_others_can_read_is_refused(tmp_path):
    path = tmp_path / "admin.token"
    admin_token(path)
    path.chmod(0o640)
    with pytest.raises(InputError, match="chmod 600"):
        admin_token(path)


def test_a_link_in_place_of_the_token_is_not_followed(tmp_path):
    (tmp_path / "elsewhere").write_text(new_token())
    (tmp_path / "admin.token").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError):
        admin_token(tmp_path / "admin.token")


@pytest.mark.parametrize("content", ["", "short", "x" * 50 + "\x1b[2J", "ü" * 50])
def test_what_is_no_token(tmp_path, content):
    path = tmp_path / "token"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(InputError, match="does not hold a token"):
        read_token(path)


def test_a_keyring_knows_its_people():
    admin, alice, bob = new_token(), new_token(), new_token()
    keyring = Keyring(digest(admin), {"alice": digest(alice)})
    keyring.add("bob", digest(bob))
    assert keyring.who(admin) == Principal("admin", True)
    assert keyring.who(alice) == Principal("alice")
    assert keyring.who(bob) == Principal("bob")
    keyring.revoke("bob")
    assert keyring.who(bob) is None
    assert keyring.who(digest(alice)) is None  # who steals the hashes has no token
    assert keyring.who("") is None


def test_rights():
    assert Principal("admin", True).may_change("alice")
    assert Principal("alice").may_change("alice")
    assert not Principal("bob").may_change("alice")
