"""Values of K-FAC options that change during training."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kronfac.adaptive.interval import StaleInterval
from kronfac.adaptive.relative import Relative
from kronfac.options.config import check_fraction, check_positive
from kronfac.runs.errors import UserError
from kronfac.runs.hints import advice
from kronfac.runs.timetable import Timetable

#: Options that may be tables, and whether their values are whole numbers.
SCHEDULED = {"damping": False, "factor_every": True, "refresh_every": True, "decay": False}


@dataclass(frozen=True)
class Steps:
    """``start·factorⁿ``, n being the number of epochs in the list that have passed (SC'20)."""

    start: float
    factor: float
    epochs: tuple[float, ...]
    timetable: Timetable
    whole: bool = False

    def __call__(self, step: int) -> Any:
        """The value at a step."""
        passed = sum(step >= self.timetable.step(epoch) for epoch in self.epochs)
        value = self.after(passed)
        return max(1, round(value)) if self.whole else value

    def after(self, passed: int) -> float:
        """The value after ``passed`` of the epochs, not rounded."""
        try:
            return self.start * self.factor**passed
        except OverflowError:
            return math.inf


def as_callable(
    name: str, value: Any, timetable: Timetable
) -> float | int | Callable[[int], Any] | StaleInterval | Relative:
    """A number as it is, a table ``{ start, factor, epochs }`` as a function of the step.

    Intervals may also be ``"stale"`` or ``{ stale = 0.1, maximum = 50 }``: they adapt themselves. A
    damping ``{ relative = 0.1 }`` is a share of each layer's curvature.
    """
    if name == "damping" and isinstance(value, Mapping) and "relative" in value:
        return _relative(value)
    if SCHEDULED.get(name) and (
        value == "stale" or (isinstance(value, Mapping) and "stale" in value)
    ):
        return _stale(name, value)
    if not isinstance(value, Mapping):
        return value  # type: ignore[no-any-return]
    known = ("start", "factor", "epochs")
    for key in value:
        if key not in known:
            raise UserError(f"unknown key {key!r} in the schedule of {name}; {advice(key, known)}")
    try:
        start, factor, *epochs = (_number(one) for one in _numbers(value))
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{name} = {dict(value)!r} is no schedule; it must look like "
            "{ start = 0.001, factor = 0.5, epochs = [25, 35] }."
        ) from error
    steps = Steps(start, factor, tuple(epochs), timetable, SCHEDULED.get(name, False))
    _check_values(name, steps)
    return steps


def _numbers(table: Mapping[str, Any]) -> list[Any]:
    return [table["start"], table["factor"], *table["epochs"]]


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is no number")
    return float(value)


def _check_values(name: str, steps: Steps) -> None:
    """Refuse values of a schedule before the run, not in the middle of it."""
    check = check_fraction if name == "decay" else check_positive
    for passed in range(len(steps.epochs) + 1):
        when = f"after {passed} of its epochs" if passed else "at the start"
        try:
            check(name, steps.after(passed))
        except ValueError as error:
            table = f"start = {steps.start:g}, factor = {steps.factor:g}"
            raise UserError(f"the schedule of {name} ({table}) {when}: {error}") from error


def _relative(value: Mapping[str, Any]) -> Relative:
    if len(value) > 1:
        raise UserError(f"damping = {dict(value)!r} must be {{ relative = 0.1 }} and nothing else.")
    try:
        return Relative(_number(value["relative"]))
    except (TypeError, ValueError) as error:
        raise UserError(f"damping = {dict(value)!r}: {error}") from error


def _stale(name: str, value: Any) -> StaleInterval:
    options = {"stale": 0.1} if value == "stale" else dict(value)
    known = ("stale", "initial", "maximum", "share")
    for key in options:
        if key not in known:
            raise UserError(f"unknown key {key!r} in the interval {name}; {advice(key, known)}")
    try:
        return StaleInterval(options.pop("stale"), **options)
    except ValueError as error:
        raise UserError(f"{name} = {value!r}: {error}") from error
