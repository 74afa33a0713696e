"""What the service refuses, apart from plain bad input. All are `InputError`s: one line, and what to do next."""

from carpool.errors import InputError


class NoSuchJob(InputError):
    def __init__(self, job: str) -> None:
        super().__init__(f"there is no job {job!r}; `carpool jobs --all` lists them")


class WrongState(InputError):
    """The job exists, but what was asked for cannot be done with it now."""


class Unavailable(InputError):
    """Nothing can be accepted at the moment (the disk is full, say); what runs goes on. Try again later."""


class HomeInUse(InputError):
    """Another service works on the same home directory."""
