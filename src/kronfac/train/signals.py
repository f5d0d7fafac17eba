"""Ctrl-C and SIGTERM, noticed between two steps."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """Inside it the first signal is only remembered; a second one ends the program at once."""

    def __init__(self) -> None:
        self.number = 0
        self._before: dict[int, Any] = {}

    def __call__(self) -> int:
        """The number of the signal that has come, or 0."""
        return self.number

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            for one in _SIGNALS:
                self._before[one] = signal.signal(one, self._remember)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore()

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        self._restore()

    def _restore(self) -> None:
        for one, handler in self._before.items():
            signal.signal(one, handler)
        self._before = {}
