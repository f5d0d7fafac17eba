"""Unit-wise Fisher of norm layers: a 2 × 2 matrix for each channel's weight and bias (Osawa et al. 2019).

``F_c = N·Σ_n u_n u_nᵀ``, with ``u_n`` a sample's gradient of the channel's weight and bias, summed over
its positions. Nothing is factored: the step ``(F_c + γI)⁻¹ (∂w_c, ∂b_c)`` is exact, whatever the solver.
"""

from __future__ import annotations

import math
from collections.abc import Hashable

import torch
from torch import Tensor

from kronfac.layers.rows import Rows
from kronfac.linalg.solve import eigen_2x2
from kronfac.protocol.block import (
    NOTHING,
    Block,
    Context,
    Cost,
    Given,
    Statistic,
    Tensors,
    bytes_of,
)


class UnitWiseBlock(Block):
    """The curvature of a norm layer whose gradient is ``[C, 1, k]``, with k = 2, or 1 without a bias."""

    label = "unit-wise"
    undamped = knows_curvature = knows_trace = True

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        per_sample: bool,
        power: float = 1.0,
    ) -> None:
        channels, _, size = shape
        self.power = power
        self.shape = shape
        self.dtype = dtype
        self.keeps = "summed" if per_sample else "none"
        matrix = (channels, size, size)
        self.statistics = {"F": Statistic(matrix, source="output", degree=2, symmetric=True)}
        self.solution_shapes = {"F.values": (channels, size)}
        if size == 2:
            self.solution_shapes["F.vectors"] = matrix

    def observe_output(self, outputs: Rows, context: Context = NOTHING) -> dict[str, Tensor]:
        """See :meth:`Block.observe_output`; rows are ``[C, N, 1, k]``."""
        return {"F": outputs.covariance()}

    def solve(self, part: str, given: Given) -> dict[str, Tensor] | None:
        """See :meth:`Block.solve`."""
        mean = given.means["F"]
        if mean.shape[-1] == 1:
            return {"F.values": mean[..., 0].clone()}
        vectors, values = eigen_2x2(mean)
        return {"F.values": values, "F.vectors": vectors}

    def batch_key(self, part: str) -> Hashable:
        """See :meth:`Block.batch_key`."""
        return self.signature if type(self) is UnitWiseBlock else None

    def mean_curvature(self, solution: Tensors) -> Tensor:
        """See :meth:`Block.mean_curvature`; one number for all channels."""
        return solution["F.values"].mean((-2, -1), keepdim=True)[..., None]

    def precondition(self, solution: Tensors, gradient: Tensor, damping: float | Tensor) -> Tensor:
        """See :meth:`Block.precondition`."""
        return self._turn_back(
            solution, self._turn(solution, gradient) / self._damped(solution, damping)
        )

    def _damped(self, solution: Tensors, damping: float | Tensor) -> Tensor:
        """Eigenvalues of ``(F_c + γI)ᵖ``, ``[C, k]``."""
        shift = damping[..., 0] if isinstance(damping, Tensor) else damping
        values = solution["F.values"] + shift
        return values if self.power == 1 else values.pow(self.power)

    def _turn(self, solution: Tensors, matrix: Tensor) -> Tensor:
        """Express a matrix ``[C, 1, k]`` in the eigenbasis of each channel, ``[C, k]``."""
        vectors = solution.get("F.vectors")
        return matrix[..., 0, :] if vectors is None else (matrix.mT * vectors).sum(-2)

    def _turn_back(self, solution: Tensors, turned: Tensor) -> Tensor:
        """Undo :meth:`_turn`."""
        vectors = solution.get("F.vectors")
        turned = turned[..., None, :]
        return turned if vectors is None else (turned * vectors).sum(-1)[..., None, :]

    @property
    def signature(self) -> Hashable:
        """See :attr:`Block.signature`."""
        return UnitWiseBlock, self.shape, self.dtype, self.power

    def multiply(self, solution: Tensors, matrix: Tensor) -> Tensor:
        """See :meth:`Block.multiply`."""
        return self._turn_back(solution, self._turn(solution, matrix) * solution["F.values"])

    @property
    def cost(self) -> Cost:
        """See :meth:`Block.cost`."""
        values = math.prod(self.shape)
        return Cost(
            refresh_flops=20 * values,
            precondition_flops=6 * values,
            statistics_bytes=bytes_of([self.statistics["F"].shape], self.dtype),
            solution_bytes=bytes_of(self.solution_shapes.values(), self.dtype),
        )
