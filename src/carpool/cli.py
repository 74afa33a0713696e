"""The command `carpool`. Subcommands live beside what they command and are imported when they are called, so that
starting is quick. Bad input becomes one line on standard error and exit code 2, never a traceback."""

import sys
from importlib import import_module

import click

from carpool import __version__
from carpool.errors import InputError

COMMANDS = {
    "simulate": "carpool.sim.commands:simulate",
    "compare": "carpool.sim.commands:compare",
    "workload": "carpool.sim.workload_commands:workload",
    "policies": "carpool.policies.commands:policies",
    "profiles": "carpool.profile.commands:profiles",
    "fit": "carpool.profile.commands:fit",
}


class LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[name].partition(":")
        command = getattr(import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="carpool")
def cli() -> None:
    """Schedule deep-learning jobs that share GPUs when that lowers the mean completion time, and only then."""


def main() -> None:
    try:
        code = cli.main(standalone_mode=False)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (KeyboardInterrupt, click.Abort):
        print("interrupted; nothing was written", file=sys.stderr)
        code = 130
    except BrokenPipeError:  # the reader of our output went away
        sys.stderr.close()
        code = 141
    sys.exit(code)


if __name__ == "__main__":
    main()
