"""Tokens: made once, kept as hashes, read only from private files."""

import os
import stat
from types import SimpleNamespace

import pytest

from carpool.errors import InputError
from carpool.live import accounts
from carpool.live.commands import serve
from carpool.live.home import Home
from carpool.live.http import service_routes
from carpool.live.http.api import ApiContext
from carpool.live.http.auth import Keyring, Principal, admin_token, digest, new_token, read_token
from carpool.live.service.config import ServiceConfig


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
def test_a_file_without_a_token_is_refused(tmp_path, content):
    path = tmp_path / "token"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(InputError, match="does not hold a token"):
        read_token(path)


def test_a_keyring_finds_the_user_of_a_token():
    admin, alice, bob = new_token(), new_token(), new_token()
    keyring = Keyring(digest(admin), {"alice": digest(alice)})
    keyring.add("bob", digest(bob))
    assert keyring.who(admin) == Principal("admin", True)
    assert keyring.who(alice) == Principal("alice")
    assert keyring.who(bob) == Principal("bob")
    keyring.revoke("bob")
    assert keyring.who(bob) is None
    assert keyring.who(digest(alice)) is None  # a stolen hash is no token
    assert keyring.who("") is None


def test_only_the_owner_and_the_administrator_may_change_a_job():
    assert Principal("admin", True).may_change("alice")
    assert Principal("alice").may_change("alice")
    assert not Principal("bob").may_change("alice")


def test_a_service_that_is_not_root_warns_that_users_must_trust_each_other(monkeypatch, capsys, tmp_path):
    class Nothing:
        def gpus(self):
            return {"nodes": [{"gpus": [{}, {}]}], "mechanism": "logical"}

    config = ServiceConfig(Home(tmp_path), policy="sjf")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    serve._greet("http://127.0.0.1:1", config, SimpleNamespace(queries=Nothing()), "127.0.0.1")
    said = capsys.readouterr().err
    assert "carpool serves 2 logical GPUs under sjf at http://127.0.0.1:1" in said
    assert "add only users who trust each other" in said
    assert "clear text" not in said
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    serve._greet("http://10.0.0.5:1", config, SimpleNamespace(queries=Nothing()), "10.0.0.5")
    said = capsys.readouterr().err
    assert "trust each other" not in said
    assert "tokens are sent in clear text" in said


def test_a_service_on_all_interfaces_says_that_other_machines_can_reach_it(capsys, tmp_path):
    queries = SimpleNamespace(gpus=lambda: {"nodes": [{"gpus": [{}]}], "mechanism": "mps"})
    config = ServiceConfig(Home(tmp_path), policy="sjf")
    serve._greet("http://127.0.0.1:1", config, SimpleNamespace(queries=queries), "0.0.0.0")
    said = capsys.readouterr().err
    assert "carpool serves 1 GPU (mps) under sjf at http://127.0.0.1:1" in said
    assert "listens on 0.0.0.0: other machines can reach it" in said
    assert "tokens are sent in clear text" in said


def test_jobs_run_under_the_uid_of_their_user(monkeypatch):
    class Users:
        def users(self):
            return {"old": {"uid": accounts.FIRST_UID}, "other": {"uid": 5}}

    def uid(name, given=None, as_root=True):
        return service_routes._uid(
            ApiContext(SimpleNamespace(queries=Users()), None, None, as_root=as_root), name, given
        )

    assert uid("nobody-of-that-name") == accounts.FIRST_UID + 1
    assert uid("nobody-of-that-name", 1234) == 1234
    monkeypatch.setattr("pwd.getpwnam", lambda name: accounts.account(4321))
    assert uid("somebody") == 4321
    monkeypatch.setattr("pwd.getpwnam", lambda name: accounts.account(0))
    with pytest.raises(InputError, match="belongs to root"):
        uid("toor")
    assert uid("somebody", as_root=False) is None
    with pytest.raises(InputError, match="does not run as root"):
        uid("somebody", 1234, as_root=False)


def test_a_user_with_a_new_token_keeps_their_uid():
    """The user's files and waiting jobs belong to the old uid."""
    taken = (None, 7_000_000, 7_000_001, 1000)
    assert accounts.uid_for("no-such-login-here", taken) == 7_000_002
    assert accounts.uid_for("no-such-login-here", taken, before=7_000_000) == 7_000_000
    assert accounts.uid_for("root", taken, before=7_000_000) == 0
