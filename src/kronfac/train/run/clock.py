"""Seconds of training, and where they go."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TypeVar

import torch

from kronfac.state.timing import Seconds
from kronfac.train.optim.composite import kfac_of

T = TypeVar("T")
#: K-FAC's own names, as events show them; what is not listed is shown as it is.
_NAMES = {"observe-input": "observe", "observe-output": "observe", "base": "optimizer"}


class TrainingClock:
    """Counts the seconds of training steps only: evaluation, checkpoints and logging are not timed."""

    def __init__(self, device: torch.device, optimizer: object) -> None:
        self.seconds = 0.0
        self.device = device
        self.kfac = kfac_of(optimizer)
        #: Seconds of each phase since :meth:`take_phases`.
        self.phases: dict[str, float] = {}
        #: Seconds of each layer, by phase, since the start.
        self.layers: dict[str, dict[str, float]] = {}
        self._started: float | None = None
        self._waited = 0.0

    def start(self) -> None:
        """Start or continue timing."""
        self._started = self._now(sync=True)

    def pause(self) -> None:
        """Stop timing: what follows is not training."""
        if self._started is not None:
            self.seconds += self._now(sync=True) - self._started
            self._started = None

    def waiting(self, batches: Iterable[T]) -> Iterator[T]:
        """The same batches; the wait for each is the phase ``data`` of its step."""
        coming = iter(batches)
        while True:
            begun = self._now(sync=False)
            try:
                batch = next(coming)
            except StopIteration:
                return
            self._waited = self._now(sync=False) - begun
            yield batch

    @contextmanager
    def split(self, timed: bool) -> Iterator[StepTimes]:
        """Divide the time of one step into phases; on GPUs this waits for the device."""
        times = StepTimes(self, timed)
        context = self.kfac.timed() if timed and self.kfac is not None else nullcontext(Seconds())
        with context as own:
            times.own = own
            yield times
        if timed:
            self._add(times)

    def _add(self, times: StepTimes) -> None:
        self._count("data", self._waited)
        self._count("forward_backward", times.forward_backward)
        self._count("optimizer", times.optimizer)
        for name, seconds in times.own.items():
            self._count(_NAMES.get(name, name), seconds)
        for layer, phases in times.own.layers.items():
            kept = self.layers.setdefault(layer, {})
            for name, seconds in phases.items():
                name = _NAMES.get(name, name)
                kept[name] = kept.get(name, 0.0) + seconds

    def _count(self, name: str, seconds: float) -> None:
        self.phases[name] = self.phases.get(name, 0.0) + seconds

    def take_phases(self) -> dict[str, float]:
        """Seconds of each phase since the last call."""
        taken, self.phases = self.phases, {}
        return {name: round(seconds, 6) for name, seconds in taken.items()}

    def _now(self, sync: bool) -> float:
        if sync and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


class StepTimes:
    """The parts of one step: call :meth:`backward_done` and :meth:`step_done`."""

    def __init__(self, clock: TrainingClock, timed: bool) -> None:
        self._clock, self._timed = clock, timed
        self._last = clock._now(sync=timed)
        self._counted = 0.0
        self.own = Seconds()
        self.forward_backward = self.optimizer = 0.0

    def backward_done(self) -> None:
        """Forward and backward pass are over; what K-FAC observed in them is its own."""
        self.forward_backward = self._lap()

    def step_done(self) -> None:
        """The step is taken; what is no phase of K-FAC is the optimizer's."""
        self.optimizer = self._lap()

    def _lap(self) -> float:
        now, own = self._clock._now(sync=self._timed), sum(self.own.values())
        lap = max(0.0, now - self._last - (own - self._counted))
        self._last, self._counted = now, own
        return lap
