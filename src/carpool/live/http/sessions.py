"""Sessions of browsers: a token in two halves, neither of which reveals anything without the other.

One half is a cookie that scripts cannot read. The other half is a key that the page keeps and sends as a header with
every request. A cookie alone is of no use: browsers send it to every port of a host, and with requests that other sites
cause. A key alone is of no use to a script that was smuggled in. The service keeps nothing, so that a session survives
a restart and ends when the token is revoked.
"""

import base64
import binascii
import secrets
from collections.abc import Iterable

COOKIE = "carpool_session"
KEY_HEADER = b"carpool-key"
KEPT_S = 30 * 86_400
"""Seconds for which a browser keeps the cookie."""


def split(token: str) -> tuple[str, str]:
    """Return a token as cookie and key: random bytes, and the token covered by them."""
    plain = token.encode()
    key = secrets.token_bytes(len(plain))
    return _text(_xor(plain, key)), _text(key)


def join(cookie: str, key: str) -> str:
    """Return the token of a cookie and a key; empty: they do not belong together."""
    try:
        covered, pad = (base64.urlsafe_b64decode(half.encode()) for half in (cookie, key))
        return _xor(covered, pad).decode() if len(covered) == len(pad) else ""
    except (ValueError, binascii.Error):
        return ""


def set_cookie(cookie: str, secure: bool) -> str:
    """Return the header that gives a browser its cookie; an empty one takes it away."""
    age = KEPT_S if cookie else 0
    only_tls = "; Secure" if secure else ""
    return f"{COOKIE}={cookie}; Path=/; Max-Age={age}; HttpOnly; SameSite=Strict{only_tls}"


def find_cookie(headers: Iterable[bytes]) -> str:
    """Return the session of Cookie headers; empty: there is none, or more than one."""
    pairs = [pair.strip().partition("=") for header in headers for pair in header.decode("latin-1").split(";")]
    found = [value for name, _, value in pairs if name == COOKIE]
    return found[0] if len(found) == 1 else ""


def comes_from_here(origin: str, site: str, host: str) -> bool:
    """Return whether a request comes from a page of this service, by what the browser says of it."""
    if site not in ("", "same-origin", "none"):
        return False
    return not origin or origin.partition("://")[2].lower() == host.lower()


def _xor(one: bytes, other: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(one, other, strict=True))


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode()
