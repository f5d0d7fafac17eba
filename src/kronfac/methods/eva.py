"""Eva: rank-one curvature from mean vectors, inverted in closed form (Zhang, Shi & Li 2023).

With ``ā`` the mean of a layer's input rows, ``b̄`` that of its output gradients, and ``V`` the gradient:

- ``"kfac"``: ``(γI + (b̄ ⊗ ā)(b̄ ⊗ ā)ᵀ)⁻¹``, so ``P = (V - (b̄ᵀVā)/(γ + ‖ā‖²‖b̄‖²)·b̄āᵀ)/γ``;
- ``"input"``: ``(γI + I ⊗ āāᵀ)⁻¹``, so ``P = (V - (Vā)āᵀ/(γ + ‖ā‖²))/γ``;
- ``"gradient"``: ``P = (ℓℓᵀ + γI)^-¼ V (rrᵀ + γI)^-¼``, Shampoo's two sides of rank one.

Unit vectors and squared lengths are used throughout: they neither overflow nor divide by zero.
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
from kronfac.options.config import Options, check_choice
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

Form = Literal["kfac", "input", "gradient"]


class VectorBlock(Block):
    """What all forms have in common: the solution is the mean vectors themselves."""

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, statistics: dict[str, Statistic]
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self.statistics = statistics
        self.solution_shapes = {name: one.shape for name, one in statistics.items()}
        names = tuple(statistics)
        numbers = sum(math.prod(one.shape) for one in statistics.values())
        # There is nothing to solve, so nobody is sent a solution.
        self._parts = {"": Part(names, names, numbers, by_each=True)}

    @property
    def parts(self) -> Mapping[str, Part]:
        """See :attr:`Block.parts`."""
        return self._parts

    def solve(self, part: str, given: Given) -> dict[str, Tensor]:
        """See :meth:`Block.solve`."""
        return dict(given.means)

    @property
    def signature(self) -> Hashable:
        """See :attr:`Block.signature`."""
        return type(self), self.shape, self.dtype, tuple(self.statistics), self.label

    @property
    def cost(self) -> Cost:
        """See :meth:`Block.cost`: two passes over the gradient, and a division."""
        size = bytes_of(self.solution_shapes.values(), self.dtype)
        return Cost(
            refresh_flops=self._parts[""].flops,
            precondition_flops=5 * math.prod(self.shape),
            statistics_bytes=size,
            solution_bytes=size,
        )


class RankOneBlock(VectorBlock):
    """``b̄b̄ᵀ ⊗ āāᵀ``; without an output side ``I ⊗ āāᵀ``.

    The rows of an embedding are one-hot: ``ā`` holds the frequencies ``p`` of its tokens, and the second
    moment of the rows is ``diag(p)``. That takes the place of ``āāᵀ``, since it is exact and costs the
    same vector. Tokens that were never seen pass their raw gradient.
    """

    undamped = knows_curvature = True

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        output_side: bool,
        picks_columns: bool = False,
    ) -> None:
        *batch, d_out, d_in = shape
        statistics = {"a": Statistic((*batch, d_in), "input", occurrences=picks_columns)}
        if output_side:
            statistics["b"] = Statistic((*batch, d_out), "output", degree=1)
        super().__init__(shape, dtype, statistics)
        self.output_side = output_side
        self.picks_columns = picks_columns
        self.label = "rank one" + ("" if output_side else ", G = I")
        self.label += ", A diag" if picks_columns else ""

    @property
    def input_key(self) -> Hashable:
        """See :attr:`Block.input_key`: the mean of the rows."""
        return RankOneBlock, self.statistics["a"], self.dtype

    def observe_input(self, inputs: Rows, context: Context = NOTHING) -> dict[str, Tensor]:
        """See :meth:`Block.observe_input`."""
        return {"a": inputs.total()}

    def observe_output(self, outputs: Rows, context: Context = NOTHING) -> dict[str, Tensor]:
        """See :meth:`Block.observe_output`."""
        return {"b": outputs.total()} if self.output_side else {}

    def precondition(self, solution: Tensors, gradient: Tensor, damping: float | Tensor) -> Tensor:
        """See :meth:`Block.precondition`."""
        if self.picks_columns:
            return self._precondition_tokens(solution, gradient, damping)
        a, curvature = unit(solution["a"])
        along = gradient @ a[..., None]
        column = along
        if self.output_side:
            b, length = unit(solution["b"])
            curvature = product(curvature, length)
            column = b[..., None] * (b[..., None, :] @ along)
        row = share(curvature, damping) * a[..., None, :]
        return torch.addcmul(gradient, column, row, value=-1).div_(damping)

    def _precondition_tokens(
        self, solution: Tensors, gradient: Tensor, damping: float | Tensor
    ) -> Tensor:
        """Column by column: ``(γI + p b̄b̄ᵀ)⁻¹``, or ``1/(γ + p)`` without an output side."""
        frequencies = solution["a"][..., None, :]
        if self.output_side:
            b, length = unit(solution["b"])
            strength = share(product(frequencies, length), damping)
            row = strength * (b[..., None, :] @ gradient)
            result = torch.addcmul(gradient, b[..., None], row, value=-1).div_(damping)
        else:
            result = gradient / (frequencies + damping)
        return torch.where(frequencies == 0, gradient, result)

    def raw_columns(self, solution: Tensors) -> Tensor | None:
        """See :meth:`Block.raw_columns`."""
        return solution["a"] == 0 if self.picks_columns else None

    def mean_curvature(self, solution: Tensors) -> Tensor:
        """See :meth:`Block.mean_curvature`."""
        *_, d_out, d_in = self.shape
        tokens = self.picks_columns
        trace = solution["a"].sum(-1)[..., None, None] if tokens else unit(solution["a"])[1]
        if self.output_side:
            trace = product(trace, unit(solution["b"])[1]) / d_out
        return trace / d_in

    def multiply(self, solution: Tensors, matrix: Tensor) -> Tensor:
        """See :meth:`Block.multiply`."""
        a = solution["a"][..., None, :]
        matrix = matrix * a if self.picks_columns else (matrix @ a.mT) * a
        if not self.output_side:
            return matrix
        b = solution["b"][..., None]
        return b * (b.mT @ matrix)


class TwoSidedBlock(VectorBlock):
    """``(ℓℓᵀ + γI)^-¼ V (rrᵀ + γI)^-¼`` with ``ℓ`` and ``r`` of the batch's gradient; nothing travels."""

    label = "rank one, two sides"

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        *batch, d_out, d_in = shape
        left, right = (*batch, d_out), (*batch, d_in)
        statistics = {"left": Statistic(left, "gradient"), "right": Statistic(right, "gradient")}
        super().__init__(shape, dtype, statistics)

    def observe_gradient(self, gradient: Tensor, context: Context = NOTHING) -> dict[str, Tensor]:
        """See :meth:`Block.observe_gradient`: ``V1/√d_in`` and ``Vᵀ1/√d_out``."""
        *_, d_out, d_in = self.shape
        left, right = gradient.sum(-1), gradient.sum(-2)
        return {"left": left / math.sqrt(d_in), "right": right / math.sqrt(d_out)}

    def precondition(self, solution: Tensors, gradient: Tensor, damping: float | Tensor) -> Tensor:
        """See :meth:`Block.precondition`: ``(xxᵀ + γI)^-¼ = γ^-¼ (I - κ x̂x̂ᵀ)``."""
        left, left_loss = self._side(solution["left"], damping)
        right, right_loss = self._side(solution["right"], damping)
        row = left_loss * (left[..., None, :] @ gradient)
        half = torch.addcmul(gradient, left[..., None], row, value=-1)
        column = right_loss * (half @ right[..., None])
        whole = torch.addcmul(half, column, right[..., None, :], value=-1)
        return whole.div_(damping**0.5)

    @staticmethod
    def _side(vector: Tensor, damping: float | Tensor) -> tuple[Tensor, Tensor]:
        """``x̂``, and ``κ = 1 - (γ/(γ + ‖x‖²))^¼``, ``[*b, 1, 1]``."""
        direction, length = unit(vector)
        return direction, 1 - (1 - share(length, damping)) ** 0.25


