"""K-FAC with two products a step: the nearest separable form of the damped inverse in the eigenbasis.

In the eigenbasis the exact form divides by ``v_G v_Aᵀ + γ``, no product of a column and a row, which
takes four products: there and back on each side. Here it becomes ``s tᵀ``, whose logarithm is nearest:
    ``log s_i + log t_j = -(mean_j L_ij + mean_i L_ij - mean_ij L)``, ``L = log(v_G v_Aᵀ + γ)``,
and ``P = [Q_G s Q_Gᵀ] V [Q_A t Q_Aᵀ]``, with both brackets made once per refresh. For γ = 0 it is exact.
The two products of Cholesky, with damping on each factor, are another such form, but not the nearest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kronfac.linalg.covariance import gram, gram_flops
from kronfac.linalg.precision import full_precision
from kronfac.methods.kfac.block import KFACBlock
from kronfac.protocol.block import Cost, Given, Part, Tensors


def applies(shape: tuple[int, ...], max_dim: int, output_factor: bool) -> bool:
    """Whether a layer has two dense sides, where products are saved."""
    return output_factor and max(shape[-2:]) <= max_dim


def separable(values_out: Tensor, values_in: Tensor, damping: Tensor) -> tuple[Tensor, Tensor]:
    """``s: [*b, d_out]`` and ``t: [*b, d_in]`` of the nearest form; ones without any curvature.

    ``damping`` is ``[*b, 1, 1]`` or ``[1, 1]``, and positive.
    """
    logarithm = torch.addcmul(damping, values_out[..., None], values_in[..., None, :]).log_()
    half = logarithm.mean((-2, -1))[..., None] / 2
    return (half - logarithm.mean(-1)).exp_(), (half - logarithm.mean(-2)).exp_()


class SeparableBlock(KFACBlock):
    """The curvature of one layer with two dense sides, inverted for the damping of a refresh."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, **common: Any) -> None:
        super().__init__(shape, dtype, solver="eigen", **common)
        self.undamped = False
        self.label = "separable"
        for side in self.forms:
            matrix = self.solution_shapes[f"{side}.vectors"]
            self.solution_shapes = {**self.solution_shapes, f"{side}.inverse": matrix}

    @property
    def parts(self) -> Mapping[str, Part]:
        """See :attr:`Block.parts`: both sides, and then what each rank makes of them."""
        sides = {
            name: replace(part, solution=tuple(n for n in part.solution if ".inverse" not in n))
            for name, part in super().parts.items()
        }
        flops = sum(self._gram_flops(side) for side in self.forms)
        inverses = tuple(f"{side}.inverse" for side in self.forms)
        return {**sides, "inverse": Part((), inverses, flops, after=tuple(sides))}

    def solve(self, part: str, given: Given) -> dict[str, Tensor] | None:
        """See :meth:`Block.solve`."""
        if part != "inverse":
            return super().solve(part, given)
        names = [f"{side}.{one}" for side in self.forms for one in ("values", "vectors")]
        found = {name: given.latest(name) for name in names}
        scales = separable(found["G.values"], found["A.values"], self._damping(found, given))
        return {
            f"{side}.inverse": _turned(found[f"{side}.vectors"], scale)
            for side, scale in zip(("G", "A"), scales, strict=True)
        }

    def _damping(self, values: Tensors, given: Given) -> Tensor:
        """γ as the exact form has it, ``[*b, 1, 1]``; 1 without any curvature."""
        mean = self.mean_curvature(values)
        if not given.relative:
            return torch.full_like(mean, given.damping)
        share = given.damping
        if given.relative == "trace":
            share *= math.prod(self.shape[-2:])
        return torch.where(mean > 0, mean * share, 1.0)

    @full_precision
    def _apply(self, solution: Tensors, gradient: Tensor, damping: float | Tensor) -> Tensor:
        return solution["G.inverse"] @ gradient @ solution["A.inverse"]

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
        """See :meth:`Block.cost`."""
        exact = super().cost
        flops = exact.refresh_flops + sum(self._gram_flops(side) for side in self.forms)
        return Cost(
            flops,
            exact.precondition_flops // 2,
            exact.statistics_bytes,
            exact.solution_bytes,
        )

    def _gram_flops(self, side: str) -> int:
        width = self.widths[side]
        return math.prod(self.shape[:-2]) * gram_flops(width, width)


def _turned(vectors: Tensor, scale: Tensor) -> Tensor:
    """``Q s Qᵀ``, exactly symmetric."""
    return gram(scale.sqrt()[..., None] * vectors.mT)
