"""Names for the parts of a step: they show in profiler traces and can be timed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Phases:
    """Marks phases for ``torch.profiler`` and, inside :meth:`timed`, adds up their seconds."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] | None = None

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Mark the enclosed work as one phase."""
        with torch.profiler.record_function(f"kronfac.{name}"):
            seconds = self._seconds
            if seconds is None:
                yield
                return
            started = _now()
            try:
                yield
            finally:
                seconds[name] = seconds.get(name, 0.0) + _now() - started

    @contextmanager
    def timed(self) -> Iterator[dict[str, float]]:
        """Time all phases inside; the device is waited for at both ends of each of them."""
        before, seconds = self._seconds, dict[str, float]()
        self._seconds = seconds
        try:
            yield seconds
        finally:
            self._seconds = before


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
