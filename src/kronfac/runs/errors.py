"""Errors of the user."""

import os


class UserError(Exception):
    """One sentence for the user: what was wrong, its value, what is supported and what to do.

    The ``kronfac`` command prints it without a traceback and exits with code 2.
    """


def of_a_file(error: OSError) -> UserError:
    """What the system said about a path, in one sentence; errors about no path are raised again."""
    if not isinstance(error.filename, str | bytes):
        raise error
    return UserError(f"{os.fsdecode(error.filename)} cannot be used: {error.strerror}.")
