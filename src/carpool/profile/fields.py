"""The error of this package that a user sees, and strict reading of its files."""

from carpool.errors import InputError
from carpool.fields import Fields


class ProfileError(InputError):
    """A profile, table or measurement file that cannot be used."""


class ProfileFields(Fields):
    """One object of a profile or of a raw file."""

    error = ProfileError
