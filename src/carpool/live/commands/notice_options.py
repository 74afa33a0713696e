"""The options of `carpool serve` for notices to users."""

import os
from collections.abc import Callable
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])
ENV_PASSWORD = "CARPOOL_SMTP_PASSWORD"


def notice_options(command: Command) -> Command:
    """Add the options for notices to a command."""
    options = (
        click.option(
            "--smtp",
            metavar="URL",
            help=f"Mail server for notices: smtp://[USER@]HOST[:PORT] or smtps://…; password in {ENV_PASSWORD}.",
        ),
        click.option("--mail-from", default="carpool@localhost", show_default=True, help="Sender of this mail."),
        click.option(
            "--notify-private", is_flag=True, help="Let notices go to private addresses, such as 10.0.0.5 or localhost."
        ),
    )
    for add in reversed(options):
        command = add(command)
    return command


def take_notices(options: dict[str, Any]) -> Any:
    """Return the settings for notices, and hide the password from all processes that are started later."""
    from carpool.live.service.notices import NoticeSettings
    from carpool.live.service.senders import MailServer

    smtp, sender, private = (options.pop(name) for name in ("smtp", "mail_from", "notify_private"))
    password = os.environ.pop(ENV_PASSWORD, "")
    return NoticeSettings(MailServer.read(smtp, password, sender) if smtp else None, private)
