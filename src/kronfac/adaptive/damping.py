"""Damping that follows how well the quadratic model predicts the loss (Levenberg-Marquardt)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

from kronfac.options.config import Adaptive, check_count, check_positive

Verdict = Literal["raised", "lowered", "kept", "rejected"]

#: Below the first ratio of actual to predicted change the damping grows, above the second it shrinks.
POOR, GOOD = 0.25, 0.75


@dataclass(frozen=True)
class LevenbergMarquardt:
    """Damping that adapts itself, given as ``damping=``; ``step`` then needs a closure.

    At every ``every``-th step the closure runs once more after the step. The ratio of the change of
    the loss to the change that the undamped quadratic model predicted says whether to trust the model:
    below 1/4 the damping is divided by ``omega**every``, above 3/4 it is multiplied by it. A loss that
    is not finite, or a model that predicted no decrease, counts as below 1/4.

    Args:
        initial: the damping γ to start with.
        every: steps between two looks.
        omega: factor per step, in (0, 1); smaller adapts faster.
        minimum: the damping never falls below this.
        maximum: the damping never rises above this.
    """

    initial: float = 1e-3
    _: KW_ONLY
    every: int = 5
    omega: float = 0.9
    minimum: float = 1e-10
    maximum: float = 1e10

    def __post_init__(self) -> None:
        for name in ("initial", "omega", "minimum", "maximum"):
            check_positive(name, getattr(self, name))
        check_count("every", self.every)
        if self.omega >= 1:
            raise ValueError(f"omega={self.omega!r} must be a number in (0, 1), 0.9 for example.")
        if not self.minimum <= self.initial <= self.maximum:
            raise ValueError(
                f"initial={self.initial!r} must lie between minimum={self.minimum!r} and "
                f"maximum={self.maximum!r}."
            )


class AdaptiveDamping(Adaptive):
    """The damping of this moment: a schedule whose values the rule makes."""

    def __init__(self, rule: LevenbergMarquardt) -> None:
        self.rule: LevenbergMarquardt = rule
        self.current = float(rule.initial)

    def __call__(self, step: int) -> float:
        """Return the damping, which is the same for every step until the next look."""
        return self.current

    def resume(self, entries: Iterable[Mapping[str, Any]]) -> None:
        """Continue from what was saved; without it, start again."""
        self.current = float(self.rule.initial)
        for entry in entries:
            if "damping" in entry:
                self.current = float(entry["damping"])

    def due(self, step: int) -> bool:
        """Whether the rule looks at the step after ``step`` completed ones."""
        return (step + 1) % self.rule.every == 0

    def judge(self, actual: float, predicted: float) -> Verdict:
        """Compare the change of the loss with the one that was predicted, and adapt."""
        rule = self.rule
        factor = rule.omega**rule.every
        ratio = actual / predicted if predicted < 0 else math.nan
        verdict: Verdict = "kept"
        if not math.isfinite(ratio):
            verdict = "rejected"
        elif ratio < POOR:
            verdict = "raised"
        elif ratio > GOOD:
            verdict = "lowered"
        if verdict in ("rejected", "raised"):
            self.current = min(self.current / factor, rule.maximum)
        elif verdict == "lowered":
            self.current = max(self.current * factor, rule.minimum)
        return verdict


def as_schedule(
    damping: float | Callable[[int], float] | LevenbergMarquardt,
) -> float | Callable[[int], float]:
    """Turn a rule into the schedule that follows it; numbers and callables stay what they are."""
    return AdaptiveDamping(damping) if isinstance(damping, LevenbergMarquardt) else damping
