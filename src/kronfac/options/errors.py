"""Errors that a training loop can catch."""


class UnsolvableError(RuntimeError):
    """A layer's curvature could not be solved several times in a row, on all ranks alike."""
