"""Ctrl-C, SIGTERM and a closed terminal (SIGHUP), noticed between two steps."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

#: Signals that end a run with a checkpoint; not every system has all of them.
SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)
#: A closed terminal sends its signal more than once: further ones change nothing.
_LASTING = tuple(one for one in SIGNALS if one not in (signal.SIGINT, signal.SIGTERM))


def handle(handler: Callable[[int, FrameType | None], None]) -> dict[int, Any]:
    """Let a function handle them; returns what did so before.

    A SIGHUP that is ignored stays ignored: ``nohup`` asks for that.
    """
    ignored = [one for one in _LASTING if signal.getsignal(one) is signal.SIG_IGN]
    return {one: signal.signal(one, handler) for one in SIGNALS if one not in ignored}


def restore(before: dict[int, Any]) -> None:
    """Undo :func:`handle`."""
    for one, handler in before.items():
        signal.signal(one, handler)


class Interruption:
    """Inside, the first signal is only recorded; a second one ends the program at once.

    Only a second SIGHUP does not: a closed terminal may send several.
    """

    def __init__(self) -> None:
        self.number = 0
        self._before: dict[int, Any] = {}

    def __call__(self) -> int:
        """The number of the signal that has come, or 0."""
        return self.number

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            self._before = handle(self._remember)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore()

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number
        restore({one: was for one, was in self._before.items() if one not in _LASTING})

    def _restore(self) -> None:
        restore(self._before)
        self._before = {}
