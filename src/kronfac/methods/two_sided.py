"""What Shampoo and Jorge share: a matrix for each side of the gradient, ``P = L̂ V R̂``.

Both sides are made of the batch's gradient ``V: [*b, d_out, d_in]`` alone, ``V Vᵀ`` on the left and
``VᵀV`` on the right. It is the same on all ranks, so no statistic ever travels. A side is kept *dense*,
or as its *diagonal* if it is wider than ``max_dim`` or belongs to the tokens of an embedding.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kronfac.layers import Layer
from kronfac.linalg.covariance import gram
from kronfac.options.config import Options, check_count
from kronfac.protocol.block import Block, Cost, Given, Tensors, bytes_of
from kronfac.protocol.method import Method

Form = Literal["dense", "diagonal"]
Side = Literal["L", "R"]
SIDES: tuple[Side, Side] = ("L", "R")


class TwoSidedBlock(Block):
    """``P = L̂ V R̂`` with a matrix or a diagonal for each side, called ``"L.root"`` and ``"R.root"``.

    Args:
        layer: the layer.
        name: how roots are found, for the summary.
        max_dim: a side wider than this keeps only its diagonal.
    """

    #: Damping is added to each side, so it may be a share of that side's mean eigenvalue.
    knows_curvature = True

    def __init__(self, layer: Layer, name: str, max_dim: int) -> None:
        self.shape = layer.matrix_shape
        self.dtype = layer.factor_dtype
        *batch, d_out, d_in = self.shape
        self.widths: dict[Side, int] = {"L": d_out, "R": d_in}
        self.forms: dict[Side, Form] = {
            side: "dense" if width <= max_dim else "diagonal" for side, width in self.widths.items()
        }
        if layer.picks_columns:
            self.forms["R"] = "diagonal"
        self.side_shapes: dict[Side, tuple[int, ...]] = {
            side: (*batch, width, width) if self.is_dense(side) else (*batch, width)
            for side, width in self.widths.items()
        }
        self.label = ", ".join(
            [name, *(f"{side} diag" for side in SIDES if not self.is_dense(side))]
        )
        self.solution_shapes = {f"{side}.root": self.side_shapes[side] for side in SIDES}

    def is_dense(self, side: Side) -> bool:
        """Whether a side is kept as a matrix."""
        return self.forms[side] == "dense"

    @property
    def dense_roots(self) -> frozenset[str]:
        """Names of the roots that are matrices."""
        return frozenset(f"{side}.root" for side in SIDES if self.is_dense(side))

    # --- sides ----------------------------------------------------------------------------------

    def moment(self, side: Side, gradient: Tensor) -> Tensor:
        """``V Vᵀ`` or ``VᵀV``, or the diagonal of it."""
        rows = gradient.mT if side == "L" else gradient
        return gram(rows) if self.is_dense(side) else rows.square().sum(-2)

    def mean_eigenvalue(self, side: Side, matrix: Tensor) -> Tensor:
        """``trace/dimension`` of a side, ``[*b]``."""
        return (matrix.diagonal(dim1=-2, dim2=-1) if self.is_dense(side) else matrix).mean(-1)

    def damping_of(self, given: Given, mean: Tensor) -> Tensor:
        """ε of a side with this mean eigenvalue, ``[*b]``."""
        return mean * given.damping if given.relative else torch.full_like(mean, given.damping)

    def spread(self, side: Side, numbers: Tensor) -> Tensor:
        """Numbers ``[*b]`` in a shape that multiplies a side."""
        return numbers[..., None, None] if self.is_dense(side) else numbers[..., None]

    def identity(self, side: Side, like: Tensor) -> Tensor:
        """The identity in the form of a side."""
        if not self.is_dense(side):
            return torch.ones_like(like)
        eye = torch.eye(self.widths[side], dtype=like.dtype, device=like.device)
        return eye.expand_as(like)

    # --- applying -------------------------------------------------------------------------------

    def precondition(self, solution: Tensors, gradient: Tensor, damping: float | Tensor) -> Tensor:
        """See :meth:`Block.precondition`; the damping is in the roots."""
        left, right = solution["L.root"], solution["R.root"]
        result = left @ gradient if self.is_dense("L") else left[..., None] * gradient
        return result @ right if self.is_dense("R") else result * right[..., None, :]

    def mean_curvature(self, solution: Tensors) -> Tensor:
        """See :meth:`Block.mean_curvature`; roots have their damping in them."""
        root = solution["L.root"]
        return torch.ones((), dtype=root.dtype, device=root.device)

    @property
    def signature(self) -> Hashable:
        """See :attr:`Block.signature`."""
        return type(self), self.shape, self.dtype, *self.forms.values()

    # --- cost -----------------------------------------------------------------------------------

    #: Operations to find the root of a matrix of width d, as a multiple of d³.
    cubes: int

    def side_flops(self, side: Side) -> int:
        """Operations to solve a side."""
        size = math.prod(self.side_shapes[side])
        return size * self.widths[side] * self.cubes if self.is_dense(side) else size

    @property
    def cost(self) -> Cost:
        """See :meth:`Block.cost`."""
        dense = [self.widths[side] for side in SIDES if self.is_dense(side)]
        return Cost(
            refresh_flops=sum(map(self.side_flops, SIDES)),
            precondition_flops=2 * math.prod(self.shape) * sum(dense),
            statistics_bytes=bytes_of((one.shape for one in self.statistics.values()), self.dtype),
            solution_bytes=bytes_of(self.solution_shapes.values(), self.dtype),
        )


@dataclass(frozen=True, kw_only=True)
class TwoSidedMethod(Method):
    """What such methods leave to the base optimizer, and what does not go with them."""

    max_dim: int = 8192

    def __post_init__(self) -> None:
        check_count("max_dim", self.max_dim)

    def check(self, options: Options) -> None:
        """See :meth:`Method.check`."""
        if options.rescale == "quadratic":
            raise ValueError(
                "rescale='quadratic' adds the damping to the model's curvature, but the damping of "
                f"{self.name} is in units of squared gradients; choose 'auto', 'graft' or 'unit'."
            )

    def refusal(self, layer: Layer) -> str | None:
        """See :meth:`Method.refusal`."""
        if layer.unit_wise:
            return "its weight scales channels one by one, so its gradient has no two sides"
        return None


def side_of(part: str) -> Side:
    """The side that a part is named after."""
    return "L" if part == "L" else "R"
