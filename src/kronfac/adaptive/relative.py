"""Damping as a share of each layer's own curvature."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kronfac.options.config import Ruled, check_positive


@dataclass(frozen=True)
class Relative:
    """Damping relative to a layer's mean curvature, given as ``damping=``.

    γ of a layer is ``share · (tr A/d_A) · (tr G/d_G)``, so it means the same for every layer,
    whatever the loss is multiplied by, and whether it is a sum or a mean. A layer without curvature
    passes its raw gradient.

    Args:
        share: ρ, or a function of the step number that returns it.
    """

    share: float | Callable[[int], float] = 0.1

    def __repr__(self) -> str:
        """The same in every process, as ranks compare it."""
        return f"Relative({'a callable' if callable(self.share) else self.share})"

    def __post_init__(self) -> None:
        if not callable(self.share):
            check_positive("share", self.share)


class RelativeDamping(Ruled):
    """The share as a schedule."""

    is_relative = True

    def __init__(self, rule: Relative) -> None:
        self.rule: Relative = rule

    def __call__(self, step: int) -> float:
        """The share at a step."""
        share = self.rule.share
        return float(share(step) if callable(share) else share)
