"""AdaFisher: momentum divided by a diagonal Kronecker-factored Fisher (Gomes et al. 2025).

``θ ← θ - η m̂/(s hᵀ + λ)``, with ``h`` and ``s`` the diagonals of K-FAC's factors, scaled to [0, 1] and
averaged, and ``m̂`` Adam's first moment. There is no root.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from kronfac.layers import Layer
from kronfac.layers.rows import Rows
from kronfac.optimizer.fronts import register_method
from kronfac.options.config import Options, check_choice, check_momentum, is_real
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
from kronfac.protocol.transform import LayerStep, Transform

Average = Literal["paper", "true"]


class AdaFisherBlock(Block):
    """``diag(s) ⊗ diag(h)``: the second moments of each output gradient and of each input."""

    undamped = knows_curvature = True
    label = "diagonal"

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        gammas: tuple[float, float] | None,
        normalize: bool,
        picks_columns: bool = False,
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self.gammas = gammas
        self.normalize = normalize
        self.statistics = self._statistics(None if gammas is None else 0.0, picks_columns)
        self.solution_shapes = {name: one.shape for name, one in self.statistics.items()}
        # The paper's rule takes each new diagonal once; an average is made by the engine.
        every: Literal["refresh", "factor"] = "refresh" if gammas is None else "factor"
        self._parts = {
            name: Part((name,), (name,), 4 * math.prod(one.shape), every=every, by_each=True)
            for name, one in self.statistics.items()
        }

    def _statistics(self, decay: float | None, picks_columns: bool) -> dict[str, Statistic]:
        *batch, d_out, d_in = self.shape
        return {
            "h": Statistic((*batch, d_in), "input", decay=decay, occurrences=picks_columns),
            "s": Statistic((*batch, d_out), "output", degree=2, decay=decay),
        }

    @property
    def parts(self) -> Mapping[str, Part]:
        """See :attr:`Block.parts`."""
        return self._parts

    def observe_input(self, inputs: Rows, context: Context = NOTHING) -> dict[str, Tensor]:
        """See :meth:`Block.observe_input`."""
        return {"h": inputs.squares()}

    def observe_output(self, outputs: Rows, context: Context = NOTHING) -> dict[str, Tensor]:
        """See :meth:`Block.observe_output`."""
        return {"s": outputs.squares()}

    def solve(self, part: str, given: Given) -> dict[str, Tensor]:
        """See :meth:`Block.solve`."""
        diagonal = given.means[part]
        if self.normalize:
            diagonal = self._scaled(diagonal)
        if self.gammas is None:
            return {part: diagonal}
        previous = given.previous
        before = torch.ones_like(diagonal) if previous is None else previous[part]
        return {part: (1 - self.gammas[0]) * before + self.gammas[1] * diagonal}

    def _scaled(self, diagonal: Tensor) -> Tensor:
        """Its entries from 0, the least of the layer, to 1, the largest."""
        return min_max(diagonal, diagonal.amin(), diagonal.amax())

    def precondition(self, solution: Tensors, gradient: Tensor, damping: float | Tensor) -> Tensor:
        """See :meth:`Block.precondition`."""
        return gradient / (self._fisher(solution) + damping)

    def multiply(self, solution: Tensors, matrix: Tensor) -> Tensor:
        """See :meth:`Block.multiply`."""
        return matrix * self._fisher(solution)

    def _fisher(self, solution: Tensors) -> Tensor:
        return solution["s"][..., None] * solution["h"][..., None, :]

    def mean_curvature(self, solution: Tensors) -> Tensor:
        """See :meth:`Block.mean_curvature`."""
        return (solution["s"].mean(-1) * solution["h"].mean(-1))[..., None, None]

    @property
    def signature(self) -> Hashable:
        """See :attr:`Block.signature`."""
        return type(self), self.shape, self.dtype

    @property
    def cost(self) -> Cost:
        """See :meth:`Block.cost`."""
        size = bytes_of(self.solution_shapes.values(), self.dtype)
        return Cost(
            refresh_flops=sum(part.flops for part in self._parts.values()),
            precondition_flops=3 * math.prod(self.shape),
            statistics_bytes=size,
            solution_bytes=size,
        )


class NormBlock(AdaFisherBlock):
    """A norm, ``[C, 1, k]``: the second moment of each weight's and each bias's own gradient.

    That is the diagonal of its Fisher without any factors; weights and biases are scaled apart.
    """

    label = "diagonal, unit-wise"

    def _statistics(self, decay: float | None, picks_columns: bool) -> dict[str, Statistic]:
        channels, _, size = self.shape
        return {"f": Statistic((channels, size), "output", degree=2, decay=decay)}

    def observe_input(self, inputs: Rows, context: Context = NOTHING) -> dict[str, Tensor]:
        """Nothing is observed on the input side alone."""
        return {}

    def observe_output(self, outputs: Rows, context: Context = NOTHING) -> dict[str, Tensor]:
        """See :meth:`Block.observe_output`; rows are ``[C, N, 1, k]``."""
        return {"f": outputs.squares()}

    def _scaled(self, diagonal: Tensor) -> Tensor:
        return min_max(diagonal, diagonal.amin(0), diagonal.amax(0))

    def _fisher(self, solution: Tensors) -> Tensor:
        return solution["f"][..., None, :]

    def mean_curvature(self, solution: Tensors) -> Tensor:
        """See :meth:`Block.mean_curvature`; one number for all channels."""
        return solution["f"].mean((-2, -1))[..., None, None, None]


def min_max(values: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """``(x - low)/(high - low)``, and 0 where all are equal."""
    span = high - low
    return torch.where(span > 0, (values - low) / torch.where(span > 0, span, 1), 0)


class FirstMoment(Transform):
    """Adam's: ``m ← βm + (1-β)V``, divided by the sum of its weights, ``1 - βᵗ``."""

    def __init__(self, beta: float) -> None:
        self.beta = beta

    def buffer_shapes(self, layer: Layer) -> Mapping[str, tuple[int, ...]]:
        """See :meth:`Transform.buffer_shapes`."""
        return {"first_moment": layer.matrix_shape, "first_weight": (1,)}

    def __call__(self, gradient: Tensor, at: LayerStep) -> Tensor:
        """See :meth:`Transform.__call__`."""
        buffers = at.buffers
        if "first_moment" not in buffers:
            buffers["first_moment"] = torch.zeros_like(
                gradient, memory_format=torch.contiguous_format
            )
            buffers["first_weight"] = gradient.new_zeros(1)
        moment = buffers["first_moment"].lerp_(gradient, 1 - self.beta)
        weight = buffers["first_weight"].mul_(self.beta).add_(1 - self.beta)
        return moment / weight


