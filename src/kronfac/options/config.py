"""Options, checked where they are given: each error says what was wrong and what is supported."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, get_args

import torch
from torch import nn

Number = float | Callable[[int], float]
Count = int | Callable[[int], int]
Pattern = str | type[nn.Module]

Fisher = Literal["empirical", "mc", "exact", "forward"]
Rescale = Literal["auto", "kl-clip", "trust-region", "graft", "unit", "orthogonal", "quadratic"]
#: What damping may be a share of, layer by layer: the curvature's mean eigenvalue, or its trace.
ShareOf = Literal["mean", "trace"]
#: How one layer's step gets its length; "solved" ones may still get a factor that all layers share.
Rule = Literal["solved", "graft", "unit", "orthogonal", "columns", "channels"]
Missing = Literal["warn", "raise", "ignore"]
Products = Literal["auto", "float32"]
#: Rows that statistics of a layer are taken from: a number, one that goes by its width, or all of them.
RowsOption = int | Literal["auto"] | None

#: No statistic is taken from fewer rows than this if there are more.
LEAST_ROWS = 4096
#: Relative damping from which on statistics may be rounded: a tenth of each factor's mean eigenvalue,
#: where rounding changes eigenvalues by about a hundredth of it.
LEAST_SHARE = 0.01

_CHOICES: dict[str, tuple[object, ...]] = {
    "fisher": ("empirical", "mc", "exact", "forward"),
    "rescale": (None, *get_args(Rescale)),
    "on_missing": ("warn", "raise", "ignore"),
    "products": get_args(Products),
}


@dataclass(frozen=True)
class Options:
    """What does not change during training. Field meanings are those of :class:`kronfac.KFAC`."""

    fisher: Fisher
    momentum: float
    nesterov: bool
    rescale: Rescale | None
    kl_clip: float
    trust_radius: float
    early_refresh: bool
    stagger: bool
    loss_average: Literal["batch", "token"] | float | None
    include: tuple[Pattern, ...]
    exclude: tuple[Pattern, ...]
    on_missing: Missing
    max_grad_norm: float | None = None
    rows: RowsOption = None
    products: Products = "auto"
    share_inputs: bool = True
    row_form: bool = True

    @property
    def sampled(self) -> bool:
        """Whether output gradients come from ``observe()`` and not from the loss."""
        return self.fisher in ("mc", "exact")

    @property
    def narrow(self) -> bool:
        """Whether products may be in bfloat16 where the hardware is faster at them."""
        return self.products == "auto"

    @property
    def step_bound(self) -> float | None:
        """Largest ``Σ lr²⟨v, u⟩`` over all layers, twice the predicted KL divergence, if bounded."""
        if self.rescale == "trust-region":
            return 2 * self.trust_radius
        return self.kl_clip if self.rescale == "kl-clip" else None

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            check_choice(name, getattr(self, name), choices)
        for name in ("nesterov", "early_refresh", "stagger", "share_inputs", "row_form"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be True or False.")
        check_momentum("momentum", self.momentum)
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov=True needs momentum > 0; give momentum=0.9, for example.")
        check_positive("kl_clip", self.kl_clip)
        check_positive("trust_radius", self.trust_radius)
        if self.max_grad_norm is not None:
            check_positive("max_grad_norm", self.max_grad_norm)
        if self.rows is not None and self.rows != "auto":
            check_rows(self.rows)
        self._check_loss_average()

    def _check_loss_average(self) -> None:
        value = self.loss_average
        if value is None or value in ("batch", "token"):
            return
        if not is_real(value) or not 0 < float(value) < math.inf:
            raise ValueError(
                f"loss_average={value!r} is not supported; choose 'batch', 'token', None for a "
                "summed loss, or the positive number that the loss was divided by."
            )


class Ruled:
    """A schedule by a rule; users give and read the rule."""

    rule: Any
    #: What of each layer's curvature its values are shares of; ``None`` if they are no shares.
    share_of: ShareOf | None = None


class Adaptive(Ruled):
    """One whose values follow how training goes."""


def is_adaptive(schedule: object) -> bool:
    """Whether a hyperparameter adapts itself."""
    return isinstance(schedule, Adaptive)


class Schedules:
    """The hyperparameters that may change: numbers or callables of the step number."""

    def __init__(
        self,
        damping: Number,
        factor_every: Count,
        refresh_every: Count,
        decay: Number,
        momentum: float = 0.0,
    ) -> None:
        self._values: dict[str, Any] = {}
        self.set("damping", damping)
        self.set("factor_every", factor_every)
        self.set("refresh_every", refresh_every)
        self.set("decay", decay)
        self.set("momentum", momentum)

    def set(self, name: str, value: Any) -> None:
        """Replace a hyperparameter by a number or a callable of the step number."""
        if callable(value):
            _check_schedule(name, value)
        else:
            _CHECKS[name](name, value)
        self._values[name] = value

    def get(self, name: str) -> Any:
        """Return the number or the callable, as it was given."""
        return self._values[name]

    def adaptive(self, name: str) -> Any:
        """What adapts a hyperparameter, or ``None`` if nothing does."""
        value = self._values[name]
        return value if is_adaptive(value) else None

    def given(self, name: str) -> Any:
        """A hyperparameter as the user gave it: a number, a callable or a rule."""
        value = self._values[name]
        return value.rule if isinstance(value, Ruled) else value

    @property
    def relative_damping(self) -> ShareOf | None:
        """What of each layer's curvature the damping is a share of; ``None`` if it is a number."""
        value = self._values["damping"]
        return value.share_of if isinstance(value, Ruled) else None

    def hides_rounding(self, step: int) -> bool:
        """Whether damping is larger than what rounding to bfloat16 changes in eigenvalues."""
        return self.relative_damping == "mean" and self.at("damping", step) >= LEAST_SHARE

    def values(self) -> dict[str, Any]:
        """All of them, as they were given."""
        return dict(self._values)

    def at(self, name: str, step: int) -> Any:
        """Return the value at a step; what a callable returns is checked as a number would be."""
        value = self._values[name]
        if not callable(value):
            return value
        result = value(step)
        _CHECKS[name](f"{name}(step={step})", result)
        return result


