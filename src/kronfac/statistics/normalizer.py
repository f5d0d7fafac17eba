"""What the loss was divided by."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from kronfac.statistics.forward_pass import Pass
from kronfac.statistics.running import count_dtype

#: All rows of every pass were chosen.
_ALL: Mapping[Pass, float] = {}


class Normalizer:
    """N of the whole step: what the loss was divided by, and how much of it each layer saw.

    ``everywhere`` is the N of all ranks, where the loss of each was divided by that.
    """

    def __init__(
        self,
        passes: Iterable[Pass],
        loss_average: str | float | None,
        unscaled: bool,
        everywhere: Tensor | None = None,
    ) -> None:
        self.passes = list(passes)
        self.loss_average = loss_average
        self.unscaled = unscaled
        #: What this rank saw of it.
        self.seen = sum((self._weight(forward_pass) for forward_pass in self.passes), start=0.0)
        self._total = self.seen if everywhere is None else everywhere

    def _weight(self, forward_pass: Pass) -> float | Tensor:
        if self.loss_average == "token":
            if forward_pass.terms is None:
                raise RuntimeError(
                    "loss_average='token' could not count the loss terms: the model's own forward was "
                    "not called, or no output of it received a gradient. Call the model as a whole, or "
                    "give the number that the loss was divided by."
                )
            return forward_pass.terms
        return float(forward_pass.samples)

    @property
    def samples(self) -> float | Tensor:
        """``N``."""
        if self.loss_average is None:
            return 1.0
        if isinstance(self.loss_average, str):
            return self._total
        return float(self.loss_average)

    def scale(self, degree: int) -> float | Tensor:
        """Factor that turns sums of loss gradients into sums of per-sample gradients."""
        return 1.0 if self.unscaled else self.samples**degree

    def count(self, finite: Mapping[Pass, Tensor], shares: Mapping[Pass, float] = _ALL) -> Tensor:
        """``N`` times the share of samples in passes that this layer saw and that were finite.

        ``shares`` are those of rows that were chosen, by pass, where they are not all of them.
        """
        total: Tensor | None = None
        for one, flag in finite.items():
            weight = self._weight(one) * shares[one] if one in shares else self._weight(one)
            seen = flag.to(count_dtype(flag.device)) * weight
            total = seen if total is None else total + seen
        assert total is not None
        if isinstance(self.loss_average, str):
            return total
        return total * (self.samples / _at_least_one(self._total))


def _at_least_one(count: float | Tensor) -> float | Tensor:
    return count.clamp(min=1.0) if isinstance(count, Tensor) else max(count, 1.0)
