"""`carpool completion`: prints the script that completes commands and options in a shell."""

import click
from click.shell_completion import get_completion_class


@click.command(short_help="Print the completion script for a shell.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the script that completes Carpool's commands and options in a shell.

    \b
    bash:  eval "$(carpool completion bash)"   in ~/.bashrc
    zsh:   eval "$(carpool completion zsh)"    in ~/.zshrc
    fish:  carpool completion fish | source    in ~/.config/fish/config.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(context.find_root().command, {}, "carpool", "_CARPOOL_COMPLETE").source())