def _check_schedule(name: str, value: Callable[..., Any]) -> None:
    """Raise unless a callable takes the step number, as far as its signature says."""
    try:
        inspect.signature(value).bind(0)
        fits = not isinstance(value, type)
    except TypeError:
        fits = False
    except ValueError:
        fits = True  # written in C: it says nothing, and what it returns is checked
    if not fits:
        raise ValueError(
            f"{name}={value!r} must be a number or a function of the step number alone; write "
            f"{name}=lambda step: ..., for example."
        )


def resolve_rescale(value: Rescale | None, adaptive_damping: bool) -> Rescale | None:
    """Bound steps as solved instead of ``"auto"`` if the damping needs their length as its lever."""
    return "kl-clip" if value == "auto" and adaptive_damping else value


def check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise unless ``value`` is one of the choices."""
    if value not in choices:
        supported = ", ".join(map(repr, choices))
        raise ValueError(f"{name}={value!r} is not supported; choose one of {supported}.")


def check_positive(name: str, value: Any) -> None:
    """Raise unless ``value`` is a positive finite number."""
    if not is_real(value) or not 0 < float(value) < math.inf:
        raise ValueError(f"{name}={value!r} must be a positive finite number.")


def check_non_negative(name: str, value: Any) -> None:
    """Raise unless ``value`` is a finite number of at least zero, or a tensor of one, as torch takes."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return
    if not is_real(value) or not 0 <= float(value) < math.inf:
        raise ValueError(f"{name}={value!r} must be a finite number of at least 0.")


def check_count(name: str, value: Any) -> None:
    """Raise unless ``value`` is a whole number of at least one."""
    if not is_real(value) or value != value // 1 or value < 1:
        raise ValueError(f"{name}={value!r} must be a whole number of at least 1.")


def check_rows(value: Any) -> None:
    """Raise unless ``value`` is a number of rows that makes a statistic."""
    if not is_real(value) or value != value // 1 or value < LEAST_ROWS:
        raise ValueError(
            f"rows={value!r} must be 'auto', a whole number of at least {LEAST_ROWS}, or None for all "
            "rows."
        )


def check_scaler(value: Any) -> None:
    """Raise unless ``value`` is a gradient scaler or nothing."""
    if value is not None and not isinstance(value, torch.amp.GradScaler):
        raise ValueError(f"grad_scaler={value!r} must be a torch.amp.GradScaler or None.")


def check_fraction(name: str, value: Any) -> None:
    """Raise unless ``value`` is a number in [0, 1]."""
    if not is_real(value) or not 0 <= value <= 1:
        raise ValueError(f"{name}={value!r} must be a number in [0, 1].")


def check_momentum(name: str, value: Any) -> None:
    """Raise unless ``value`` is a number in [0, 1)."""
    if not is_real(value) or not 0 <= value < 1:
        raise ValueError(f"{name}={value!r} must be a number in [0, 1).")


def is_real(value: Any) -> bool:
    """Whether ``value`` is a number, and not a flag or NaN."""
    return isinstance(value, Real) and not isinstance(value, bool) and not math.isnan(value)


_CHECKS: dict[str, Callable[[str, Any], None]] = {
    "damping": check_positive,
    "factor_every": check_count,
    "refresh_every": check_count,
    "decay": check_fraction,
    "momentum": check_momentum,
}


def as_patterns(value: Pattern | Sequence[Pattern] | None, name: str) -> tuple[Pattern, ...]:
    """Accept one pattern, several or none; ``name`` is that of the option, for the sentence."""
    if value is None:
        return ()
    several = isinstance(value, Sequence) and not isinstance(value, str)
    patterns: tuple[Pattern, ...] = tuple(value) if several else (value,)  # type: ignore[arg-type,assignment]
    for pattern in patterns:
        if not isinstance(pattern, str) and not (
            isinstance(pattern, type) and issubclass(pattern, nn.Module)
        ):
            raise ValueError(
                f"{name} holds {pattern!r}; give name patterns such as 'layer1.*' or "
                "module types such as torch.nn.Linear."
            )
    return patterns
