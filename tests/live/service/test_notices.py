"""Notices to users: what is sent when, to which addresses, and that nothing waits for them or gives them away."""

import asyncio
import http.server
import json
import logging
import socket
import threading
from email import message_from_bytes

import pytest
from aiosmtpd.controller import Controller

from carpool.errors import InputError
from carpool.live.service import notice_queue, senders
from carpool.live.service.notice_queue import DueNotice, NoRoom, NoticeQueue
from carpool.live.service.notices import NoticeSettings
from carpool.live.service.senders import MailServer, NoticeText, NotSent, addresses, send
from carpool.notices import NoticeTarget, NoticeTargets
from tests.support.services import notes, one, python, serving, shell, started, until

TEXT = NoticeText("Carpool: job 1 finished", "It ran. ξ", {"job": "1"})


class Hook:
    """A web server that keeps what arrives; `status`: the answers to the first requests, then 200."""

    def __init__(self, *status):
        self.got, self.status = [], list(status)
        hook = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                hook.got.append((self.path, dict(self.headers), body))
                status = hook.status.pop(0) if hook.status else 200
                self.send_response(status)
                self.send_header("Location", "http://127.0.0.1:1/elsewhere")
                self.end_headers()

            def log_message(self, *words):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/secret-hook"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *error):
        self.server.shutdown()
        self.server.server_close()


PRIVATE = NoticeSettings(private=True)


async def test_start_end_and_failure_are_told_and_cancelling_counts_as_an_end(quick_home):
    with Hook() as hook:
        async with serving(quick_home, notices=PRIVATE) as service:
            both = {"start": f"{hook.url}/start", "end": f"{hook.url}/end"}
            good = await one(service, shell("exit 0", name="good", notify=both))
            bad = await one(service, shell("exit 3", name="bad", notify={**both, "failure": f"{hook.url}/failure"}))
            long = await one(service, shell("sleep 60", name="long", notify={"end": f"{hook.url}/end"}))
            quiet = await one(service, shell("exit 0", name="quiet"))
            for job in (good, bad, quiet):
                await service.queries.wait(job)
            await started(service, long)
            await service.requests.cancel(long)
            await until(lambda: len(hook.got) >= 5)
            await asyncio.sleep(0.1)
    told = sorted(
        (path.rpartition("/")[2], json.loads(body)["name"], json.loads(body)["event"]) for path, _, body in hook.got
    )
    assert told == [
        ("end", "good", "finished"), ("end", "long", "cancelled"), ("failure", "bad", "failed"),
        ("start", "bad", "started"), ("start", "good", "started"),
    ]  # fmt: skip


async def test_a_notice_is_tried_again_and_blocks_nothing(quick_home):
    with Hook(500, 503) as hook:
        async with serving(quick_home, notices=PRIVATE) as service:
            service.notifier.again_s = (0.1, 0.1)
            job = await one(service, shell("true", notify={"end": hook.url}))
            await service.queries.wait(job)
            await until(lambda: len(hook.got) == 3)
            assert not any("did not arrive" in text for text in notes(service))


async def test_a_notice_that_does_not_arrive_is_told_without_its_address(quick_home, caplog):
    caplog.set_level(logging.DEBUG)
    with Hook(404) as hook:
        async with serving(quick_home, notices=PRIVATE) as service:
            job = await one(service, shell("true", notify={"end": f"slack:{hook.url}"}))
            await service.queries.wait(job)
            await until(lambda: any("did not arrive" in text for text in notes(service)))
            assert len(hook.got) == 1  # what is refused for good is not repeated
            told = " ".join(notes(service)) + caplog.text
            assert "status 404" in told
            assert "secret-hook" not in told
            assert service.queries.show(job)["undelivered"] == ["slack: status 404"]


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ({"end": "mailto:me@example.org"}, r"notify: end: mailto: this service sends no mail.*--smtp"),
        ({"end": ["https://x.example/", "slack:http://10.0.0.5/secret"]}, r"end: slack: .*private.*--notify-private"),
        ({"start": "http://[::1]/"}, "private"),
        ({"start": "http://localhost:9/"}, "private"),
        ({"slowdown:0.5": "https://x.example/"}, r"slowdown:0\.5: a slow-down is at least 1"),
    ],
)
async def test_a_job_whose_notice_could_never_be_sent_is_refused(wanted, why, quick_home):
    async with serving(quick_home) as service:
        with pytest.raises(InputError, match=why) as refused:
            await one(service, shell("exit 0", notify=wanted))
        assert "secret" not in str(refused.value)


def test_what_the_operator_allows_is_not_refused():
    allowed = NoticeSettings(MailServer("mail.example"), private=True)
    allowed.check({"end": ("mailto:me@example.org", "http://127.0.0.1/"), "slowdown:1": ("https://x.example/",)})
    assert NoticeTargets().check({"slowdown:0.5": "https://x/"}), "jobs of earlier releases are still read"


