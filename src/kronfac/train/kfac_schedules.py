"""Values of K-FAC options that change during training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kronfac.stale import StaleInterval
from kronfac.train.errors import UserError
from kronfac.train.hints import advice

#: Options that may be tables, and whether their values are whole numbers.
SCHEDULED = {"damping": False, "factor_every": True, "refresh_every": True, "decay": False}


@dataclass(frozen=True)
class Steps:
    """``start·factorⁿ``, n being the number of epochs in the list that have passed (SC'20)."""

    start: float
    factor: float
    epochs: tuple[float, ...]
    steps_per_epoch: int
    whole: bool = False

    def __call__(self, step: int) -> Any:
        """The value at a step."""
        passed = sum(step >= epoch * self.steps_per_epoch for epoch in self.epochs)
        value = self.start * self.factor**passed
        return max(1, round(value)) if self.whole else value


def as_callable(
    name: str, value: Any, steps_per_epoch: int
) -> float | int | Callable[[int], Any] | StaleInterval:
    """A number as it is, a table ``{ start, factor, epochs }`` as a function of the step.

    Intervals may also be ``"stale"`` or ``{ stale = 0.1, maximum = 50 }``: they adapt themselves.
    """
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
        epochs = tuple(float(epoch) for epoch in value["epochs"])
        start, factor = float(value["start"]), float(value["factor"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{name} = {dict(value)!r} is no schedule; it must look like "
            "{ start = 0.001, factor = 0.5, epochs = [25, 35] }."
        ) from error
    return Steps(start, factor, epochs, steps_per_epoch, SCHEDULED.get(name, False))


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
