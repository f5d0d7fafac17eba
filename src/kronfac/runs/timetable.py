"""Where a run is: its steps, epochs and batches, which may change during training."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from kronfac.runs.errors import UserError

#: From which epoch on, how many samples a step has.
Sizes = tuple[tuple[float, int], ...]
#: More samples or epochs than any run has: what is more is a slip.
_MOST = 10**12
#: Steps by which a place may be missed by rounding.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Span:
    """Steps of one batch size in a row: whole epochs, or the rest of one that began with another.

    Args:
        step: the first one.
        epoch: progress before it.
        batch: samples of a step.
        seen: samples of its epoch that came before it.
        count: steps until the end of its epoch; later epochs of the span have as many.
    """

    step: int
    epoch: float
    batch: int
    seen: int
    count: int

    @property
    def per_epoch(self) -> float:
        """Steps in one epoch of progress."""
        return self.count / (1.0 - self.epoch % 1.0)


@dataclass(frozen=True)
class Place:
    """Which samples a step takes: ``batch`` of the epoch's order, from number ``first`` on."""

    epoch: int
    first: int
    batch: int


class Timetable:
    """Step ↔ epoch ↔ batch, of a run with one batch size or several.

    An epoch is one pass over the samples; those at its end that do not fill a batch are left out.
    A size holds from the first step at or after its epoch. In the middle of an epoch the samples
    that are left follow in batches of the new size.

    Args:
        samples: of the training set.
        batch: samples of a step, or pairs of an epoch and a size.
    """

    def __init__(self, samples: int, batch: int | Sizes) -> None:
        self.spans = tuple(_spans(samples, sizes_of(batch)))
        self._steps = [span.step for span in self.spans]
        self._epochs = [span.epoch for span in self.spans]

    def epoch(self, step: float) -> float:
        """Progress in epochs after so many steps."""
        span = self.span(step)
        return span.epoch + (step - span.step) / span.per_epoch

    def step(self, epoch: float) -> float:
        """Steps, not rounded, until so much progress."""
        number = max(1, bisect_right(self._epochs, epoch))
        span, following = self.spans[number - 1], self._steps[number : number + 1]
        return min([span.step + (epoch - span.epoch) * span.per_epoch, *following])

    def batch(self, step: int) -> int:
        """Samples of a step."""
        return self.span(step).batch

    def place(self, step: int) -> Place:
        """Which samples a step takes."""
        span = self.span(step)
        epochs, number = divmod(step - span.step, span.count)
        return Place(int(span.epoch) + epochs, span.seen + number * span.batch, span.batch)

    def samples(self, steps: int) -> int:
        """Samples of the first ``steps`` steps, repeated ones included."""
        ends = [*self._steps[1:], steps]
        spans = zip(self.spans, ends, strict=True)
        return sum(max(0, min(end, steps) - span.step) * span.batch for span, end in spans)

    def sizes(self, steps: int) -> list[int]:
        """The batch sizes of the first ``steps`` steps, in their order."""
        found = [span.batch for span in self.spans if span.step < steps]
        return found[:1] + [size for before, size in pairwise(found) if size != before]

    def span(self, step: float) -> Span:
        """The span of a step."""
        return self.spans[bisect_right(self._steps, step) - 1]


def sizes_of(batch: int | Sizes) -> Sizes:
    """The pairs of a schedule, one for a number; what is no schedule is a :class:`UserError`."""
    if isinstance(batch, int):
        return ((0.0, batch),)
    if wrong := _mistake(batch):
        shown = [[_short(start), size] for start, size in batch]
        raise UserError(
            f"train.batch = {shown!r}: {wrong}; a schedule looks like [[0, 64], [2, 128]], the epoch "
            "from which on and the batch."
        )
    return batch


def _mistake(sizes: Sizes) -> str:
    if not sizes or sizes[0][0] != 0:
        return "it must begin at epoch 0"
    for start, size in sizes:
        if not 0 <= start <= _MOST:
            return f"epoch {start:g} must be a number of epochs"
        if not 1 <= size <= _MOST:
            return f"batch {size} must be from 1 to {_MOST}"
    for (start, size), (following, other) in pairwise(sizes):
        if following <= start:
            return f"epoch {following:g} must come after epoch {start:g}"
        if other == size:
            return f"the batch is {size} before and after epoch {following:g}"
    return ""


def _short(start: float) -> float | int:
    return int(start) if start == start // 1 and abs(start) <= _MOST else start


def _spans(samples: int, sizes: Sizes) -> Iterator[Span]:
    assert samples >= max(size for _, size in sizes)
    at = Span(0, 0.0, 0, 0, 1)  # where the next span begins
    ends = [*(start for start, _ in sizes[1:]), math.inf]
    for (start, batch), end in zip(sizes, ends, strict=True):
        first = at.step
        while at.epoch < end:
            at = replace(at, batch=batch, count=(samples - at.seen) // batch)
            if at.count:
                yield at
            if at.count and not at.seen and math.isinf(end):
                return
            at = _after(at, end)
        if at.step == first:
            raise UserError(
                f"train.batch: {batch} from epoch {start:g} on has no step before epoch {end:g}, "
                "where the next size begins; leave it out, or let it last longer."
            )


def _after(span: Span, end: float) -> Span:
    """Where a span ends: at epoch ``end``, and after the epoch if it is only the rest of one."""
    whole = math.floor(span.epoch)
    if not span.count:  # what is left of the epoch fills no batch
        return replace(span, epoch=whole + 1.0, seen=0)
    until = min(end, whole + 1.0) if span.seen else end
    steps = math.ceil((until - span.epoch) * span.per_epoch - _ROUNDING)
    steps = min(steps, span.count) if span.seen else steps
    epochs, rest = divmod(steps, span.count)
    seen = span.seen + rest * span.batch if rest else 0
    epoch = span.epoch + steps / span.per_epoch if rest else float(whole + epochs)
    return replace(span, step=span.step + steps, epoch=epoch, seen=seen)
