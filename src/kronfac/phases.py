"""Names for the parts of a step: they show in profiler traces and can be timed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Seconds(dict[str, float]):
    """Seconds by phase; ``layers`` has those that were measured for single layers, by name and phase."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: dict[str, dict[str, float]] = {}


class Phases:
    """Marks phases for ``torch.profiler`` and, inside :meth:`timed`, adds up their seconds."""

    def __init__(self) -> None:
        self._seconds: Seconds | None = None

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
    def layer(self, phase: str, name: str) -> Iterator[None]:
        """Mark the part of a phase that is about one layer; free unless phases are timed."""
        if self._seconds is None:
            yield
            return
        own = self._seconds.layers.setdefault(name, {})
        started = _now()
        try:
            yield
        finally:
            own[phase] = own.get(phase, 0.0) + _now() - started

    @contextmanager
    def timed(self) -> Iterator[Seconds]:
        """Time all phases inside; the device is waited for at both ends of each of them."""
        before, seconds = self._seconds, Seconds()
        self._seconds = seconds
        try:
            yield seconds
        finally:
            self._seconds = before


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
