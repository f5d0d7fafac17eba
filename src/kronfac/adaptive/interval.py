"""Stale statistics whose interval adapts (SP-NGD, Osawa et al. 2020).

Curvature changes fast at first and slowly later. At each refresh the new statistics ``X`` are compared
with those of the last refresh ``X₋₁`` and of the one before ``X₋₂``; ``X`` is similar to ``Y`` when
``‖X - Y‖_F ≤ α ‖Y‖_F``. With the interval ``Δ`` and the one before it ``Δ₋₁``:

- not similar to ``X₋₁``: ``Δ ← max(1, ⌊Δ/2⌋)``;
- similar to ``X₋₁``, but not to ``X₋₂``: ``Δ`` stays;
- similar to both: ``Δ ← Δ + Δ₋₁``.

SP-NGD has an interval for each statistic. Here one serves the whole model, so that all layers, and all
ranks, refresh at the same steps: a *share* of the statistics decides, half of them by default. Waiting
for all of them would let one noisy layer (a norm layer, or one whose gradient is nearly zero) hold the
interval at 1 for ever; half of them follow the model as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kronfac.options.config import Adaptive, Count, check_count, check_fraction, check_positive
from kronfac.state.layer_state import LayerState

Verdict = Literal["shortened", "kept", "lengthened"]
_NEVER = -1


@dataclass(frozen=True)
class StaleInterval:
    """An interval that follows how fast the statistics change, given as ``refresh_every=``.

    A refresh then always takes new statistics. Given as ``factor_every=`` as well, as in SP-NGD, none are
    taken between refreshes. Two further copies of the statistics are kept.

    Args:
        tolerance: α, the relative change below which statistics count as similar.
        initial: steps between refreshes at first.
        maximum: the interval never grows beyond this.
        share: share of the statistics that have to be similar, for the model to count as similar.
    """

    tolerance: float = 0.1
    _: KW_ONLY
    initial: int = 1
    maximum: int = 100
    share: float = 0.5

    def __post_init__(self) -> None:
        check_positive("tolerance", self.tolerance)
        check_count("initial", self.initial)
        check_count("maximum", self.maximum)
        check_fraction("share", self.share)
        if self.share == 0:
            raise ValueError("share=0 would lengthen the interval for ever; give 0.5, for example.")
        if self.initial > self.maximum:
            raise ValueError(f"initial={self.initial!r} must not exceed maximum={self.maximum!r}.")


class AdaptiveInterval(Adaptive):
    """The interval of this moment: a schedule whose values the rule makes."""

    def __init__(self, rule: StaleInterval) -> None:
        self.rule: StaleInterval = rule
        self.start_anew()

    def start_anew(self) -> None:
        """Forget everything."""
        #: The interval, the one before it, and the step of the last refresh by it.
        self.current = self.before = int(self.rule.initial)
        self.last: int | None = None

    def __call__(self, step: int) -> int:
        """Return the interval, which is the same for every step until the next refresh."""
        return self.current

    def due(self, step: int) -> bool:
        """Whether all layers are refreshed at a step."""
        return self.last is None or step - self.last >= self.current

    def judge(self, votes: Sequence[float], step: int) -> Verdict:
        """Adapt after a refresh, by the votes of all statistics (see :func:`compare`)."""
        self.last = step
        recent, of_recent, older, of_older = votes
        if not of_recent:
            return "kept"
        length = self.current
        if recent < self.rule.share * of_recent:
            length = max(1, self.current // 2)
        elif of_older and older >= self.rule.share * of_older:
            length = min(self.current + self.before, self.rule.maximum)
        self.before, self.current = self.current, length
        if length == self.before:
            return "kept"
        return "shortened" if length < self.before else "lengthened"

    def entry(self) -> Tensor:
        """What is saved."""
        last = _NEVER if self.last is None else self.last
        return torch.tensor([self.current, self.before, last], dtype=torch.int64, device="cpu")

    def resume(self, entries: Iterable[Mapping[str, Any]]) -> None:
        """Continue from what was saved; without it, start again."""
        self.start_anew()
        for entry in entries:
            if "interval" in entry:
                self.current, self.before, last = entry["interval"].tolist()
                self.last = None if last == _NEVER else last


def compare(states: Iterable[LayerState], tolerance: float) -> Tensor:
    """Compare statistics that this rank keeps with those of the last two refreshes, and remember them.

    Returns how many are similar to the last ones, of how many, and how many to those before, of how many:
    ``[4]``, on the host, which waits, as it does for any refresh.
    """
    similar: list[list[Tensor]] = [[], []]
    for state in states:
        known, state.compared = state.compared, min(2, state.compared + 1)
        for name, running in state.running.items():
            statistic = running.statistic
            comparable = statistic.combine == "sum" and not statistic.basis
            mean = running.mean() if comparable else None
            if mean is None or not state.keeps(name):
                continue
            before = state.history.get(name, ())
            for flags, old in zip(similar[:known], before, strict=False):
                flags.append(_similar(mean, old, tolerance))
            state.history[name] = (mean, before[0] if before else torch.zeros_like(mean))
    votes = [n for flags in similar for n in (_count(flags), len(flags))]
    return torch.tensor(votes, device="cpu")


def _similar(mean: Tensor, old: Tensor, tolerance: float) -> Tensor:
    similar: Tensor = (mean - old).norm() <= tolerance * old.norm()
    return similar


def _count(flags: Sequence[Tensor]) -> int:
    if not flags:
        return 0
    return int(torch.stack([flag.to(flags[0].device) for flag in flags]).sum())


Interval = Count | StaleInterval


def as_interval(value: Interval) -> int | Callable[[int], int]:
    """Turn a rule into the schedule that follows it; numbers and callables stay what they are."""
    return AdaptiveInterval(value) if isinstance(value, StaleInterval) else value


def as_intervals(factor_every: Interval, refresh_every: Interval) -> tuple[Count, Count]:
    """Schedules of both intervals; one rule for both is one schedule."""
    refresh = as_interval(refresh_every)
    if not isinstance(factor_every, StaleInterval):
        return factor_every, refresh
    if factor_every != refresh_every:
        raise ValueError(
            f"factor_every={factor_every!r} is judged at refreshes and needs the same rule as "
            f"refresh_every, which is {refresh_every!r}."
        )
    return refresh, refresh