def unit(vector: Tensor) -> tuple[Tensor, Tensor]:
    """A vector ``[*b, d]`` at length 1 (or 0 if it is zero), and its squared length ``[*b, 1, 1]``."""
    limits = torch.finfo(vector.dtype)
    length = torch.linalg.vector_norm(vector, dim=-1, keepdim=True)
    square = length.square().clamp(max=limits.max)
    return vector / length.clamp(min=limits.tiny), square[..., None]


def product(left: Tensor, right: Tensor) -> Tensor:
    """The product of two squared lengths, which does not overflow."""
    return (left * right).clamp(max=torch.finfo(left.dtype).max)


def share(curvature: Tensor, damping: float | Tensor) -> Tensor:
    """``c/(γ + c)``: by how much the damped inverse is less than ``1/γ`` along a direction."""
    return curvature / (curvature + damping)


@dataclass(frozen=True, kw_only=True)
class EvaMethod(Method):
    """Eva: curvature of rank one from mean vectors, at little more than the cost of SGD.

    Zhang, Shi & Li 2023, "Eva: Practical Second-order Optimization with Kronecker-vectorized
    Approximation" (ICLR), and "Eva: A General Vectorized Approximation Framework for Second-order
    Optimization", which has the other two forms. With ``ā`` the mean input row of a layer, ``b̄`` the mean
    over samples of its output gradients (added up over positions), and ``V`` its gradient::

        "kfac"      P = (V - (b̄ᵀVā)/(γ + ‖ā‖²‖b̄‖²) · b̄āᵀ) / γ      (γI + (b̄ ⊗ ā)(b̄ ⊗ ā)ᵀ)⁻¹ vec(V)
        "input"     P = (V - (Vā)āᵀ/(γ + ‖ā‖²)) / γ                (γI + I ⊗ āāᵀ)⁻¹ vec(V)
        "gradient"  P = (ℓℓᵀ + γI)^-¼ V (rrᵀ + γI)^-¼              ℓ = V1/√d_in, r = Vᵀ1/√d_out

    On one sample the first is K-FAC. The third is Shampoo with sides of rank one, derived as the first is
    from K-FAC: a mean of outer products becomes the outer product of the mean. The columns of V are
    ``VVᵀ = d_in · mean(v vᵀ)``, which becomes ``d_in · v̄v̄ᵀ = ℓℓᵀ``; it is never more than ``VVᵀ``. The
    fourth roots need no decomposition: ``(xxᵀ + γI)^-¼ = γ^-¼ (I - κ x̂x̂ᵀ)``,
    ``κ = 1 - (γ/(γ + ‖x‖²))^¼``. The paper's own third form could not be compared.

    Vectors are averaged, and all that travels are vectors: ``d_in + d_out`` numbers a layer, ``d_in``, or
    nothing at all, since all ranks have the same gradient.

    Args:
        form: ``"kfac"``, ``"input"`` or ``"gradient"``, as above.

    Vectors are taken at every step with the paper's weight of ξ = 0.95 for the *newest* one, which is
    ``decay=0.05`` here (at first ``1/(1 + decay)`` instead of ξ). The paper's γ is 0.03. Its public code
    takes the gradient of the loss as it is averaged, and means over positions, on 16 samples; here a
    sample's gradient counts as it is, and all samples do, so that γ has one meaning whatever the batch,
    and the batch's split over ranks changes nothing. Curvature is then N² times that of the code, and
    0.03 there is 100 and more here. With 0.03 here, the step along ``b̄ ⊗ ā`` is divided by the squared
    error itself, small nets drift along it and train worse than with SGD; the default is 10. Lengths are
    those of the gradients (``rescale="graft"``, one of the code's two rules), so that a rate is SGD's.
    The code's other rule, ``rescale="kl-clip"``, leaves the rate and its schedule without a say while
    the clip holds: ``P`` is ``V/γ`` long, and a bound of 0.001 then holds at every step.

    Limits. ``b̄`` is zero on average over the model's own labels: the Fisher must be the empirical one.
    Embeddings keep the exact ``diag(p)`` of their tokens in place of ``āāᵀ``. Norms are not
    preconditioned, as by the authors: their gradients of every sample would cost more than all the rest.
    """

    defaults = Defaults(damping=10.0, factor_every=1, refresh_every=1, decay=0.05, rescale="graft")
    #: Grafted steps: the rate is SGD's.
    line: ClassVar[Mapping[str, Any]] = {"lr": 0.2, "momentum": 0.9, "nesterov": True}

    form: Form = "kfac"

    def __post_init__(self) -> None:
        check_choice("form", self.form, ("kfac", "input", "gradient"))

    def check(self, options: Options) -> None:
        """See :meth:`Method.check`."""
        if self.form == "kfac" and options.fisher != "empirical":
            raise ValueError(
                f"form='kfac' needs the mean of the loss's own output gradients, which "
                f"fisher={options.fisher!r} does not observe; choose fisher='empirical', or "
                "form='input'."
            )

    def refusal(self, layer: Layer) -> str | None:
        """See :meth:`Method.refusal`."""
        if layer.unit_wise:
            return "a norm has no mean input that it multiplies"
        return None

    def block(self, layer: Layer, grouped: bool = True) -> Block:
        """See :meth:`Method.block`."""
        if self.form == "gradient":
            return TwoSidedBlock(layer.matrix_shape, layer.factor_dtype)
        return RankOneBlock(
            layer.matrix_shape,
            layer.factor_dtype,
            output_side=self.form == "kfac",
            picks_columns=layer.picks_columns,
        )


Eva = register_method(EvaMethod)
