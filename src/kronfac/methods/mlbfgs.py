"""mL-BFGS: L-BFGS of each layer from averages of weights and gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kronfac.layers import Layer
from kronfac.optimizer.fronts import register_method
from kronfac.options.config import check_count, check_momentum, is_real
from kronfac.protocol.block import (
    NOTHING,
    Block,
    Context,
    Cost,
    Given,
    Part,
    Statistic,
    Tensors,
    bytes_of,
)
from kronfac.protocol.method import Defaults, Method


class MLBFGSBlock(Block):
    """The inverse Hessian of one layer, all of its groups together, as pairs of its past.

    ``S`` and ``Y`` are ``[history, *b, d_out, d_in]``, the newest pair last. A pair with ``1/sᵀy = 0``
    changes nothing: that is how places that are not filled yet are marked.
    """

    def __init__(
        self, layer: Layer, history: int, beta: float, bounds: tuple[float, float]
    ) -> None:
        self.shape = layer.matrix_shape
        self.dtype = layer.factor_dtype
        self.history = history
        self.bounds = bounds
        self.label = f"{history} pairs"
        self.statistics = {
            "weight": Statistic(self.shape, "weight", every="step", decay=beta),
            "gradient": Statistic(self.shape, "gradient", every="step", decay=beta),
        }
        pairs = (history, *self.shape)
        self.solution_shapes = {
            "begun": (1,),
            "weight": self.shape,
            "gradient": self.shape,
            "S": pairs,
            "Y": pairs,
            "inverse": (history,),
            "scale": (1,),
        }

    @property
    def parts(self) -> Mapping[str, Part]:
        """See :attr:`Block.parts`. Each rank that works on the layer finds its pairs itself."""
        begun, *pairs = self.solution_shapes
        return {
            "begun": Part(("weight",), (begun,), 1),
            "pairs": Part(
                tuple(self.statistics), tuple(pairs), 8 * math.prod(self.shape), after=("begun",)
            ),
        }

    def observe_gradient(self, gradient: Tensor, context: Context = NOTHING) -> dict[str, Tensor]:
        """See :meth:`Block.observe_gradient`."""
        return {"gradient": gradient.to(self.dtype)}

    def observe_weight(self, weight: Tensor, context: Context = NOTHING) -> dict[str, Tensor]:
        """See :meth:`Block.observe_weight`."""
        return {"weight": weight.to(self.dtype)}

    # --- solving --------------------------------------------------------------------------------

    def solve(self, part: str, given: Given) -> dict[str, Tensor] | None:
        """See :meth:`Block.solve`."""
        if part == "begun":
            return {"begun": torch.ones_like(given.means["weight"].reshape(-1)[:1])}
        now = {name: given.means[name].clone() for name in ("weight", "gradient")}
        if given.previous is None:
            return {**now, **self._no_pairs(now["weight"])}
        return {**now, **self._with_pair(now, given.previous, given.damping)}

    def _no_pairs(self, like: Tensor) -> dict[str, Tensor]:
        pairs = like.new_zeros(self.history, *self.shape)
        return {
            "S": pairs,
            "Y": pairs.clone(),
            "inverse": like.new_zeros(self.history),
            "scale": like.new_ones(1),
        }

    def _with_pair(self, now: Tensors, previous: Tensors, damping: float) -> dict[str, Tensor]:
        """Add ``s = ΔW̄`` and the damped ``ŷ``, unless they say nothing of a positive curvature."""
        s, y = now["weight"] - previous["weight"], now["gradient"] - previous["gradient"]
        length, curvature = s.square().sum(), (s * y).sum()
        tau = damped_share(curvature / length, max(0.0, 1 - damping), *self.bounds)
        y = torch.lerp(s, y, tau)
        curvature, squares = (s * y).sum(), y.square().sum()
        inverse, scale = 1 / curvature, curvature / squares
        noise = torch.finfo(s.dtype).eps
        moved = length > now["weight"].square().sum() * (8 * noise) ** 2
        good = moved & (curvature > noise * (length * squares).sqrt())
        good = good & torch.isfinite(inverse) & torch.isfinite(scale)
        found = {}
        for name, newest in (("S", s), ("Y", y), ("inverse", inverse)):
            before = previous[name]
            after = torch.cat([before[1:], newest[None]])
            found[name] = torch.where(good, after, before)
        return {**found, "scale": torch.where(good, scale, previous["scale"])}

    # --- applying -------------------------------------------------------------------------------

    def precondition(self, solution: Tensors, gradient: Tensor, damping: float | Tensor) -> Tensor:
        """See :meth:`Block.precondition`: the two-loop recursion."""
        pairs = list(zip(solution["S"], solution["Y"], solution["inverse"], strict=True))
        left: list[Tensor] = []
        q = gradient
        for s, y, inverse in reversed(pairs):
            left.append(inverse * (s * q).sum())
            q = q - left[-1] * y
        q = solution["scale"] * q
        for (s, y, inverse), alpha in zip(pairs, reversed(left), strict=True):
            q = q + (alpha - inverse * (y * q).sum()) * s
        return q

    @property
    def cost(self) -> Cost:
        """See :meth:`Block.cost`."""
        size = math.prod(self.shape)
        return Cost(
            refresh_flops=8 * size,
            precondition_flops=8 * self.history * size,
            statistics_bytes=bytes_of((one.shape for one in self.statistics.values()), self.dtype),
            solution_bytes=bytes_of(self.solution_shapes.values(), self.dtype),
        )


def damped_share(curvature: Tensor, most: float, low: float, high: float) -> Tensor:
    """τ in ``ŷ = τy + (1-τ)s``: the most, or less to keep ``sᵀŷ/sᵀs`` between the bounds.

    ``curvature`` is ``μ = sᵀy/sᵀs``, which becomes ``1 + τ(μ - 1)``.
    """
    wide = torch.where(curvature <= low, (1 - low) / (1 - curvature), torch.inf)
    steep = torch.where(curvature >= high, (high - 1) / (curvature - 1), torch.inf)
    return torch.minimum(wide, steep).clamp(max=most)


@dataclass(frozen=True, kw_only=True)
class MLBFGSMethod(Method):
    """mL-BFGS: limited-memory BFGS of each layer, from averages of its weights and gradients.

    Niu et al. 2023, "mL-BFGS: A Momentum-based L-BFGS for Distributed Large-Scale Neural Network
    Optimization". With ``W̄`` and ``ḡ`` averages of weights and gradients over steps, which take the noise
    of single batches out, a refresh takes the pair ``s = ΔW̄``, ``y = Δḡ`` since the last one, and
        ``ŷ = τy + (1 - τ)s``, ``τ = 1 - damping`` or less to keep ``sᵀŷ/sᵀs`` within ``bounds``.
    The step is ``H V`` by the two-loop recursion over the newest pairs, with ``H₀ = sᵀŷ/ŷᵀŷ``: an inverse
    Hessian of the layer, and ``H ŷ = s`` for the newest pair. Until there is one, ``H = I``.

    Averages are weighted means (``Σβᵏx/Σβᵏ``), where the paper's start from zero: the difference of two
    means is that of weights and gradients, from the first steps on. With ``beta=0``,
    ``refresh_every=1``, ``bounds=(0, inf)`` and a damping near 0 it is classical L-BFGS without a line
    search. A pair without positive curvature is left out, as it is in public code, which compares with
    a number; here the comparison is with rounding, whatever the scale of the loss, and so is that of the
    weights' change, which is noise where they do not move. Public scripts have
    ``beta=0.999`` and ``refresh_every=50`` for long runs, and bound the change of the model; steps as
    solved were not steady on small nets, so that the default length is that of K-FAC here.

    It looks at no activation: all kinds of layers are preconditioned, and nothing is sent but
    one number a layer at refreshes. It keeps ``2·history + 4`` matrices a layer, where the layer is
    worked on, and a step takes ``8·history`` operations a parameter.

    Args:
        history: pairs that are kept.
        beta: weight of the past in the averages, in [0, 1).
        bounds: least and greatest curvature ``sᵀŷ/sᵀs`` of a pair; the first is at most 1, the second
            at least 1.
    """

    defaults = Defaults(damping=0.01, factor_every=20, refresh_every=20)

    history: int = 10
    beta: float = 0.99
    bounds: tuple[float, float] = (0.01, 1.5)

    def __post_init__(self) -> None:
        check_count("history", self.history)
        check_momentum("beta", self.beta)
        good = isinstance(self.bounds, tuple | list) and len(self.bounds) == 2
        good = good and all(map(is_real, self.bounds))
        if not good or not 0 <= self.bounds[0] <= 1 <= self.bounds[1]:
            raise ValueError(
                f"bounds={self.bounds!r} must be two numbers around 1, the first at least 0: "
                "(0.01, 1.5), for example."
            )

    def block(self, layer: Layer, grouped: bool = True) -> Block:
        """See :meth:`Method.block`."""
        return MLBFGSBlock(layer, self.history, self.beta, self.bounds)


MLBFGS = register_method(MLBFGSMethod)
