"""Completion in a shell: the script that is printed, and what it asks the command."""

import subprocess

import pytest

from tests.support.command_line import COMMAND, call, environment


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_names_the_command(shell):
    said = call("completion", shell)
    assert said.code == 0
    assert "_CARPOOL_COMPLETE" in said.out
    assert "carpool" in said.out


def test_the_name_of_a_wrong_argument_is_written_as_the_help_has_it():
    said = call("completion", "tcsh")
    assert (said.code, said.err.startswith("error: SHELL: 'tcsh' is not one of")) == (2, True)


def test_commands_and_options_are_completed_in_bash():
    """The function that bash calls, with the words that bash gives it."""
    said = subprocess.run(
        ["bash", "-c", f'carpool() {{ "{COMMAND[0]}" -m carpool.cli "$@"; }}; '
         'COMP_WORDS="carpool submit --excl" COMP_CWORD=2 _CARPOOL_COMPLETE=bash_complete carpool; '
         'COMP_WORDS="carpool exp" COMP_CWORD=1 _CARPOOL_COMPLETE=bash_complete carpool'],
        env=environment(), capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert said.stdout.split() == ["plain,--exclusive", "plain,explain"]
