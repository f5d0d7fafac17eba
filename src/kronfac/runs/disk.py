"""Reading files with clear errors, and replacing them without loss."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from kronfac.runs.errors import UserError


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn errors of the file system into one sentence."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        found = _of_the_system(error)
        if found is None:
            raise
        if found.errno in (errno.ENOSPC, errno.EDQUOT):
            what = "the disk is full"
        else:
            what = found.strerror or str(found)
        raise UserError(
            f"{path} cannot be written: {what}; what was saved before is still there."
        ) from error


def _of_the_system(error: BaseException | None) -> OSError | None:
    """The error itself, or the one behind it: torch raises another when it cannot finish a file."""
    while error is not None and not isinstance(error, OSError):
        error = error.__context__
    return error


def read_text(path: Path) -> str:
    """The content of a file; nothing if there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from error


def replace(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file whole or not at all: beside it first, then in its place."""
    beside = path.with_name(path.name + ".part")
    with explained(path):
        try:
            with beside.open("wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
        except BaseException:
            with suppress(OSError):
                beside.unlink()
            raise
