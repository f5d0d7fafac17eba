"""Numbers as people read them."""

from __future__ import annotations

import math
import re

MISSED = "not reached"


def short(value: float | None) -> str:
    """Three significant digits; tiny and huge ones as powers of ten."""
    if value is None:
        return "–"
    if value != 0 and not 1e-3 <= abs(value) < 1e5:
        mantissa, exponent = f"{value:.2e}".split("e")
        mantissa = mantissa.rstrip("0").rstrip(".")
        return f"{mantissa}e{int(exponent)}"
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{float(f'{value:.3g}'):g}"


def glue(sentence: str) -> str:
    """Keep numbers and their units on one line."""
    return re.sub(r"(?<=\d) (?=(%|s|ms|µs|min|h|[kMG]?B)\b|%)", "\u00a0", sentence)


def between(low: str, high: str) -> str:
    """``"3.1 … 4 s"``: a unit that both ends share is said once."""
    front, _, unit = low.rpartition(" ")
    shared = front and high.endswith(f" {unit}") and " " not in front
    return f"{front if shared else low} … {high}"


def percent(value: float) -> str:
    """``0.984`` as ``"98.4 %"``."""
    return f"{float(f'{100 * value:.2f}'):g} %"


def metric(kind: str, value: float | None) -> str:
    """A value of the metric: accuracies in percent, losses as ``"loss 1.23"``."""
    if value is None:
        return "–"
    return percent(value) if kind == "accuracy" else f"loss {short(value)}"


def duration(seconds: float | None) -> str:
    """Seconds as text in the unit that fits."""
    if seconds is None or math.isinf(seconds):
        return "–"
    if seconds < 1e-3:
        return f"{1e6 * seconds:.0f} µs"
    if seconds < 1:
        return f"{float(f'{1e3 * seconds:.3g}'):g} ms"
    if seconds < 120:
        return f"{float(f'{seconds:.3g}'):g} s"
    if seconds < 7200:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    return f"{seconds / 3600:.1f} h"


def steps(count_: float) -> str:
    """``"120 steps"``."""
    return count(round(count_), "step")


def count(number_of: int, noun: str) -> str:
    """``"1 run"``, ``"3 runs"``."""
    return f"{number_of:,} {noun}{'' if number_of == 1 else 's'}"


def size(num_bytes: float | None) -> str:
    """Bytes in the unit that fits."""
    if num_bytes is None:
        return "–"
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} GB"
