"""Axes: from values to places between 0 and 1, with ticks at round numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kronfac.report.draw import text

Kind = Literal["linear", "log", "accuracy"]


@dataclass(frozen=True)
class Scale:
    """Linear, logarithmic, or accuracies spaced by the logarithm of their error.

    ``low`` and ``high`` are in the inner measure: the value, its logarithm, or minus the logarithm of
    the error.
    """

    kind: Kind
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]  # value and label

    def place(self, value: float) -> float:
        """0 at the start of the axis, 1 at its end; values beyond are put on the edge."""
        if self.kind == "linear":
            inner = value
        elif self.kind == "log":
            inner = math.log10(value) if value > 0 else self.low
        else:
            inner = -math.log10(1 - value) if value < 1 else self.high
        share = (inner - self.low) / (self.high - self.low)
        return min(1.0, max(0.0, share))


def linear(values: Sequence[float], *, zero: bool = False, percent: bool = False) -> Scale:
    """Ticks at 1, 2 or 5 times a power of ten; the axis ends at ticks' or values' edges."""
    low, high = _range([*values, 0.0] if zero else values)
    step = _round_step((high - low) / 5)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    places = [i * step for i in range(first, last + 1)]
    label = text.percent if percent else _label
    return Scale("linear", places[0], places[-1], tuple((p, label(p)) for p in places))


def along(values: Sequence[float]) -> Scale:
    """For steps and seconds: from 0 to the last value exactly, ticks inside."""
    high = max(values, default=1.0) or 1.0
    step = _near_step(high / 6)
    places = [i * step for i in range(int(high / step + 1e-9) + 1)]
    return Scale("linear", 0.0, high, tuple((p, _label(p)) for p in places))


def log(values: Sequence[float]) -> Scale:
    """Powers of ten, with 2 and 5 between them when there are few."""
    positive = [v for v in values if v > 0] or [1.0]
    low, high = math.log10(min(positive)), math.log10(max(positive))
    room = max(0.04 * (high - low), 0.02)
    low, high = low - room, high + room
    for digits in ((1, 1.5, 2, 3, 4, 5, 7), (1, 2, 5), (1,)):
        found = [
            d * 10.0**e
            for e in range(math.floor(low), math.ceil(high) + 1)
            for d in digits
            if low <= math.log10(d) + e <= high
        ]
        if len(found) <= 7:
            break
    found = found[:: 1 + len(found) // 8]
    return Scale("log", low, high, tuple((p, _label(p)) for p in found))


def accuracy(values: Sequence[float]) -> Scale:
    """Good accuracies are spread apart by their error; ones that stay low get a linear axis."""
    if max(values) < 0.9 or max(values) > 1:
        return linear(values, percent=True)
    errors = [1 - v for v in values if v < 1] or [0.01]
    least, most = min(errors), min(1.0, max(errors))
    if max(values) >= 1:
        least /= 2  # room for runs without any error
    low, high = -math.log10(most), -math.log10(least)
    room = 0.05 * max(high - low, 0.1)
    low, high = max(0.0, low - room), high + room
    errors_at = [d * 10.0**e for e in range(0, -7, -1) for d in (5, 2, 1)]
    found = [e for e in errors_at if e < 1 and low <= -math.log10(e) <= high]
    ticks = tuple((1 - e, text.percent(round(1 - e, 8))) for e in found)
    return Scale("accuracy", low, high, ticks)


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values, default=0.0), max(values, default=1.0)
    if high - low > 1e-12 * max(abs(low), abs(high)):
        return low, high
    room = abs(low) / 10 or 0.5
    return low - room, high + room


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return float(next(m for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9)) * power)


def _near_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return float(min((1, 2, 5, 10), key=lambda m: abs(math.log(m * power / rough))) * power)


def _label(value: float) -> str:
    if value and not 1e-3 <= abs(value) < 1e4:
        if abs(value) >= 1e4 and abs(value) < 1e6 and value == round(value, -2):
            return f"{value / 1000:g}k"
        return text.short(value)
    return f"{float(f'{value:.6g}'):g}"
