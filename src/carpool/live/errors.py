"""Requests that the service refuses for reasons other than wrong input. All are `InputError`s with a remedy."""

from carpool.errors import InputError


class NoSuchJob(InputError):
    def __init__(self, job: str) -> None:
        super().__init__(f"there is no job {job!r}; `carpool jobs --all` lists them")


class WrongStatus(InputError):
    """The status of the job does not allow the request."""


class Unavailable(InputError):
    """The service cannot accept anything at the moment, for example because the disk is full. Running jobs go on."""


class Deposed(InputError):
    """Another service leads: this one can write nothing more, and must end."""

    def __init__(self, term: int) -> None:
        super().__init__(f"another service leads now, and term {term} of this one is over; start it again to stand by")


class HomeInUse(InputError):
    """Another service uses the same home directory."""
