"""Damping that follows how well the quadratic model predicts the loss (Levenberg-Marquardt)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kronfac.adaptive.relative import Relative, RelativeDamping
from kronfac.options.config import Adaptive, check_count, check_positive

Verdict = Literal["raised", "lowered", "kept"]

#: Below the first ratio of actual to predicted change the damping grows, above the second it shrinks.
POOR, GOOD = 0.25, 0.75


@dataclass(frozen=True)
class LevenbergMarquardt:
    """Damping that adapts itself, given as ``damping=``; ``step`` then needs a closure.

    At every ``every``-th step the closure runs once more after the step. The ratio of the change of
    the loss to the change that the undamped quadratic model predicted says whether to trust the model:
    below 1/4 the damping is divided by ``omega**every``, above 3/4 it is multiplied by it. A model that
    predicted no decrease counts as below 1/4. Until the ratio is above that, at the start and after it
    was below, every step is looked at.

    A step after which the loss is not finite, or more than twice as large, is undone, and the damping
    grows tenfold. So is everything since the last look if the loss has become four times as large as at
    any of the last four looks. After ten rejections in a row training stops with an error.

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


#: What a rejected step multiplies the damping by, and how many in a row end training.
REJECTED, MAX_REJECTIONS = 10.0, 10
#: Looks whose losses a new one is compared with, and how much larger it may be.
LOOKS, SURGE = 4, 4.0


class AdaptiveDamping(Adaptive):
    """The damping of this moment: a schedule whose values the rule makes."""

    def __init__(self, rule: LevenbergMarquardt) -> None:
        self.rule: LevenbergMarquardt = rule
        self.current = float(rule.initial)
        #: Whether the model has predicted well since it last did not.
        self.trusted = False
        self.rejections = 0
        #: Losses at the last looks.
        self.losses: deque[float] = deque(maxlen=LOOKS)
        #: Where training stood at the last of them, to go back to.
        self.good: Any = None

    def __getstate__(self) -> dict[str, Any]:
        """Copies of the optimizer start without a way back."""
        return {**vars(self), "good": None}

    def __call__(self, step: int) -> float:
        """Return the damping, which is the same for every step until the next look."""
        return self.current

    def resume(self, entries: Iterable[Mapping[str, Any]]) -> None:
        """Continue from what was saved; without it, start again."""
        self.current = float(self.rule.initial)
        self.trusted, self.rejections = False, 0
        self.losses.clear()
        self.good = None
        for entry in entries:
            if "damping" in entry:
                self.current = float(entry["damping"])
            if "looks" in entry:  # checkpoints of version 0.1 have the damping only
                trusted, rejections, count, *losses = entry["looks"].tolist()
                self.trusted, self.rejections = bool(trusted), int(rejections)
                self.losses = deque(losses[: int(count)], maxlen=LOOKS)

    def entries(self) -> dict[str, Tensor]:
        """What is saved."""
        numbers = [float(self.trusted), float(self.rejections), float(len(self.losses))]
        numbers += [*self.losses, *[0.0] * (LOOKS - len(self.losses))]
        found = {"damping": [self.current], "looks": numbers}
        return {
            name: torch.tensor(values, dtype=torch.float64, device="cpu").squeeze()
            for name, values in found.items()
        }

    def due(self, step: int) -> bool:
        """Whether the rule looks at the step after ``step`` completed ones."""
        return self._on_grid(step) or not self.trusted

    def _on_grid(self, step: int) -> bool:
        return (step + 1) % self.rule.every == 0

    def surges(self, loss: float) -> bool:
        """Whether the loss at a look says that steps since the last one have to be undone."""
        if not math.isfinite(loss):
            return bool(self.losses)
        return bool(self.losses) and loss > SURGE * max(map(abs, self.losses))

    def rejects(self, loss: float, after: float, predicted: float) -> bool:
        """Whether a step has to be undone, given the loss before and after it."""
        return not math.isfinite(after) or after - loss > max(abs(loss), -predicted)

    def reject(self) -> None:
        """React to a step that was undone."""
        self.current = min(self.current * REJECTED, self.rule.maximum)
        self.trusted = False
        self.rejections += 1
        if self.rejections >= MAX_REJECTIONS:
            raise RuntimeError(
                f"{MAX_REJECTIONS} steps in a row made the loss much larger or not finite and were "
                f"undone, although the damping is {self.current:.2g} by now; the parameters are those "
                "of the last good step. Lower the learning rate, or look at the data of this batch."
            )

    def judge(self, loss: float, actual: float, predicted: float, step: int) -> Verdict:
        """Compare the change of the loss with the one that was predicted, and adapt."""
        rule = self.rule
        self.rejections = 0
        if math.isfinite(loss):
            self.losses.append(loss)
        factor = rule.omega**rule.every
        ratio = actual / predicted if predicted < 0 else -math.inf
        self.trusted = ratio >= POOR
        if not self.trusted:
            self.current = min(self.current / factor, rule.maximum)
            return "raised"
        if ratio > GOOD and self._on_grid(step):
            self.current = max(self.current * factor, rule.minimum)
            return "lowered"
        return "kept"


def as_schedule(
    damping: float | Callable[[int], float] | LevenbergMarquardt | Relative,
) -> float | Callable[[int], float]:
    """Turn a rule into the schedule that follows it; numbers and callables stay what they are."""
    if isinstance(damping, Relative):
        return RelativeDamping(damping)
    return AdaptiveDamping(damping) if isinstance(damping, LevenbergMarquardt) else damping
