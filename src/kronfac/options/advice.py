"""Things that are allowed but hardly meant are said once, with the line of whoever called us."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch

_PACKAGES = (str(Path(__file__).parent.parent), str(Path(torch.__file__).parent))


class Advice:
    """Warns once of each topic."""

    def __init__(self) -> None:
        self._given: set[str] = set()

    def knows(self, topic: str) -> bool:
        """Whether this was said, or need not be."""
        return topic in self._given

    def skip(self, topic: str) -> None:
        """Do not say this: somebody else has."""
        self._given.add(topic)

    def give(self, topic: str, message: str | None) -> None:
        """Say this unless it was said already; nothing if there is no message."""
        if message is not None and topic not in self._given:
            self._given.add(topic)
            warn_caller(message)


def warn_caller(message: str) -> None:
    """Warn with the line of the first caller that is neither ours nor torch's."""
    warnings.warn(message, stacklevel=_caller_level())


def _caller_level() -> int:
    """How far above :func:`warn_caller` that caller is."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGES):
        level, frame = level + 1, frame.f_back
    return level
