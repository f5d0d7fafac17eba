"""Damping as a share of each layer's own curvature."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

from kronfac.options.config import Ruled, ShareOf, check_choice, check_positive


@dataclass(frozen=True)
class Relative:
    """Damping relative to a layer's mean curvature, given as ``damping=``.

    γ of a layer is ``share · (tr A/d_A) · (tr G/d_G)``, so it means the same for every layer,
    whatever the loss is multiplied by, and whether it is a sum or a mean. A layer without curvature
    passes its raw gradient.

    ``to="trace"`` makes it ``share · tr A · tr G``. A batch has few directions of curvature, however wide
    a layer is: large eigenvalues grow as the trace does, and the mean falls behind. So a share of the
    trace means the same at every width (:func:`kronfac.mup_param_groups`). It is a smaller number, 1e-3
    for example.

    Args:
        share: ρ, or a function of the step number that returns it.
        to: ``"mean"`` for the mean eigenvalue of each factor, ``"trace"`` for the sum of all.
    """

    share: float | Callable[[int], float] = 0.1
    to: ShareOf = "mean"

    def __repr__(self) -> str:
        """The same in every process, as ranks compare it."""
        share = "a callable" if callable(self.share) else self.share
        return f"Relative({share})" if self.to == "mean" else f"Relative({share}, to={self.to!r})"

    def __post_init__(self) -> None:
        if not callable(self.share):
            check_positive("share", self.share)
        check_choice("to", self.to, get_args(ShareOf))


class RelativeDamping(Ruled):
    """The share as a schedule."""

    def __init__(self, rule: Relative) -> None:
        self.rule: Relative = rule
        self.share_of = rule.to

    def __call__(self, step: int) -> float:
        """The share at a step."""
        share = self.rule.share
        return float(share(step) if callable(share) else share)