async def test_a_job_that_takes_longer_than_the_bound_is_told_once(quick_home):
    code = (
        "import os, time\nfrom carpool.channel import *\nw = ReportWriter(os.environ[ENV_DIRECTORY])\n"
        "for i in range(1, 400):\n    time.sleep(0.02)\n"
        "    w.write(Report(attempt=1, iteration=i, total=400, seconds=0.02, time=time.time()))\n"
    )
    with Hook() as hook:
        async with serving(quick_home, notices=PRIVATE) as service:
            job = await one(service, python(code, notify={"slowdown:1.2": hook.url}))
            await until(lambda: getattr(service.state.jobs.get(job), "pace_seen", False))
            record = service.state.jobs[job]
            record.iteration_s = 2.0 * record.alone_iteration_s
            wanted = service.book.specs[job].notify
            for _ in range(3):
                service.notifier._judge_speed(record, wanted, service.clock.now())
            await until(lambda: hook.got)
            await asyncio.sleep(0.1)
            assert len(hook.got) == 1
            assert "takes 2.00× as long as alone" in json.loads(hook.got[0][2])["text"]
            await service.requests.cancel(job)
            await service.queries.wait(job)


def test_slack_and_ntfy_have_forms_of_their_own():
    with Hook() as hook:
        for form in ("slack", "ntfy"):
            send(NoticeTarget.read(f"{form}:{hook.url}"), TEXT, mail=None, private=True)
    (_, _, slack), (_, headers, ntfy) = hook.got
    assert json.loads(slack) == {"text": "*Carpool: job 1 finished*\nIt ran. ξ"}
    assert headers["Title"] == "Carpool: job 1 finished"
    assert ntfy == "It ran. ξ"


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost", "10.0.0.5", "169.254.169.254", "0.0.0.0", "[::1]", "[::ffff:127.0.0.1]", "0x7f.1"],
)
def test_private_addresses_are_not_contacted(host):
    with Hook() as hook:
        url = hook.url.replace("127.0.0.1", host)
        with pytest.raises(NotSent, match=r"private address|not known") as refused:
            send(NoticeTarget.read(url), TEXT, mail=None, private=False)
        assert hook.got == []
        if "private" in str(refused.value):
            assert not refused.value.again


@pytest.mark.parametrize(
    "address",
    [
        "64:ff9b::7f00:1", "64:ff9b:1::a00:5", "2002:7f00:1::", "2002:a9fe:a9fe::1", "::127.0.0.1", "fec0::1",
        "2001:0:7f00:1::", "::ffff:10.0.0.5", "fe80::1%lo", "100.64.0.1", "ff02::1", "224.0.0.1",
    ],
)  # fmt: skip
def test_addresses_that_lead_to_private_ones_are_private(address):
    assert not senders.is_public(address)


@pytest.mark.parametrize(
    "address", ["1.1.1.1", "2606:4700::1111", "::ffff:1.1.1.1", "64:ff9b::101:101", "2002:101:101::"]
)
def test_public_addresses_may_be_contacted(address):
    assert senders.is_public(address)


def test_a_webhook_that_answers_byte_by_byte_is_cut_off(monkeypatch):
    monkeypatch.setattr(senders, "WHOLE_S", 0.5)
    ended = threading.Event()

    def drip(listening):
        connection, _ = listening.accept()
        with connection:
            while not ended.wait(0.05):
                try:
                    connection.sendall(b"x")
                except OSError:
                    return

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=drip, args=(listening,), daemon=True).start()
        sending = threading.Thread(target=lambda: raised.append(not_sent(listening)), daemon=True)
        raised: list[bool] = []
        sending.start()
        sending.join(30)
        ended.set()
    assert raised == [True], "it is given up although every byte came in time"


def not_sent(listening: socket.socket) -> bool:
    with pytest.raises(NotSent):
        send(NoticeTarget.read(f"http://127.0.0.1:{listening.getsockname()[1]}/"), TEXT, mail=None, private=True)
    return True


def due(user: str, job: int) -> DueNotice:
    return DueNotice(str(job), user, NoticeTarget.read("https://notices.example/x"), TEXT)


def test_one_users_notices_leave_room_and_turns_to_others():
    queue = NoticeQueue()
    for number in range(notice_queue.MOST_OF_USER):
        queue.add(due("ann", number))
    with pytest.raises(NoRoom):
        queue.add(due("ann", 999))
    queue.add(due("bob", 1))
    taken = [queue.take_now() for _ in range(4)]
    assert [one and one.user for one in taken] == ["ann", "bob", "ann", None], "two of a user at a time, in turns"
    queue.tried(taken[0], done=False)
    assert queue.take_now().user == "ann"
    with pytest.raises(NoRoom):
        queue.add(due("ann", 999))  # one that is sent again later still counts
    queue.tried(taken[2], done=True)
    queue.add(due("ann", 1000))


