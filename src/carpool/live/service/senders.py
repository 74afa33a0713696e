"""Sending a notice: by a webhook, in the forms of Slack and ntfy, or by electronic mail. Every call blocks.

A webhook names an address that a user chose, so the service must not become a way into the network around it: unless
the operator allows it, only public addresses are contacted, the one that was checked is the one that is used, and no
redirect is followed. `notices.py` calls these functions in a thread.
"""

import http.client
import ipaddress
import json
import smtplib
import socket
import ssl
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from email.message import EmailMessage
from threading import Timer
from urllib.parse import urlsplit

from carpool.errors import InputError
from carpool.notices import MAIL, NTFY, SLACK, NoticeTarget

TIMEOUT_S = 10.0
"""Seconds for each step of a notice."""
WHOLE_S = 20.0
"""Seconds after which a webhook is cut off, whatever it does: one that answers byte by byte is never late for a
step."""
MOST_READ = 65_536
NO_MAIL = "this service sends no mail; the operator may give --smtp"
NOT_PUBLIC = "its host has a private address; the operator may allow it (--notify-private)"
HOLDING_IPV4 = [ipaddress.IPv6Network(text) for text in ("64:ff9b::/96", "64:ff9b:1::/48", "::/96")]
"""Networks whose addresses end with an IPv4 address to which a router may translate them."""


class NotSent(Exception):
    """A notice did not arrive. The message names no address: webhooks are secrets."""

    def __init__(self, why: str, again: bool = True) -> None:
        super().__init__(why)
        self.again = again
        """Whether another attempt may succeed."""


@dataclass(frozen=True, slots=True)
class MailServer:
    """A server for outgoing mail, as the operator names it."""

    host: str
    port: int = 25
    tls: bool = False
    """Encrypted from the first byte; else STARTTLS is used where the server offers it."""
    user: str = ""
    password: str = ""
    sender: str = "carpool@localhost"

    @classmethod
    def read(cls, url: str, password: str, sender: str) -> "MailServer":
        """Return the server of an address such as smtp://user@mail.example:587."""
        try:
            parts = urlsplit(url)
            port = parts.port or (465 if parts.scheme == "smtps" else 25)
        except ValueError:
            parts, port = urlsplit(""), 0
        if parts.scheme not in ("smtp", "smtps") or not parts.hostname or parts.password:
            raise InputError(
                "--smtp: write smtp://[USER@]HOST[:PORT] or smtps://…; the password in CARPOOL_SMTP_PASSWORD"
            )
        return cls(parts.hostname, port, parts.scheme == "smtps", parts.username or "", password, sender)

    def __repr__(self) -> str:
        return f"<mail server {self.host}:{self.port}>"


@dataclass(frozen=True, slots=True)
class NoticeText:
    """What a notice says."""

    title: str
    text: str
    facts: Mapping[str, object]
    """The same for programs."""


def send(target: NoticeTarget, notice: NoticeText, *, mail: MailServer | None, private: bool) -> None:
    """Send a notice, or raise `NotSent`. `private`: whether addresses that are not public may be contacted."""
    if target.form == MAIL:
        _send_mail(target.address, notice, mail)
        return
    headers = {"Content-Type": "application/json", "User-Agent": "carpool"}
    if target.form == SLACK:
        body = json.dumps({"text": f"*{notice.title}*\n{notice.text}"}).encode()
    elif target.form == NTFY:
        title = notice.title.encode("ascii", "replace").decode()
        headers = {"Title": title, "Content-Type": "text/plain; charset=utf-8", "User-Agent": "carpool"}
        body = notice.text.encode()
    else:
        body = json.dumps({"title": notice.title, "text": notice.text, **notice.facts}).encode()
    _post(target.address, body, headers, private)


def never_sent(target: NoticeTarget, *, mail: MailServer | None, private: bool) -> str:
    """Return why a notice to a target cannot be sent, as far as the target alone tells; empty: it may arrive."""
    if target.form == MAIL:
        return "" if mail is not None else NO_MAIL
    host = urlsplit(target.address).hostname or ""
    try:
        public = is_public(host)
    except ValueError:  # a name, whose address is looked up when the notice is sent
        public = host.rpartition(".")[2] != "localhost"
    return "" if private or public else NOT_PUBLIC


def addresses(host: str, port: int, private: bool) -> list[tuple[int, str]]:
    """Return the addresses of a host, as families and texts; raise `NotSent` if one of them must not be contacted."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise NotSent("its host is not known") from None
    texts = [(int(family), str(address[0])) for family, _, _, _, address in found]
    if not private and not all(is_public(text) for _, text in texts):
        raise NotSent(NOT_PUBLIC, again=False)
    return texts


def is_public(text: str) -> bool:
    """Return whether an address belongs to the public network. An address that leads to another one counts as both."""
    address = ipaddress.ip_address(text.partition("%")[0])
    reached: list[ipaddress.IPv4Address | ipaddress.IPv6Address] = [address]
    if isinstance(address, ipaddress.IPv6Address):
        if address.is_site_local:
            return False
        leads_to = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
        if any(address in network for network in HOLDING_IPV4):
            leads_to.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        inner = [one for one in leads_to if one is not None]
        reached = inner if address.ipv4_mapped else [address, *inner]
    return all(one.is_global and not one.is_multicast for one in reached)


def _post(url: str, body: bytes, headers: dict[str, str], private: bool) -> None:
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    _, address = addresses(host, port, private)[0]
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    cut: Timer | None = None
    try:
        # to the address that was checked: asked again, the name might have another one
        plain = sock = socket.create_connection((address, port), TIMEOUT_S)
        cut = _cut_after(plain, WHOLE_S)
        if parts.scheme == "https":
            sock = ssl.create_default_context().wrap_socket(plain, server_hostname=host)
            cut.cancel()
            cut = _cut_after(sock, WHOLE_S)  # the plain one gave its connection away
        connection.sock = sock
        connection.request("POST", path, body, headers)
        response = connection.getresponse()
        response.read(MOST_READ)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise NotSent(type(error).__name__) from None
    finally:
        if cut is not None:
            cut.cancel()
        connection.close()
    if response.status >= 300:
        raise NotSent(f"status {response.status}", again=response.status >= 500 or response.status == 429)


def _cut_after(connection: socket.socket, seconds: float) -> Timer:
    """End a connection after some time, unless the timer is cancelled before: reading from it fails then."""

    def cut() -> None:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    timer = Timer(seconds, cut)
    timer.daemon = True
    timer.start()
    return timer


def _send_mail(address: str, notice: NoticeText, mail: MailServer | None) -> None:
    if mail is None:
        raise NotSent(NO_MAIL, again=False)
    message = EmailMessage()
    message["From"], message["To"], message["Subject"] = mail.sender, address, notice.title
    message.set_content(notice.text)
    kind = smtplib.SMTP_SSL if mail.tls else smtplib.SMTP
    try:
        with kind(mail.host, mail.port, timeout=TIMEOUT_S) as server:
            if not mail.tls and server.has_extn("starttls"):
                server.starttls(context=ssl.create_default_context())
            if mail.user:
                server.login(mail.user, mail.password)
            server.send_message(message)
    except smtplib.SMTPResponseException as error:
        raise NotSent(f"the mail server answered {error.smtp_code}", again=error.smtp_code < 500) from None
    except (OSError, smtplib.SMTPException) as error:
        raise NotSent(type(error).__name__) from None
