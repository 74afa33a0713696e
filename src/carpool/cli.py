"""The command `carpool`: its subcommands by section, exit codes and signals.

Subcommands are named as strings and imported when they are called, so that each starts quickly. Wrong input becomes one
line on standard error and exit code 2, never a traceback.
"""

import os
import re
import signal
import sys
from importlib import import_module
from types import FrameType

import click

from carpool import __version__
from carpool.errors import InputError, nearest

SECTIONS = {
    "Run jobs": {
        "serve": "carpool.live.commands.serve:serve",
        "submit": "carpool.live.commands.submit:submit",
        "run": "carpool.live.commands.terminal:run",
        "attach": "carpool.live.commands.terminal:attach",
        "exec": "carpool.live.commands.terminal:exec_command",
        "jobs": "carpool.live.commands.jobs:jobs",
        "show": "carpool.live.commands.jobs:show",
        "explain": "carpool.live.commands.jobs:explain",
        "logs": "carpool.live.commands.jobs:logs",
        "cancel": "carpool.live.commands.changes:cancel",
        "hold": "carpool.live.commands.changes:hold",
        "release": "carpool.live.commands.changes:release",
        "pause": "carpool.live.commands.changes:pause",
        "resume": "carpool.live.commands.changes:resume",
        "requeue": "carpool.live.commands.changes:requeue",
        "priority": "carpool.live.commands.changes:priority",
        "prune": "carpool.live.commands.changes:prune",
        "gpus": "carpool.live.commands.overview:gpus",
        "history": "carpool.live.commands.overview:history",
        "usage": "carpool.live.commands.usage:usage",
        "replay": "carpool.live.commands.replay:replay",
        "user": "carpool.live.commands.users:user",
        "group": "carpool.live.commands.groups:group",
        "drain": "carpool.live.commands.closures:drain",
        "undrain": "carpool.live.commands.closures:undrain",
        "reserve": "carpool.live.commands.closures:reserve",
        "unreserve": "carpool.live.commands.closures:unreserve",
        "reservations": "carpool.live.commands.closures:reservations",
        "nodes": "carpool.live.commands.nodes:nodes",
        "agent": "carpool.live.commands.agent:agent",
        "emulate": "carpool.live.commands.emulate:emulate",
        "service": "carpool.live.commands.system_service:service",
        "journal": "carpool.live.commands.journal:journal",
        "doctor": "carpool.live.commands.doctor:doctor",
        "demo": "carpool.live.commands.demo:demo",
        "completion": "carpool.commands.completion:completion",
    },
    "Profile trainings and GPUs": {
        "check": "carpool.commands.check:check",
        "profile": "carpool.commands.profile:profile",
        "profiles": "carpool.commands.profiles:profiles",
        "fit": "carpool.commands.fit:fit",
    },
    "Study policies": {
        "policies": "carpool.commands.policies:policies",
        "simulate": "carpool.commands.simulate:simulate",
        "compare": "carpool.commands.compare:compare",
        "workload": "carpool.commands.workload:workload",
        "bound": "carpool.commands.bound:bound",
        "study": "carpool.commands.study:study",
        "paper": "carpool.commands.paper:paper",
    },
}
COMPLETE = "_CARPOOL_COMPLETE"
"""Variable by which a shell asks for completions; the script of `carpool completion` sets it."""
COMMANDS = {name: place for section in SECTIONS.values() for name, place in section.items()}


NO_ARGUMENTS = getattr(click.exceptions, "NoArgsIsHelpError", ())
"""Exception with which newer versions of Click show the help of a group; older versions print it and exit."""


class Terminated(BaseException):
    """The process was asked to end by SIGTERM, or its terminal was closed (SIGHUP)."""


class LazyGroup(click.Group):
    """A group whose commands are imported when they are needed, and listed by section."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, section in SECTIONS.items():
            found = [(name, self.get_command(ctx, name)) for name in section]
            with formatter.section(title):
                room = formatter.width - 6 - max(len(name) for name in section)
                formatter.write_dl([(name, command.get_short_help_str(room)) for name, command in found if command])

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            raise click.UsageError(f"No such command {name!r}", ctx)
        module, _, attribute = COMMANDS[name].partition(":")
        command = getattr(import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="carpool")
def cli() -> None:
    """Schedule deep-learning jobs on GPUs. Jobs share a GPU only when that lowers the mean completion time."""


def main() -> None:
    """Run the command line and exit with its code."""
    _prepare()
    try:
        code = cli.main(standalone_mode=False, complete_var=COMPLETE)
        sys.stdout.flush()
    except InputError as error:
        print(f"error: {input_message(error)}", file=sys.stderr)
        code = 2
    except click.ClickException as error:
        code = error.exit_code
        if isinstance(error, NO_ARGUMENTS):
            error.show()
        else:
            print(f"error: {usage_message(error)}", file=sys.stderr)
    except (KeyboardInterrupt, click.Abort):
        print("interrupted; nothing was written", file=sys.stderr)
        code = 130
    except Terminated:
        print("terminated; nothing was written", file=sys.stderr)
        code = 143
    except BrokenPipeError:  # the reader of the output, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes the rest at exit
        code = 141
    sys.exit(code)


def input_message(error: InputError) -> str:
    """Return an error in the input as one line."""
    return " ".join(str(error).split())


def usage_message(error: click.ClickException) -> str:
    """Return an error that Click found on the command line as one line: place, problem and remedy."""
    message, ctx = " ".join(error.format_message().split()).rstrip("."), getattr(error, "ctx", None)
    if isinstance(error, click.BadParameter) and not isinstance(error, click.MissingParameter) and error.param:
        message = f"{_place(error.param)}: {_problem(error, error.param.type)}"  # a name stays as the help has it
        return f"{message}; see `{ctx.command_path} --help`" if ctx is not None else message
    if ctx is not None and isinstance(ctx.command, click.Group):
        unknown = re.match("No such command '(.*?)'", message)
        if unknown:
            name, known = unknown[1], ctx.command.list_commands(ctx)
            return f"{name}: there is no such command of `{ctx.command_path}`; {nearest(name, known)}"
    message = message[0].lower() + message[1:]
    return f"{message}; see `{ctx.command_path} --help`" if ctx is not None else message


def _place(param: click.Parameter) -> str:
    return max(param.opts, key=len) if isinstance(param, click.Option) else param.human_readable_name


def _problem(error: click.BadParameter, kind: object) -> str:
    message = " ".join(error.message.split()).rstrip(".")
    for name, words in {"integer": "whole number", "float": "number"}.items():
        message = re.sub(f"is not a valid {name}( range)?$", f"is not a {words}", message)
    value, outside, _ = message.partition(" is not in the range")
    if not outside or not isinstance(kind, click.IntRange | click.FloatRange):
        return message
    if kind.max is None:
        return f"{value} must be at least {kind.min}"
    return f"{value} must be from {kind.min} to {kind.max}"


def _prepare() -> None:
    """Let SIGTERM and SIGHUP clean up as Ctrl-C does, and let a terminal without ξ or ± show a question mark."""
    names = ("SIGTERM", "SIGHUP")

    def terminate(number: int, frame: FrameType | None) -> None:
        for name in names:  # `timeout` sends the signal twice, and the second must not disturb the clean-up
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), signal.SIG_IGN)
        raise Terminated

    for name in names:
        if hasattr(signal, name) and signal.getsignal(getattr(signal, name)) == signal.SIG_DFL:
            signal.signal(getattr(signal, name), terminate)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


if __name__ == "__main__":
    main()
