"""Running averages as (sum, count) pairs.

Sums and counts add, over calls, micro-batches, steps and ranks, so that accumulation and deferral are
exact by construction.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kronfac.protocol.statistic import Statistic


class Running:
    """A decayed ``(sum, count)`` pair, used as ``sum/count``.

    Decay stops before a count gets so small that the sum would underflow: the mean of a layer that is
    not observed for a long time stays its last mean.
    """

    def __init__(self, statistic: Statistic) -> None:
        self.statistic = statistic
        self.sum: Tensor | None = None
        self.count: Tensor | None = None
        #: Whether something was observed since the last refresh, and (for occurrences) the share of
        #: one row among those of the last refresh at which that was so.
        self.fresh = False
        self.row_share = 0.0
        #: The step at which gathered rows were observed; -1 if that is not known.
        self.gathered_at = -1

    def decay(self, decay: float) -> None:
        """Let the past fade; a step that contributes nothing does only this."""
        if self.sum is None or self.count is None or self.statistic.combine == "gather":
            return
        factor, occurred = self._fading(decay), self._occurred()
        _above_zero(self.sum.mul_(factor), occurred)
        self.count.mul_(factor)

    def faded(self, decay: float) -> Running:
        """What :meth:`decay` would leave, in tensors of its own."""
        left = Running(self.statistic)
        if self.sum is not None and self.count is not None:
            factor = self._fading(decay)
            left.sum = _above_zero(self.sum * factor, self._occurred())
            left.count = self.count * factor
        return left

    def copy(self) -> Running:
        """The same in tensors of its own."""
        made = Running(self.statistic)
        made.sum = None if self.sum is None else self.sum.clone()
        made.count = None if self.count is None else self.count.clone()
        made.fresh, made.row_share = self.fresh, self.row_share
        made.gathered_at = self.gathered_at
        return made

    def _fading(self, decay: float) -> Tensor:
        assert self.sum is not None
        assert self.count is not None
        return self.fading(self.sum.dtype, self.count, decay)

    @staticmethod
    def fading(dtype: torch.dtype, counts: Tensor, decay: float) -> Tensor:
        """Factors by which sums of a precision and their counts fade."""
        return (_least_count(dtype) / counts).clamp(min=decay, max=1.0)

    def _occurred(self) -> Tensor | None:
        """What has ever occurred, where that matters."""
        assert self.sum is not None
        return self.sum > 0 if self.statistic.occurrences else None

    def add(self, total: Tensor, count: Tensor) -> None:
        """Add a contribution; gathered rows replace the old ones."""
        self.fresh = True
        if self.sum is None or self.count is None or self.statistic.combine == "gather":
            self.sum, self.count = total, count.clone()  # several statistics share one count
        else:
            self.sum.add_(total)
            self.count.add_(count)

    def mean(self) -> Tensor | None:
        """The mean, or ``None`` when nothing has been counted (reads the count)."""
        if self.sum is None or self.count is None:
            return None
        count = float(self.count)
        return self.mean_of(self.sum, count) if count > 0 else None

    def mean_on_device(self) -> Tensor | None:
        """The mean without a look at the count: zero if nothing has been counted."""
        if self.sum is None or self.count is None:
            return None
        tiny = torch.finfo(self.count.dtype).tiny
        return self.sum / self.count.clamp(min=tiny).to(self.sum.dtype)

    def mean_of(self, total: Tensor, count: float) -> Tensor:
        """The mean for a sum over all ranks and its count; gathered rows as they are."""
        if self.statistic.combine == "gather":
            return total
        mean = total / count
        if not self.statistic.occurrences:
            return mean
        self.agree(count, self.fresh)
        return mean.clamp_(min=self.row_share).mul_(total > 0)

    def agree(self, count: float, fresh: bool) -> None:
        """Take note of the count over all ranks, and whether any of them has observed something."""
        self.fresh = fresh
        if fresh and count > 0:
            self.row_share = 1 / count

    def forget(self) -> None:
        """Start again."""
        self.sum = self.count = None

    def allocate(self, dtype: torch.dtype, device: torch.device) -> None:
        """Make empty tensors of the final shapes, for loaders that fill what exists."""
        if self.sum is None and self.statistic.combine == "sum":
            self.sum = torch.zeros(self.statistic.shape, dtype=dtype, device=device)
            self.count = new_count(0.0, device)


def _above_zero(total: Tensor, where: Tensor | None) -> Tensor:
    """Keep from underflow, in place, what must not be mistaken for nothing."""
    if where is None:
        return total
    return total.clamp_(min=torch.finfo(total.dtype).tiny).mul_(where)


def _least_count(dtype: torch.dtype) -> float:
    """Where decay stops: nothing beside new data, and far from the smallest number of the precision."""
    return 2.0**-200 if dtype == torch.float64 else 2.0**-30


def count_dtype(device: torch.device) -> torch.dtype:
    """Counts go further than single precision can, where the device allows it."""
    return torch.float32 if device.type == "mps" else torch.float64


def new_count(value: float, device: torch.device) -> Tensor:
    """A scalar that counts."""
    return torch.full((), value, dtype=count_dtype(device), device=device)
