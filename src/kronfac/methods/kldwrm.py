"""KLD-WRM: K-FAC whose steps minimise a model that is regularised by a wake of past iterates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from kronfac.adaptive.relative import Relative
from kronfac.layers import Layer
from kronfac.methods.kfac.method import KFACMethod, Sharing, SolverOption
from kronfac.optimizer.fronts import register_method
from kronfac.options.config import Options, check_choice, check_momentum
from kronfac.protocol.block import Block
from kronfac.protocol.method import Defaults, Method
from kronfac.protocol.transform import LayerStep, Transform

Variant = Literal["so", "q", "qe"]
#: A learning rate that falls to less than this share of the last one begins a new wake.
VANISHED = 1e-6


class Wake(Transform):
    """Subtracts what the last model's minimum says: ``ĝ_k = g_k - ρ (λ_k/λ_{k-1}) c_{k-1}``.

    With the weight ``w_k = ρ w_{k-1} + 1`` of all that is in the average, ``1/λ_k = η_k w_k``. c is the
    model's gradient at its minimum: ``c = g`` of a linear one. Of a quadratic one with ``B = F̄ + γI``,
    whose step is ``s = -η/(1+η) B⁻¹ĝ``, it is ``c = g + Bs = g - η/(1+η) ĝ``.
    """

    def __init__(self, rho: float, quadratic: bool) -> None:
        self.rho = rho
        self.quadratic = quadratic

    def buffer_shapes(self, layer: Layer) -> Mapping[str, tuple[int, ...]]:
        """See :meth:`Transform.buffer_shapes`: ``c``, and ``w`` with ``1/λ``."""
        return {"wake": layer.matrix_shape, "wake_weights": (2,)}

    def __call__(self, gradient: Tensor, at: LayerStep) -> Tensor:
        """See :meth:`Transform.__call__`."""
        if at.solution is None:  # a raw step has no curvature to leave behind
            return gradient
        rate, buffers = at.rate, at.buffers
        before, last = buffers.get("wake_weights", gradient.new_zeros(2)).unbind()
        weight = self.rho * before + 1
        scale = (weight * rate).to(weight.dtype)
        corrected = gradient
        if "wake" in buffers:
            ratio = torch.where(scale > VANISHED * last, self.rho * last / scale, 0)
            corrected = gradient - ratio * buffers["wake"]
        if self.quadratic:
            corrected = corrected / (1 + rate)
            buffers["wake"] = gradient - rate * corrected
        else:
            buffers["wake"] = gradient.clone(memory_format=torch.contiguous_format)
        buffers["wake_weights"] = torch.stack([weight, scale])
        return corrected


@dataclass(frozen=True, kw_only=True)
class KLDWRMMethod(Method):
    """KLD-WRM (Puiu 2022, "Rethinking Exponential Averaging of the Fisher") on K-FAC's curvature.

    An average of curvature with decay ρ is that of a wake of quadratic models, one for each past
    iterate. The method takes that at its word: step k minimises

        M_k(s) + λ_k Σ_i ρ^(k-i) D_i(θ_k + s),   D_i(θ) = ½ (θ-θ_i)ᵀ (F_i + γI) (θ-θ_i),

    with D_i the second-order Kullback-Leibler divergence from the network at θ_i. The conditions for
    the minima of two successive steps leave one solve with the average F̄ that K-FAC has anyway:

    - ``variant="so"``, a linear model ``M_k(s) = g_kᵀs``:
      ``s = -η_k (F̄ + γI)⁻¹ ĝ_k`` with ``ĝ_k = g_k - ρ (λ_k/λ_{k-1}) g_{k-1}``.
    - ``variant="q"``, a quadratic one with ``B_k = F̄ + γI``:
      ``s = -η_k/(1+η_k) (F̄ + γI)⁻¹ ĝ_k`` with
      ``ĝ_k = g_k - ρ (λ_k/λ_{k-1}) (g_{k-1} + B_{k-1} s_{k-1})``.
      The author's B_k is the curvature of the newest batch, which is the same in expectation, takes a
      second pair of factors, and has more noise.

    Here ``λ_k = 1/(η_k w_k)`` with the learning rate η and ``w_k = 1 + ρ + … + ρ^k``, the weight of all
    that is in the average. The author's code has η alone, which is exact for averages whose weights
    add up to one at every step. This is exact with ``rescale=None`` and with
    ``factor_every = refresh_every = 1``; with ``rho=0`` it is K-FAC with ``decay=0``. A learning rate of
    zero begins a new wake.

    A wake holds back: of steady gradients ``ĝ`` is ``(1-ρ) g``, and of noise it is a difference. A large
    ρ wants a large learning rate and large batches. Momentum of the same size before it undoes it:
    ``Σ_i ρ^(k-i) g_i - ρ Σ_i ρ^(k-1-i) g_i = g_k``. The author's code has ρ = 0.99 and momentum 0.9;
    without momentum, ρ = 0.5 trains faster. Steps are bounded by ``rescale="kl-clip"``, as there.

    The third variant of the paper, ``"qe"``, adds the exact divergence from the last three networks by
    ten inner steps of SGD. It is left out: that takes thirteen further passes a step through a
    closure that does its own backward each time, and on ranks ten further reductions of all gradients.

    Args:
        variant: ``"so"`` or ``"q"``.
        rho: ρ in [0, 1): the decay of the statistics at each update and of the wake at each step. It
            takes the place of ``decay``, which has no effect.
        sharing: as for :class:`kronfac.KFAC`.
        solver: as for :class:`kronfac.KFAC`.
        max_dim: a side wider than this keeps only its diagonal.
    """

    defaults = Defaults(damping=Relative(0.1), factor_every=1, refresh_every=10, rescale="kl-clip")

    line: ClassVar[Mapping[str, Any]] = {"lr": 0.1}  # momentum would undo the wake

    variant: Variant = "so"
    rho: float = 0.5
    sharing: Sharing = "expand"
    solver: SolverOption = "auto"
    max_dim: int = 8192

    def __post_init__(self) -> None:
        if self.variant == "qe":
            raise ValueError(
                "variant='qe' is not supported, since it takes thirteen further passes through the model "
                "at each step; choose 'so' or 'q'."
            )
        check_choice("variant", self.variant, ("so", "q"))
        check_momentum("rho", self.rho)
        self._curvature()

    def check(self, options: Options) -> None:
        """See :meth:`Method.check`."""
        if options.fisher == "forward":
            raise ValueError(
                "fisher='forward' observes no output gradients, without which KLDWRM knows no "
                "divergence; choose 'empirical', 'mc' or 'exact'."
            )
        if options.rescale == "quadratic":
            raise ValueError(
                "rescale='quadratic' chooses the learning rate after KLDWRM has needed it; choose "
                "'kl-clip' or None, or variant='q' for a quadratic model of its own."
            )

    def _curvature(self) -> KFACMethod:
        return KFACMethod(sharing=self.sharing, solver=self.solver, max_dim=self.max_dim)

    def block(self, layer: Layer, grouped: bool = True) -> Block:
        """See :meth:`Method.block`: K-FAC's, with averages that forget by ρ."""
        block = self._curvature().block(layer, grouped)
        statistics = block.statistics.items()
        block.statistics = {name: replace(one, decay=self.rho) for name, one in statistics}
        return block

    def transforms(self) -> tuple[Transform, ...]:
        """See :meth:`Method.transforms`."""
        quadratic = self.variant == "q"
        return (Wake(self.rho, quadratic),) if self.rho or quadratic else ()


KLDWRM = register_method(KLDWRMMethod)
