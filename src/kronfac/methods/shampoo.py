"""Shampoo: inverse roots of the gradient's own second moments, one for each side."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kronfac.adaptive.relative import Relative
from kronfac.layers import Layer
from kronfac.linalg.solve import eigen
from kronfac.methods.two_sided import SIDES, Side, TwoSidedBlock, TwoSidedMethod, side_of
from kronfac.optimizer.fronts import register_method
from kronfac.options.config import check_choice, is_real
from kronfac.protocol.block import NOTHING, Context, Given, Part, Statistic, Tensors
from kronfac.protocol.method import Defaults

Accumulate = Literal["average", "sum"]


class ShampooBlock(TwoSidedBlock):
    """``P = (L + εI)⁻ᵖ V (R + εI)⁻ᵖ``, with L and R the mean or the sum of ``V Vᵀ`` and ``VᵀV``."""

    cubes = 11  # an eigendecomposition counts as 9, its product as 2

    def __init__(self, layer: Layer, *, power: float, adds: bool, max_dim: int) -> None:
        super().__init__(layer, "eigen", max_dim)
        self.power = power
        self.adds = adds
        self.picks_columns = layer.picks_columns
        self.statistics = {
            side: Statistic(
                self.side_shapes[side],
                source="gradient",
                symmetric=self.is_dense(side),
                decay=1.0 if adds else None,
            )
            for side in SIDES
        }
        self.symmetric_solutions = self.dense_roots

    def observe_gradient(self, gradient: Tensor, context: Context = NOTHING) -> dict[str, Tensor]:
        """See :meth:`Block.observe_gradient`."""
        return {side: self.moment(side, gradient) for side in SIDES}

    @property
    def parts(self) -> Mapping[str, Part]:
        """See :attr:`Block.parts`: one for each side."""
        return {side: Part((side,), (f"{side}.root",), self.side_flops(side)) for side in SIDES}

    def solve(self, part: str, given: Given) -> dict[str, Tensor] | None:
        """See :meth:`Block.solve`."""
        side = side_of(part)
        moment = given.means[side]
        if self.adds:
            moment = moment * given.counts[side]
        mean = self.mean_eigenvalue(side, moment)
        root = self._root(side, moment, self.damping_of(given, mean))
        if root is None:
            return None
        if given.relative:  # without any gradient so far there is nothing to be relative to
            root = torch.where(self.spread(side, mean > 0), root, self.identity(side, root))
        if side == "R" and self.picks_columns:
            root = root.masked_fill(moment == 0, 0)  # marks what was never seen
        return {f"{side}.root": root}

    def _root(self, side: Side, moment: Tensor, damping: Tensor) -> Tensor | None:
        """``(M + εI)⁻ᵖ``; a shift that underflows does not divide by zero."""
        tiny, shift = torch.finfo(moment.dtype).tiny, damping[..., None]
        if not self.is_dense(side):
            return (moment + shift).clamp(min=tiny) ** -self.power
        solved = eigen(moment)
        if solved is None:
            return None
        vectors, values = solved
        powers = (values + shift).clamp(min=tiny) ** -self.power
        root = (vectors * powers[..., None, :]) @ vectors.mT
        return (root + root.mT) / 2

    def precondition(self, solution: Tensors, gradient: Tensor, damping: float | Tensor) -> Tensor:
        """See :meth:`Block.precondition`."""
        result = super().precondition(solution, gradient, damping)
        raw = self.raw_columns(solution)
        return result if raw is None else torch.where(raw[..., None, :], gradient, result)

    def raw_columns(self, solution: Tensors) -> Tensor | None:
        """See :meth:`Block.raw_columns`: tokens that had no gradient yet."""
        return solution["R.root"] == 0 if self.picks_columns else None

    @property
    def signature(self) -> Hashable:
        """See :attr:`Block.signature`."""
        return super().signature, self.picks_columns


@dataclass(frozen=True, kw_only=True)
class ShampooMethod(TwoSidedMethod):
    """Shampoo (Gupta, Koren & Singer 2018): roots of the gradient's own second moments.

    The paper is "Shampoo: Preconditioned Stochastic Tensor Optimization". With the gradient V of a layer,

        P = (L + εI)^(-1/4) V (R + εI)^(-1/4),   L = Σ V Vᵀ,   R = Σ VᵀV.

    Neither inputs nor output gradients of a layer are needed. With ``distribute="replicated"`` nothing
    travels; with other schemes roots or steps do, and statistics never.

    Statistics are taken every ``factor_every`` steps, and roots, by an eigendecomposition, every
    ``refresh_every``. L and R are averages with a ``decay``, as in practice (Anil et al. 2020, "Scalable
    Second Order Optimization for Deep Learning"). The sum of the first paper is ``accumulate="sum"``;
    its steps get shorter over time. ε is the ``damping`` of each side: a number in units of ``V Vᵀ`` or,
    by default, :class:`kronfac.Relative` to the side's mean eigenvalue, as gradients have no scale of
    their own. Of one gradient and without damping, P is the nearest orthogonal matrix.

    A bias is the last column of its weight's matrix, and a convolution is a matrix for each group; the
    papers give a tensor one more side for each dimension. Their steps have the length of SGD's, so
    that its learning rate carries over: ``rescale="graft"``. The default length is that of
    :class:`kronfac.KFAC`, which also trains at small rates. Norms are not preconditioned.

    Args:
        power: exponent p of each side. With 1/4, the paper's, ``L^(1/2) ⊗ R^(1/2)`` stands for the second
            moment of gradients, which it bounds. With 1/2 it is ``L ⊗ R``, which is nearer to it up to
            scale (Morwani et al. 2024, "A New Perspective on Shampoo's Preconditioner").
        accumulate: ``"average"`` forgets by ``decay``; ``"sum"`` forgets nothing and ignores ``decay``.
        max_dim: a side wider than this keeps only its diagonal, as an embedding's tokens always do.
    """

    defaults = Defaults(damping=Relative(1e-4), decay=0.9)

    power: float = 0.25
    accumulate: Accumulate = "average"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("accumulate", self.accumulate, ("average", "sum"))
        if not is_real(self.power) or not 0 < self.power <= 1:
            raise ValueError(
                f"power={self.power!r} must be a number in (0, 1]: 0.25 or 0.5, for example."
            )

    def block(self, layer: Layer, grouped: bool = True) -> ShampooBlock:
        """See :meth:`Method.block`."""
        adds = self.accumulate == "sum"
        return ShampooBlock(layer, power=self.power, adds=adds, max_dim=self.max_dim)


Shampoo = register_method(ShampooMethod)
