"""Printing to a stream that may fail: a closed pipe, a full disk, a terminal that is gone."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from typing import TextIO

#: What the system says of a stream that cannot be written.
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG)


def complain(sentence: str) -> None:
    """Print one line on standard error; ignore it if that fails."""
    try:
        print(f"kronfac: {sentence}", file=sys.stderr, flush=True)
    except OSError:
        silence(sys.stderr)


def unwritable(error: OSError) -> str:
    """The sentence for standard output that cannot be written."""
    return f"standard output cannot be written: {error.strerror or error}"


def is_of_output(error: OSError) -> bool:
    """Whether it is about what was printed: errors of files name them."""
    return error.filename is None and error.errno in _UNWRITABLE


def silence(stream: TextIO) -> None:
    """Let what is still in the stream's buffer, and what others print there, go nowhere."""
    if stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a stream of tests has no file
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
