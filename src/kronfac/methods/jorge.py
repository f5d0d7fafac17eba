"""Jorge: Shampoo whose inverse fourth roots follow the gradient by matrix products only."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kronfac.adaptive.relative import Relative
from kronfac.layers import Layer
from kronfac.methods.two_sided import SIDES, Side, TwoSidedBlock, TwoSidedMethod, side_of
from kronfac.optimizer.fronts import register_method
from kronfac.options.config import check_choice, check_momentum
from kronfac.protocol.block import NOTHING, Context, Given, Part, Statistic
from kronfac.protocol.method import Defaults

Series = Literal["symmetric", "paper"]


class JorgeBlock(TwoSidedBlock):
    """``P = L̂ V R̂`` with ``L̂ ≈ L^(-1/4)``, updated from the newest gradient alone."""

    def __init__(self, layer: Layer, *, series: Series, beta2: float, max_dim: int) -> None:
        super().__init__(layer, "series", max_dim)
        self.series = series
        self.beta2 = beta2
        self.cubes = 12 if series == "symmetric" else 10
        self.statistics = {"V": Statistic(self.shape, source="gradient", decay=0.0)}
        self.symmetric_solutions = self.dense_roots if series == "symmetric" else frozenset()

    def observe_gradient(self, gradient: Tensor, context: Context = NOTHING) -> dict[str, Tensor]:
        """See :meth:`Block.observe_gradient`."""
        return {"V": gradient}

    @property
    def parts(self) -> Mapping[str, Part]:
        """See :attr:`Block.parts`: one for each side, updated with every new gradient."""
        return {
            side: Part(("V",), (f"{side}.root",), self.side_flops(side), every="factor")
            for side in SIDES
        }

    def solve(self, part: str, given: Given) -> dict[str, Tensor] | None:
        """See :meth:`Block.solve`. A gradient of zero says nothing and changes nothing."""
        side = side_of(part)
        moment = self.moment(side, given.means["V"])
        mean = self.mean_eigenvalue(side, moment)
        damping = self.damping_of(given, mean)
        known = (mean > 0) & torch.isfinite(mean)
        one = self.identity(side, moment)
        if given.previous is None:
            start = damping.clamp(min=torch.finfo(mean.dtype).tiny) ** -0.25
            before = self.spread(side, start.where(known, 1.0)) * one
        else:
            before = given.previous[f"{side}.root"]
        after = self.update(side, before, moment + self.spread(side, damping) * one)
        finite = torch.isfinite(self.spread(side, after.flatten(mean.dim()).sum(-1)))
        return {f"{side}.root": torch.where(self.spread(side, known) & finite, after, before)}

    def update(self, side: Side, root: Tensor, moment: Tensor) -> Tensor:
        """From ``L^(-1/4)`` to ``(β₂L + (1-β₂)M)^(-1/4)``, up to ``O(c³)`` with ``c = (1-β₂)/β₂``.

        ``β₂`` is such that ``cX`` has norm 1, where ``X = L̂⁴M``, but at least :attr:`beta2`.
        """
        if not self.is_dense(side):
            x = root.square() * (root.square() * moment)
            c = self._weight(x, -1)
            return root * ((1 + c) / (1 + c * x)) ** 0.25
        square = root @ root
        x = square @ (square @ moment)
        c = self._weight(x, (-2, -1))
        x = c * x
        if self.series == "paper":
            after = root @ (self.identity(side, x) - x / 4 + (5 / 32) * (x @ x))
        else:
            half = self.identity(side, x) - x / 8 + (9 / 128) * (x @ x)
            after = half @ root @ half.mT
            after = (after + after.mT) / 2
        return (1 + c) ** 0.25 * after

    def _weight(self, x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
        """``c = (1-β₂)/β₂ = 1/‖X‖``, bounded by :attr:`beta2`; squares of large X may overflow."""
        peak = x.abs().amax(dim, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
        norm = peak * (x / peak).square().sum(dim, keepdim=True).sqrt()
        most = (1 - self.beta2) / self.beta2 if self.beta2 else float("inf")
        return (1 / norm).clamp(max=most)

    @property
    def signature(self) -> Hashable:
        """See :attr:`Block.signature`."""
        return super().signature, self.series


@dataclass(frozen=True, kw_only=True)
class JorgeMethod(TwoSidedMethod):
    """Jorge (Singh, Sating & Bhatele 2023): Shampoo by matrix products only.

    The paper is "Jorge: Approximate Preconditioning for GPU-efficient Second-order Optimization". The
    step is ``P = L̂ V R̂`` with ``L̂ ≈ L^(-1/4)`` for ``L ← β₂L + (1-β₂)V Vᵀ``. With ``X = L̂⁴V Vᵀ`` and
    ``c = (1-β₂)/β₂``, two terms of the binomial series of ``(I + cX)^(-1/4)`` give

        L̂ ← β₂^(-1/4) L̂ (I - cX/4 + 5c²X²/32),   from L̂ = ε^(-1/4) I,

    and the same for R. β₂ is chosen at each update so that ``c‖X‖ = 1``, for which the series converges.
    Where L and ``V Vᵀ`` commute its error is ``O(c³‖X‖³)``. Nothing is decomposed, and with
    ``distribute="replicated"`` nothing travels.

    Three things differ from the paper, where it can be shown to go wrong:

    - ``series="symmetric"``, the default, is ``L̂ ← β₂^(-1/4) K L̂ Kᵀ`` with ``K = I - cX/8 + 9c²X²/128``,
      of the same order. The printed product is not symmetric, as ``L^(-1/4)`` is, and half the sum
      with its transpose does not stay positive. This one is both, and is nearer to the root.
    - The paper has ε, the ``damping``, in the start only. Directions without gradients then grow by
      ``β₂^(-1/4)`` at each update, without bound. Here ε is added to each ``V Vᵀ``, so that L is the
      average plus ε. It is a number in units of ``V Vᵀ`` or, by default, :class:`kronfac.Relative`: a
      share of the mean eigenvalue of the newest ``V Vᵀ``.
    - β₂ is at least ``beta2``. Otherwise a gradient near zero, ``‖X‖ → 0``, would multiply L̂ by
      ``‖X‖^(-1/4)``. Other gradients have ``‖X‖ ≥ √d`` on average, beyond this bound.

    L̂ is updated every ``factor_every`` steps; ``refresh_every`` and ``decay`` have nothing to decide. The
    paper's steps have the length of SGD's, by ``rescale="graft"`` and ``momentum=0.9``, and its learning
    rate. Momentum comes before preconditioning here, so that grafting gives a step the norm of SGD's
    momentum, as there. The default length is that of :class:`kronfac.KFAC`, which also trains at small
    rates. A bias is the last column of its weight's matrix. Norms are not preconditioned.

    Args:
        series: ``"symmetric"``, or ``"paper"`` as printed.
        beta2: the least weight of the old L in the new one, in [0, 1); 0 is the paper's rule.
        max_dim: a side wider than this keeps only its diagonal, as an embedding's tokens always do.
    """

    defaults = Defaults(damping=Relative(1e-2), factor_every=10, refresh_every=10)

    series: Series = "symmetric"
    beta2: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("series", self.series, ("symmetric", "paper"))
        check_momentum("beta2", self.beta2)

    def block(self, layer: Layer, grouped: bool = True) -> JorgeBlock:
        """See :meth:`Method.block`."""
        return JorgeBlock(layer, series=self.series, beta2=self.beta2, max_dim=self.max_dim)


Jorge = register_method(JorgeMethod)
