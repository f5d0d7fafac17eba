"""The protocol in which methods and the machinery around them meet: the curvature of one layer.

A block is pure mathematics of one layer. It holds shapes and options, never tensors, ranks or modules:
whoever drives it keeps the statistics and solutions and may therefore add, gather, send or save them.
Four kinds of statistics cover the family:

- matrices (K-FAC and its relatives): ``combine="sum"``, ``symmetric=True``;
- vectors (rank-one methods): ``combine="sum"``, ``degree=1`` for a mean of output gradients;
- gathered per-sample rows: ``combine="gather"`` with ``keeps = "summed"`` or ``"dense"``;
- gradient only: ``source="gradient"``, seen by :meth:`Block.observe_gradient`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kronfac.layers.rows import Rows

Tensors = Mapping[str, Tensor]
#: Sizes of a tensor; ``None`` stands for a number of rows that the data decides.
Shape = tuple[int | None, ...]


@dataclass(frozen=True)
class Statistic:
    """What one statistic is, so that it can be averaged, moved between ranks and saved.

    Args:
        shape: shape of its sum (for ``gather``: of one row).
        source: where it comes from. Input statistics count rows, output statistics count samples,
            gradient statistics count steps.
        degree: the power of the output gradient in it. The gradient of a mean over ``N`` samples is
            ``N`` times too small for each power.
        symmetric: whether a triangle holds all of it.
        combine: ``"sum"`` adds over time and ranks; ``"gather"`` keeps the newest rows side by side.
        occurrences: whether entries say how often something occurred (an embedding's tokens). What has
            ever occurred then counts as at least one row, and what never has stays at zero.
    """

    shape: tuple[int, ...]
    source: Literal["input", "output", "gradient"]
    degree: int = 0
    symmetric: bool = False
    combine: Literal["sum", "gather"] = "sum"
    occurrences: bool = False

    @property
    def sum_shape(self) -> Shape:
        """Shape of what is kept: gathered rows stand in the last dimension but one."""
        if self.combine == "sum":
            return self.shape
        return (*self.shape[:-1], None, self.shape[-1])


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
    """

    statistics: tuple[str, ...]
    solution: tuple[str, ...]
    flops: int
    shared_flops: int | None = None


class Block(ABC):
    """The curvature of one layer whose gradient matrix is ``[*b, d_out, d_in]``."""

    #: Human-readable name of the method and its solver, for the summary.
    label: str
    #: What is observed, by name.
    statistics: Mapping[str, Statistic]
    #: Names and shapes of the tensors that :meth:`refresh` returns.
    solution_shapes: Mapping[str, Shape]
    #: Those of them of which a triangle says all.
    symmetric_solutions: frozenset[str] = frozenset()
    #: What of each call is kept until the step: ``"none"``, since it is observed when it happens; each
    #: sample's rows ``"summed"`` over positions and all uses in a pass; or all of its rows, ``"dense"``.
    keeps: Literal["none", "summed", "dense"] = "none"
    #: Whether solutions hold the curvature without damping: a change of damping then acts at once,
    #: and :meth:`quadratic` works.
    undamped: bool = False

    @property
    def holds_rows(self) -> bool:
        """Whether rows are kept until the step, so that both sides of a sample meet."""
        return self.keeps != "none"

    # Observing: ``solution`` is the one in use at the time, ``None`` before the first. Contributions of
    # inputs and outputs are tensors of their own, not views of rows, since sums are kept in place.

    def observe_input(self, inputs: Rows, solution: Tensors | None = None) -> dict[str, Tensor]:
        """Contributions of a call's input side."""
        return {}

    def observe_output(self, outputs: Rows, solution: Tensors | None = None) -> dict[str, Tensor]:
        """Contributions of a call's output side."""
        return {}

    def observe_pair(
        self, inputs: Rows, outputs: Rows, solution: Tensors | None = None
    ) -> dict[str, Tensor]:
        """Contributions that need both sides of the same samples (only if rows are kept)."""
        return {}

    def observe_gradient(
        self, gradient: Tensor, solution: Tensors | None = None
    ) -> dict[str, Tensor]:
        """Contributions of the gradient matrix itself."""
        return {}

    def refresh(
        self, means: Tensors, previous: Tensors | None, damping: float
    ) -> dict[str, Tensor] | None:
        """Solve all parts for the current averages. ``None`` means that there is no solution."""
        outlined = {name: self.outline(name, mean) for name, mean in means.items()}
        outlines = {name: outline for name, outline in outlined.items() if outline is not None}
        solution: dict[str, Tensor] = {}
        for part in self.parts:
            solved = self.solve(part, means, outlines, previous, damping)
            if solved is None:
                return None
            solution |= solved
        return solution

    @property
    def parts(self) -> Mapping[str, Part]:
        """Parts of the solution that can be solved on their own; one for all of it by default."""
        solution = tuple(self.solution_shapes)
        return {"": Part(tuple(self.statistics), solution, self.cost.refresh_flops)}

    @property
    def outline_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the outlines by name of the statistic; those without an outline are missing."""
        return {}

    def outline(self, name: str, value: Tensor) -> Tensor | None:
        """What other parts need to know of a statistic: a small tensor, linear in it, if any."""
        return None

    @abstractmethod
    def solve(
        self,
        part: str,
        means: Tensors,
        outlines: Tensors,
        previous: Tensors | None,
        damping: float,
    ) -> dict[str, Tensor] | None:
        """Solve one part from the means of its own statistics and the outlines of all means.

        ``previous`` is the solution in use, if there is one: where to start from, or what to update.
        ``None`` means that no solution could be found.
        """

    def solve_share(
        self,
        part: str,
        means: Tensors,
        outlines: Tensors,
        damping: float,
        index: int,
        of: int,
    ) -> dict[str, Tensor] | None:
        """Summand ``index`` of ``of`` whose sum is what :meth:`solve` finds, up to rounding.

        There is a solution only if no summand is ``None``.
        """
        raise NotImplementedError(f"{self.label!r} cannot divide part {part!r} into summands.")

    @abstractmethod
    def precondition(self, solution: Tensors, gradient: Tensor, damping: float) -> Tensor:
        """Apply a solution to a gradient matrix ``[*b, d_out, d_in]``."""

    @property
    def signature(self) -> Hashable:
        """Blocks of equal signatures can be applied together, with a leading dimension for them.

        ``None`` if that is not so.
        """
        return None

    def raw_columns(self, solution: Tensors) -> Tensor | None:
        """Columns ``[d_in]`` of which nothing is known and whose gradient passes as it is, if any."""
        return None

    def multiply(self, solution: Tensors, matrix: Tensor) -> Tensor:
        """The undamped curvature times a matrix ``[*b, d_out, d_in]``."""
        raise NotImplementedError(
            f"{self.label!r} keeps no curvature without damping; use a method and solver that does."
        )

    def quadratic(self, solution: Tensors, step: Tensor) -> Tensor:
        """``vᵀFv`` of the undamped curvature for a step ``v: [*b, d_out, d_in]``, a scalar."""
        return (step * self.multiply(solution, step)).sum()

    @property
    @abstractmethod
    def cost(self) -> Cost:
        """What the block costs."""


def bytes_of(shapes: Iterable[Shape], dtype: torch.dtype) -> int:
    """Bytes that tensors of these shapes take; rows that the data decides are not counted."""
    return sum(math.prod(n for n in shape if n is not None) for shape in shapes) * dtype.itemsize


def fits(shape: Shape, tensor: Tensor) -> bool:
    """Whether a tensor has a shape."""
    if tensor.dim() != len(shape):
        return False
    return all(want is None or want == have for want, have in zip(shape, tensor.shape, strict=True))
