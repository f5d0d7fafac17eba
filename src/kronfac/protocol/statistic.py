"""What a block says of its tensors: statistics, parts of its solution, and what they cost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]
#: Sizes of a tensor; ``None`` stands for a number of rows that the data decides.
Shape = tuple[int | None, ...]
#: When a part is solved: at each refresh, at each update of the statistics, or at every step.
Cadence = Literal["refresh", "factor", "step"]


@dataclass(frozen=True)
class Statistic:
    """What one statistic is, so that it can be averaged, moved between ranks and saved.

    Args:
        shape: shape of its sum (for ``gather``: of one row).
        source: where it comes from. Input statistics count rows, output statistics count samples,
            gradient and weight statistics count steps; the last two are equal on all ranks and never
            travel. Compressed ones are made by :meth:`Block.compress` from gathered rows.
        degree: the power of the output gradient in it. The gradient of a mean over ``N`` samples is
            ``N`` times too small for each power.
        symmetric: whether a triangle holds all of it.
        combine: ``"sum"`` adds over time and ranks; ``"gather"`` keeps the newest rows side by side.
        occurrences: whether entries say how often something occurred (an embedding's tokens). What has
            ever occurred then counts as at least one row, and what never has stays at zero.
        every: when it is observed: with all others (``"factor"``) or at every step (``"step"``), which
            gradients and weights can be.
        decay: weight of the old sum at each update, if it is not the common ``decay``.
        basis: names of the solution's tensors in which it is expressed, if any. It is observed as soon
            as there is a solution, may be missing in :meth:`Block.solve`, and follows
            :meth:`Block.rebase` when one of them is solved again.
    """

    shape: tuple[int, ...]
    source: Literal["input", "output", "gradient", "weight", "compressed"]
    degree: int = 0
    symmetric: bool = False
    combine: Literal["sum", "gather"] = "sum"
    occurrences: bool = False
    every: Literal["factor", "step"] = "factor"
    decay: float | None = None
    basis: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.every == "step" and not self.is_replicated:
            raise ValueError(f"a statistic with source={self.source!r} needs every='factor'.")
        if self.combine == "gather" and self.is_replicated:
            raise ValueError(
                f"a statistic with source={self.source!r} is the same on all ranks: there is nothing "
                "to gather; use combine='sum'."
            )
        if self.source == "compressed" and self.combine != "gather":
            raise ValueError("a statistic with source='compressed' needs combine='gather'.")

    @property
    def sum_shape(self) -> Shape:
        """Shape of what is kept: gathered rows stand in the last dimension but one."""
        if self.combine == "sum":
            return self.shape
        return (*self.shape[:-1], None, self.shape[-1])

    @property
    def is_replicated(self) -> bool:
        """Whether every rank that looks sees the same, so that nothing has to travel."""
        return self.source in ("gradient", "weight")

    @property
    def may_be_missing(self) -> bool:
        """Whether a part can be solved without it."""
        return bool(self.basis) or self.source == "compressed"


@dataclass(frozen=True)
class Cost:
    """What a block costs: placement, planning and the summary read nothing else."""

    refresh_flops: int
    precondition_flops: int
    statistics_bytes: int
    solution_bytes: int


@dataclass(frozen=True)
class Part:
    """Tensors of a solution that are solved together, apart from the rest of it.

    Args:
        statistics: names of the statistics that it is solved from.
        solution: names of the tensors in :attr:`Block.solution_shapes` that it makes.
        flops: operations to solve it.
        shared_flops: those that each summand repeats when it is divided into summands; the others
            are divided. ``None`` if it cannot be divided.
        every: when it is solved again. Each update of the statistics comes to a ``"factor"`` part
            exactly once, so that it may update what it found before.
        after: parts that come first. Each rank that works on the layer then solves this part itself,
            from what they have found.
        by_each: whether each rank that works on the layer solves it itself in any case: for solutions
            that are larger than the statistics, or that take no longer to solve than to send.
    """

    statistics: tuple[str, ...]
    solution: tuple[str, ...]
    flops: int
    shared_flops: int | None = None
    every: Cadence = "refresh"
    after: tuple[str, ...] = ()
    by_each: bool = False


def bytes_of(shapes: Iterable[Shape], dtype: torch.dtype) -> int:
    """Bytes that tensors of these shapes take; rows that the data decides are not counted."""
    return sum(math.prod(n for n in shape if n is not None) for shape in shapes) * dtype.itemsize


def fits(shape: Shape, tensor: Tensor) -> bool:
    """Whether a tensor has a shape."""
    if tensor.dim() != len(shape):
        return False
    return all(want is None or want == have for want, have in zip(shape, tensor.shape, strict=True))
