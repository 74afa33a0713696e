"""The errors that a person can mend.

An `InputError` says in one line which file, line and field is wrong and what to do about it. The command line prints it
without a traceback and exits with code 2; everything else that is raised is a defect of ours.
"""


class InputError(ValueError):
    """Bad input from a person; the message is one line and names a remedy."""
