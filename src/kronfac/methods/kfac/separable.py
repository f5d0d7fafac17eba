"""K-FAC with two products a step: the nearest separable form of the damped inverse in the eigenbasis.

In the eigenbasis the exact form divides by ``v_G v_Aᵀ + γ``, no product of a column and a row, which
takes four products: there and back on each side. Here it becomes ``s tᵀ``, whose logarithm is nearest:
    ``log s_i + log t_j = -(mean_j L_ij + mean_i L_ij - mean_ij L)``, ``L = log(v_G v_Aᵀ + γ)``,
and ``P = [Q_G s Q_Gᵀ] V [Q_A t Q_Aᵀ]``, with both brackets made once for a solution and a damping, by
every rank that applies them; without these it takes four products as well. For γ = 0 it is exact.
The two products of Cholesky, with damping on each factor, are another such form, but not the nearest.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from kronfac.linalg.covariance import gram, gram_flops
from kronfac.linalg.precision import full_precision
from kronfac.methods.kfac.block import KFACBlock
from kronfac.protocol.block import Cost, Tensors, bytes_of


def applies(shape: tuple[int, ...], max_dim: int, output_factor: bool) -> bool:
    """Whether a layer has two dense sides, where products are saved."""
    return output_factor and max(shape[-2:]) <= max_dim


def separable(values_out: Tensor, values_in: Tensor, damping: Tensor) -> tuple[Tensor, Tensor]:
    """``s: [*b, d_out]`` and ``t: [*b, d_in]`` of the nearest form; ones without any curvature.

    ``damping`` is ``[*b, 1, 1]`` or a number, and positive.
    """
    logarithm = torch.addcmul(damping, values_out[..., None], values_in[..., None, :]).log_()
    half = logarithm.mean((-2, -1))[..., None] / 2
    return (half - logarithm.mean(-1)).exp_(), (half - logarithm.mean(-2)).exp_()


class SeparableBlock(KFACBlock):
    """The curvature of one layer with two dense sides; its inverse is prepared for a damping."""

    prepares = True

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, **common: Any) -> None:
        super().__init__(shape, dtype, solver="eigen", **common)
        self.label = "separable"

    def batch_key(self, part: str) -> Hashable:
        """See :meth:`Block.batch_key`: both sides are decomposed as in the exact form."""
        return self.solve_key(part)

    def prepare(self, solution: Tensors, damping: float | Tensor) -> dict[str, Tensor]:
        """See :meth:`Block.prepare`: ``Q_G s Q_Gᵀ`` and ``Q_A t Q_Aᵀ``."""
        scales = _scales(solution, damping)
        return {
            f"{side}.inverse": _turned(solution[f"{side}.vectors"], scale)
            for side, scale in zip(("G", "A"), scales, strict=True)
        }

    @full_precision
    def _apply(self, solution: Tensors, gradient: Tensor, damping: float | Tensor) -> Tensor:
        if "A.inverse" in solution:
            return solution["G.inverse"] @ gradient @ solution["A.inverse"]
        s, t = _scales(solution, damping)
        turned = self._turn(solution, gradient).mul_(s[..., None]).mul_(t[..., None, :])
        return self._turn_back(solution, turned)

    @property
    def row_flops(self) -> int | None:
        """See :attr:`Block.row_flops`."""
        return self._row_flops()

    @full_precision
    def precondition_rows(self, solution: Tensors, outputs: Tensor, inputs: Tensor) -> Tensor:
        """See :meth:`Block.precondition_rows`."""
        return super().precondition_rows(solution, outputs, inputs)

    @property
    def cost(self) -> Cost:
        """See :meth:`Block.cost`; what is prepared is as large as the eigenvectors."""
        exact = super().cost
        prepared = [self.solution_shapes[f"{side}.vectors"] for side in self.forms]
        return Cost(
            exact.refresh_flops + sum(self._gram_flops(side) for side in self.forms),
            exact.precondition_flops // 2,
            exact.statistics_bytes,
            exact.solution_bytes + bytes_of(prepared, self.dtype),
        )

    def _gram_flops(self, side: str) -> int:
        width = self.widths[side]
        return math.prod(self.shape[:-2]) * gram_flops(width, width)


def _scales(solution: Tensors, damping: float | Tensor) -> tuple[Tensor, Tensor]:
    """``s`` and ``t`` of a solution."""
    values = solution["G.values"], solution["A.values"]
    if not isinstance(damping, Tensor):
        damping = values[0].new_full((), damping)
    return separable(*values, damping)


def _turned(vectors: Tensor, scale: Tensor) -> Tensor:
    """``Q s Qᵀ``, exactly symmetric."""
    return gram(scale.sqrt()[..., None] * vectors.mT)
