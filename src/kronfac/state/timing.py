"""Names for the parts of a step: they show in profiler traces and can be timed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

_UNTIMED = nullcontext()


class Seconds(dict[str, float]):
    """Seconds by phase; ``layers`` has those of single layers, by name and phase.

    A layer has ``observe-input``, ``observe-output``, ``refresh`` and ``precondition``, as far as this
    process has worked on it. Layers that are preconditioned together have equal parts of the time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers: dict[str, dict[str, float]] = {}

    def add(self, phase: str, seconds: float) -> None:
        """Count for a phase."""
        self[phase] = self.get(phase, 0.0) + seconds

    def add_to_layers(self, phase: str, layers: Sequence[str], seconds: float) -> None:
        """Count for some layers what a phase did for all of them at once."""
        for layer in layers:
            own = self.layers.setdefault(layer, {})
            own[phase] = own.get(phase, 0.0) + seconds / len(layers)


class Phases:
    """Marks phases for ``torch.profiler`` and, inside :meth:`timed`, adds up their seconds."""

    def __init__(self) -> None:
        self._seconds: Seconds | None = None

    def __call__(self, name: str, layer: str | None = None) -> AbstractContextManager[None]:
        """Mark the enclosed work as one phase, or as what a phase does for one layer."""
        mark: AbstractContextManager[None] = _UNTIMED
        if _is_profiled():  # marks that nobody reads take time all the same
            mark = torch.profiler.record_function(f"kronfac.{name}")
        return mark if self._seconds is None else _timed(mark, self._seconds, name, layer)

    def part(self, phase: str, *layers: str) -> AbstractContextManager[None]:
        """Mark what a phase that is marked already does for some layers; free unless timed."""
        return _UNTIMED if self._seconds is None else _Part(self._seconds, phase, layers)

    @contextmanager
    def timed(self) -> Iterator[Seconds]:
        """Time all phases inside; the device is waited for at both ends of each of them."""
        before, seconds = self._seconds, Seconds()
        self._seconds = seconds
        try:
            yield seconds
        finally:
            self._seconds = before


@contextmanager
def _timed(
    mark: AbstractContextManager[None], seconds: Seconds, name: str, layer: str | None
) -> Iterator[None]:
    """Time what is marked."""
    with mark:
        started = _now()
        try:
            yield
        finally:
            spent = _now() - started
            seconds.add(name, spent)
            if layer is not None:
                seconds.add_to_layers(name, [layer], spent)


class _Part(AbstractContextManager[None]):
    """Times what one phase does for some layers; a class, since many are opened in a step."""

    def __init__(self, seconds: Seconds, phase: str, layers: Sequence[str]) -> None:
        self.seconds, self.phase, self.layers = seconds, phase, layers

    def __enter__(self) -> None:
        self.started = _now()

    def __exit__(self, *error: object) -> None:
        self.seconds.add_to_layers(self.phase, self.layers, _now() - self.started)


def _is_profiled() -> bool:
    """Whether a profiler is running, in this thread or for all of them."""
    anywhere: bool = torch.autograd.profiler._is_profiler_enabled
    return anywhere or torch._C._autograd._profiler_enabled()


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