async def test_webhooks_that_do_not_answer_do_not_delay_another_users_notice(quick_home, monkeypatch):
    monkeypatch.setattr("carpool.live.service.users.own_uid", lambda: 1000)  # all jobs run as this user, also as root
    with socket.create_server(("127.0.0.1", 0)) as silent, Hook() as hook:
        async with serving(quick_home, notices=PRIVATE) as service:
            slow = f"http://127.0.0.1:{silent.getsockname()[1]}/"
            jobs = [await one(service, shell("true", notify={"end": slow}), "ann") for _ in range(6)]
            jobs.append(await one(service, shell("true", notify={"end": hook.url}), "bob"))
            for job in jobs:
                await service.queries.wait(job)
            await until(lambda: hook.got)
            assert json.loads(hook.got[0][2])["user"] == "bob"


async def test_all_targets_of_a_moment_get_the_notice(quick_home):
    with Hook() as hook:
        async with serving(quick_home, notices=PRIVATE) as service:
            wanted = {"start": f"{hook.url}/start", "end": [f"{hook.url}/one", f"slack:{hook.url}/two"]}
            job = await one(service, shell("exit 0", notify=wanted))
            await service.queries.wait(job)
            await until(lambda: len(hook.got) >= 3)
            assert service.queries.show(job)["spec"]["notify"] == wanted
    assert sorted(path.rpartition("/")[2] for path, _, _ in hook.got) == ["one", "start", "two"]


def test_one_target_is_written_as_earlier_releases_wrote_it():
    kind, several = NoticeTargets(), {"end": ["https://x/", "https://y/"]}
    assert kind.to_json(kind.check({"end": "https://x/"})) == {"end": "https://x/"}
    assert kind.to_json(kind.check(several)) == several
    with pytest.raises(ValueError, match="at most 8"):
        kind.check({"end": [f"https://x/{number}" for number in range(9)]})


def test_the_address_that_was_checked_is_the_one_that_is_used(monkeypatch):
    """A name that has a public address when it is checked, and a private one when it is asked again."""
    asked = []
    monkeypatch.setattr(senders, "addresses", lambda host, port, private: asked.append(host) or [(2, "192.0.2.1")])
    used = []

    def connect(address, timeout):
        used.append(address)
        raise OSError

    monkeypatch.setattr("socket.create_connection", connect)
    with pytest.raises(NotSent):
        send(NoticeTarget.read("https://rebinding.example/x"), TEXT, mail=None, private=False)
    assert (asked, used) == (["rebinding.example"], [("192.0.2.1", 443)])


def test_redirects_are_not_followed():
    with Hook(302) as hook:
        with pytest.raises(NotSent, match="status 302"):
            send(NoticeTarget.read(hook.url), TEXT, mail=None, private=True)
        assert len(hook.got) == 1


def test_mail_goes_through_the_operators_server():
    class Keeper:
        def __init__(self):
            self.got = []

        async def handle_DATA(self, server, session, envelope):  # noqa: N802
            self.got.append(envelope)
            return "250 OK"

    keeper = Keeper()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    controller = Controller(keeper, hostname="127.0.0.1", port=port)
    controller.start()
    try:
        mail = MailServer.read(f"smtp://127.0.0.1:{port}", "", "carpool@cluster.example")
        send(NoticeTarget.read("mailto:me@example.org"), TEXT, mail=mail, private=False)
    finally:
        controller.stop()
    (envelope,) = keeper.got
    message = message_from_bytes(envelope.content)
    assert envelope.rcpt_tos == ["me@example.org"]
    assert message["Subject"] == TEXT.title
    assert message["From"] == "carpool@cluster.example"
    with pytest.raises(NotSent, match="--smtp"):
        send(NoticeTarget.read("mailto:me@example.org"), TEXT, mail=None, private=False)


@pytest.mark.parametrize(
    "wrong",
    [
        {}, {"end": "ftp://x/"}, {"end": "mailto:a@b\nBcc: c@d"}, {"end": "https://user:secret@host/"}, "end",
        {"slowdown": "https://x/"}, {"end": "https://x/ y"}, {"end": 3}, {"end": "slack:"}, {"end": "http://[::1"},
        {"later": "https://x/"}, {"end": []}, {"end": ["https://x/", "ftp://secret/"]}, {"end": ["https://x/", 3]},
    ],
)  # fmt: skip
def test_targets_that_are_none_are_refused(wrong):
    with pytest.raises(ValueError) as refused:
        NoticeTargets().check(wrong)
    assert "secret" not in str(refused.value)


def test_a_password_in_the_address_of_the_mail_server_is_refused():
    with pytest.raises(InputError, match="CARPOOL_SMTP_PASSWORD"):
        MailServer.read("smtp://me:secret@mail.example", "", "x@y")
    assert "secret" not in repr(MailServer.read("smtps://me@mail.example", "secret", "x@y"))
    assert addresses("127.0.0.1", 80, True)