@dataclass(frozen=True, kw_only=True)
class AdaFisherMethod(Method):
    """AdaFisher: Adam's momentum, divided by a diagonal Kronecker-factored Fisher.

    Gomes, Zhang, Belilovsky, Wolf & Hosseini 2025, "AdaFisher: Adaptive Second Order Optimization via
    Fisher Information" (ICLR). With ``h`` and ``s`` the diagonals of K-FAC's ``A`` and ``G``, and ``V``
    the gradient::

        Ĥ = (h - min h)/(max h - min h),  H ← (1-γ₁)H + γ₂Ĥ,  the same for S;  both start from ones
        m ← βm + (1-β)V,  m̂ = m/(1-βᵗ),  P = m̂/(SHᵀ + λ)

    λ is ``damping``; there is no root. Weight decay of the base optimizer comes after the division, so
    that over ``SGD(..., weight_decay=...)`` it is decoupled: that is AdaFisherW.

    Args:
        beta: β of the first moment; 0 for none.
        gammas: (γ₁, γ₂) of the paper's rule.
        average: ``"paper"`` for that rule; ``"true"`` for a mean over time, whose weights add up to one,
            with the engine's ``decay`` (scaling then comes after averaging).
        normalize: whether diagonals are scaled to [0, 1]. Without it and with ``average="true"`` the
            division is by the diagonal of K-FAC's ``G ⊗ A + λI``.

    Where sources disagree, and what follows from the rule. Paper and code have the same rule, with
    weights of 0.08 and 0.008: they do not add up to one, so that H and S fall to 0.0087 Ĥ within three
    updates, and ``SHᵀ ≤ 8·10⁻⁵`` hardly shows beside λ = 10⁻³. From then on the method is close to
    momentum with a learning rate of lr/λ. ``average="true"`` gives the Fisher its full weight. The code
    adds 10⁻⁶ to the range of a diagonal, which drowns those of averaged losses; here a range is taken
    as it is, and diagonals of equal entries are 0.

    Limits. Norms have no two factors: the second moment of each of their weights' gradients takes their
    place (per-sample sums over positions, then squares, as in the code). Parameters that belong to no
    layer keep the base optimizer's rule, whose steps are 1/λ times shorter.
    """

    defaults = Defaults(
        damping=1e-3, factor_every=100, refresh_every=100, decay=0.9, rescale="kl-clip"
    )

    line: ClassVar[Mapping[str, Any]] = {"lr": 0.003}  # it has momentum of its own

    beta: float = 0.9
    gammas: tuple[float, float] = (0.92, 0.008)
    average: Average = "paper"
    normalize: bool = True

    def __post_init__(self) -> None:
        check_momentum("beta", self.beta)
        check_choice("average", self.average, ("paper", "true"))
        check_choice("normalize", self.normalize, (True, False))
        pair = self.gammas if isinstance(self.gammas, tuple | list) else ()
        if len(pair) != 2 or not all(is_real(one) and 0 < one <= 1 for one in pair):
            raise ValueError(
                f"gammas={self.gammas!r} must be two numbers in (0, 1]: (0.92, 0.008), for example."
            )

    def check(self, options: Options) -> None:
        """See :meth:`Method.check`."""
        if options.fisher == "forward":
            raise ValueError(
                "AdaFisher divides by second moments of output gradients, which fisher='forward' does "
                "not observe; choose fisher='empirical'."
            )

    def block(self, layer: Layer, grouped: bool = True) -> Block:
        """See :meth:`Method.block`."""
        kind = NormBlock if layer.unit_wise else AdaFisherBlock
        block = kind(
            layer.matrix_shape,
            layer.factor_dtype,
            gammas=(self.gammas[0], self.gammas[1]) if self.average == "paper" else None,
            normalize=self.normalize,
            picks_columns=layer.picks_columns,
        )
        if layer.unit_wise and grouped:
            block.keeps = "summed"
        return block

    def transforms(self) -> tuple[Transform, ...]:
        """See :meth:`Method.transforms`."""
        return (FirstMoment(self.beta),) if self.beta else ()


AdaFisher = register_method(AdaFisherMethod)
