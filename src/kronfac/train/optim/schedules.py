"""How the learning rate, and momentum with it, change over the epochs.

A shape maps progress in epochs (a float) to a factor in [0, 1] of each parameter group's own
``initial_lr``. Progress taken at the middle of a step, that of ``t + ½`` steps, leaves neither the
first step of a warm-up nor the last step of a decay without effect. A batch that changes during
training multiplies the factor by one of :data:`BATCH_SCALING`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

from torch.optim import Optimizer

from kronfac.runs.errors import UserError
from kronfac.runs.hints import advice
from kronfac.train.optim.composite import kfac_of


class Shape(Protocol):
    """A factor of the learning rate for every moment of training."""

    def __call__(self, epoch: float, /) -> float:
        """Return the factor, in [0, 1], after so many epochs."""
        ...


@dataclass(frozen=True)
class Constant:
    """The learning rate never changes."""

    def __call__(self, epoch: float) -> float:
        """Return 1."""
        return 1.0


@dataclass(frozen=True)
class Polynomial:
    """``(1 - (e - start)/(end - start))^power``, 1 before ``start``, 0 after ``end`` (Osawa et al.)."""

    start: float
    end: float
    power: float = 2.0

    def __post_init__(self) -> None:
        _check_span(self.start, self.end)
        if not _is_number(self.power) or self.power <= 0:
            raise UserError(f"schedule power={self.power!r} must be a positive number.")

    def __call__(self, epoch: float) -> float:
        """Return the factor after so many epochs."""
        return float((1.0 - _passed(epoch, self.start, self.end)) ** self.power)


@dataclass(frozen=True)
class Linear:
    """A straight line from 1 at ``start`` to 0 at ``end``."""

    start: float
    end: float

    def __post_init__(self) -> None:
        _check_span(self.start, self.end)

    def __call__(self, epoch: float) -> float:
        """Return the factor after so many epochs."""
        return 1.0 - _passed(epoch, self.start, self.end)


@dataclass(frozen=True)
class Cosine:
    """Half a cosine wave, ``(1 + cos πx)/2``, from 1 at ``start`` to 0 at ``end``."""

    start: float
    end: float

    def __post_init__(self) -> None:
        _check_span(self.start, self.end)

    def __call__(self, epoch: float) -> float:
        """Return the factor after so many epochs."""
        return 0.5 * (1.0 + math.cos(math.pi * _passed(epoch, self.start, self.end)))


@dataclass(frozen=True)
class Steps:
    """``gamma`` to the number of milestones (epochs) that have passed."""

    milestones: tuple[float, ...]
    gamma: float = 0.1

    def __post_init__(self) -> None:
        if not all(_is_number(m) and m >= 0 for m in self.milestones):
            raise UserError(
                f"schedule milestones={list(self.milestones)!r} must be epochs, [35, 75, 90] for "
                "example."
            )
        if not _is_number(self.gamma) or not 0 <= self.gamma <= 1:
            raise UserError(f"schedule gamma={self.gamma!r} must be a number in [0, 1].")

    def __call__(self, epoch: float) -> float:
        """Return the factor after so many epochs."""
        return float(self.gamma ** sum(epoch >= milestone for milestone in self.milestones))


@dataclass(frozen=True)
class WarmUp:
    """A straight line from ``first`` at epoch 0 to 1 at ``epochs``, times another shape."""

    shape: Shape
    epochs: float
    first: float = 0.0

    def __post_init__(self) -> None:
        if not _is_number(self.epochs) or self.epochs < 0:
            raise UserError(
                f"schedule warmup={self.epochs!r} must be a number of epochs, 0 or more."
            )
        if not _is_number(self.first) or not 0 <= self.first <= 1:
            raise UserError(f"schedule warmup_from={self.first!r} must be a number in [0, 1].")

    def __call__(self, epoch: float) -> float:
        """Return the factor after so many epochs."""
        risen = min(1.0, max(0.0, epoch) / self.epochs) if self.epochs > 0 else 1.0
        return (self.first + (1.0 - self.first) * risen) * self.shape(epoch)


_SHAPES: dict[str, type[Any]] = {
    "constant": Constant,
    "linear": Linear,
    "cosine": Cosine,
    "polynomial": Polynomial,
    "steps": Steps,
}
NAMES = tuple(_SHAPES)
#: Factors of the learning rate for a batch, by rule; the learning rate is that of the first batch.
BATCH_SCALING: dict[str, Callable[[int, int], float]] = {
    "none": lambda batch, first: 1.0,
    "linear": lambda batch, first: batch / first,
    "sqrt": lambda batch, first: math.sqrt(batch / first),
}


def build(
    kind: str,
    *,
    total: float,
    warmup: float = 0.0,
    warmup_from: float = 0.0,
    start: float | None = None,
    end: float | None = None,
    power: float | None = None,
    milestones: Sequence[float] | None = None,
    gamma: float | None = None,
) -> Callable[[float], float]:
    """Return the shape of a name, behind a linear warm-up.

    Args:
        kind: one of :data:`NAMES`.
        total: epochs of the whole training, where a decay ends unless ``end`` says otherwise.
        warmup: epochs of a linear rise before the shape.
        warmup_from: the factor at which the rise begins.
        start: epoch at which linear, cosine and polynomial begin to fall; by default the end of warm-up.
        end: epoch at which they reach 0.
        power: of polynomial; 2 by default.
        milestones: epochs at which steps are taken down.
        gamma: factor of one step down; 0.1 by default.
    """
    if kind not in _SHAPES:
        raise UserError(f"schedule shape={kind!r} is unknown; {advice(kind, NAMES)}")
    known = [field.name for field in fields(_SHAPES[kind])]
    own = {"start": start, "end": end, "power": power, "gamma": gamma}
    own["milestones"] = None if milestones is None else tuple(milestones)  # type: ignore[assignment]
    given = {name: value for name, value in own.items() if value is not None}
    for name in given:
        if name not in known:
            raise UserError(
                f"schedule {name}={given[name]!r} is no option of shape {kind!r}, which has "
                f"{', '.join(known) or 'none'}."
            )
    defaults = {"start": warmup, "end": total, "milestones": ()}
    options = {name: value for name, value in defaults.items() if name in known} | given
    shape: Shape = _SHAPES[kind](**options)
    rising = WarmUp(shape, warmup, warmup_from)
    return rising if warmup > 0 else shape


class TiedMomentum:
    """Momentum that falls with the learning rate: ``m(e) = m₀/η₀·η(e)`` (Osawa et al.).

    Each group's own momentum is tied to its own learning rate, and K-FAC's, which is one for the whole
    model, to that of the first group; those that are 0 stay 0. ``m₀`` is what the optimizer was built
    with and, beside ``initial_lr``, is kept in the groups, so that checkpoints contain it. Call
    :meth:`update` after each change of the learning rate. (The paper's ``v ← m·v - η·g`` and
    torch's form of it, which keeps ``v/η``, differ by the change of η in one step.)
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._kfac = kfac_of(optimizer)
        own = 0.0 if self._kfac is None else self._kfac.momentum
        self._own = 0.0 if callable(own) else float(own)
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
            if "momentum" in group:
                group.setdefault("initial_momentum", group["momentum"])
        if not self._own and not any(g.get("initial_momentum") for g in optimizer.param_groups):
            raise UserError(
                "momentum cannot follow the learning rate: the optimizer has none; give momentum=0.9, "
                "for example."
            )

    def update(self, scale: float = 1.0) -> None:
        """Set momentum by the learning rates of this moment.

        ``scale`` is what a larger batch has multiplied them by: momentum, below 1, does not follow it.
        """
        groups = self.optimizer.param_groups
        for group in groups:
            if group.get("initial_momentum"):
                group["momentum"] = group["initial_momentum"] * _ratio(group, scale)
        if self._own and self._kfac is not None:
            self._kfac.momentum = self._own * _ratio(groups[0], scale)


def _ratio(group: dict[str, Any], scale: float) -> float:
    initial = float(group["initial_lr"]) * scale
    return float(group["lr"]) / initial if initial else 1.0


def _passed(epoch: float, start: float, end: float) -> float:
    """The share of the way from start to end that lies behind, in [0, 1]."""
    return min(1.0, max(0.0, (epoch - start) / (end - start)))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _check_span(start: Any, end: Any) -> None:
    if not _is_number(start) or not _is_number(end) or not 0 <= start < end:
        raise UserError(
            f"schedule start={start!r} and end={end!r} must be epochs with 0 <= start < end."
        )
