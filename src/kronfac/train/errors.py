"""What a user can get wrong."""


class UserError(Exception):
    """One sentence for the user: what was wrong, its value, what is supported and what to do.

    The ``kronfac`` command prints it without a traceback and exits with code 2.
    """
