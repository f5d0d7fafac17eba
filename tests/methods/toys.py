"""Small methods, one for each kind of thing that a block may ask of the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

import kronfac
from kronfac import Defaults, Method
from kronfac.layers import Layer
from kronfac.layers.rows import Rows
from kronfac.protocol.block import Block, Cost, Statistic, Tensors, bytes_of
from kronfac.protocol.transform import Transform

GAMMA = 0.1


class ToyBlock(Block):
    """What the toys have in common: sizes, and a cost of bytes only."""

    def __init__(self, layer: Layer) -> None:
        self.shape = layer.matrix_shape
        self.dtype = layer.factor_dtype
        *self.batch, self.d_out, self.d_in = self.shape

    @property
    def cost(self) -> Cost:
        shapes = [one.shape for one in self.statistics.values()]
        solution = bytes_of(list(self.solution_shapes.values()), self.dtype)
        return Cost(0, 0, bytes_of(shapes, self.dtype), solution)


@dataclass(frozen=True, kw_only=True)
class Toy(Method):
    """Every step takes statistics and refreshes."""

    defaults = Defaults(damping=GAMMA, factor_every=1, refresh_every=1, decay=0.0, rescale=None)
    made: ClassVar[type[ToyBlock]]

    def block(self, layer: Layer, grouped: bool = True) -> ToyBlock:
        return self.made(layer)


# --- vectors ----------------------------------------------------------------------------------


class RankOneBlock(ToyBlock):
    """`(γI + (b̄ ⊗ ā)(b̄ ⊗ ā)ᵀ)⁻¹ vec(V)` with mean vectors, by Sherman and Morrison."""

    label = "rank one"

    def __init__(self, layer: Layer) -> None:
        super().__init__(layer)
        a, b = (*self.batch, self.d_in), (*self.batch, self.d_out)
        self.statistics = {"a": Statistic(a, "input"), "b": Statistic(b, "output", degree=1)}
        self.solution_shapes = {"a": a, "b": b}

    def observe_input(self, inputs: Rows, solution: Tensors | None = None) -> dict[str, Tensor]:
        return {"a": inputs.total()}

    def observe_output(self, outputs: Rows, solution: Tensors | None = None) -> dict[str, Tensor]:
        return {"b": outputs.total()}

    def solve(
        self, part: str, means: Tensors, outlines: Any, previous: Any, damping: float
    ) -> dict[str, Tensor]:
        return dict(means)

    def precondition(self, solution: Tensors, gradient: Tensor, damping: float) -> Tensor:
        u = solution["b"][..., None] * solution["a"][..., None, :]
        along = (u * gradient).sum((-2, -1), keepdim=True)
        length = u.square().sum((-2, -1), keepdim=True)
        return (gradient - u * (along / (damping + length))) / damping

    def multiply(self, solution: Tensors, matrix: Tensor) -> Tensor:
        u = solution["b"][..., None] * solution["a"][..., None, :]
        return u * (u * matrix).sum((-2, -1), keepdim=True)


@dataclass(frozen=True, kw_only=True)
class RankOneMethod(Toy):
    made = RankOneBlock


# --- gathered rows ----------------------------------------------------------------------------


class SampleSpaceBlock(ToyBlock):
    """`(F + γI)⁻¹ vec(V)` with F the empirical Fisher, solved among samples (Woodbury).

    `F = U Uᵀ/N`, column n of U is `vec(gₙ aₙᵀ)`, and `UᵀU = (a aᵀ) ∘ (g gᵀ)` needs no U.
    """

    label = "sample space"
    keeps = "summed"

    def __init__(self, layer: Layer) -> None:
        super().__init__(layer)
        a, g = (*self.batch, self.d_in), (*self.batch, self.d_out)
        self.statistics = {
            "a": Statistic(a, "output", combine="gather"),
            "g": Statistic(g, "output", degree=1, combine="gather"),
        }
        self.solution_shapes = {
            "a": (*self.batch, None, self.d_in),
            "g": (*self.batch, None, self.d_out),
            "inverse": (*self.batch, None, None),
        }

    def observe_pair(
        self, inputs: Rows, outputs: Rows, solution: Tensors | None = None
    ) -> dict[str, Tensor]:
        return {"a": inputs.summed(), "g": outputs.summed()}

    def solve(
        self, part: str, means: Tensors, outlines: Any, previous: Any, damping: float
    ) -> dict[str, Tensor]:
        a, g = means["a"], means["g"]
        samples = a.shape[-2]
        kernel = (a @ a.mT) * (g @ g.mT) / samples
        damped = kernel + damping * torch.eye(samples, dtype=a.dtype, device=a.device)
        return {"a": a, "g": g, "inverse": torch.linalg.inv(damped)}

    def precondition(self, solution: Tensors, gradient: Tensor, damping: float) -> Tensor:
        a, g = solution["a"], solution["g"]
        along = ((g @ gradient) * a).sum(-1, keepdim=True) / a.shape[-2]
        inside = solution["inverse"] @ along
        return (gradient - (g * inside).mT @ a) / damping


@dataclass(frozen=True, kw_only=True)
class SampleSpaceMethod(Toy):
    made = SampleSpaceBlock


# --- gradients only ---------------------------------------------------------------------------


class GradientBlock(ToyBlock):
    """`L^-¼ V R^-¼` with L and R the mean of `V Vᵀ` and `Vᵀ V` over steps."""

    label = "gradient only"

    def __init__(self, layer: Layer) -> None:
        super().__init__(layer)
        left = (*self.batch, self.d_out, self.d_out)
        right = (*self.batch, self.d_in, self.d_in)
        self.statistics = {
            "L": Statistic(left, "gradient", symmetric=True),
            "R": Statistic(right, "gradient", symmetric=True),
        }
        self.solution_shapes = {"left": left, "right": right}

    def observe_gradient(
        self, gradient: Tensor, solution: Tensors | None = None
    ) -> dict[str, Tensor]:
        return {"L": gradient @ gradient.mT, "R": gradient.mT @ gradient}

    def solve(
        self, part: str, means: Tensors, outlines: Any, previous: Any, damping: float
    ) -> dict[str, Tensor]:
        return {
            "left": inverse_fourth_root(means["L"], damping),
            "right": inverse_fourth_root(means["R"], damping),
        }

    def precondition(self, solution: Tensors, gradient: Tensor, damping: float) -> Tensor:
        return solution["left"] @ gradient @ solution["right"]


def inverse_fourth_root(matrix: Tensor, damping: float) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ ((values + damping) ** -0.25)[..., None].mul(vectors.mT)


@dataclass(frozen=True, kw_only=True)
class GradientOnlyMethod(Toy):
    made = GradientBlock


# --- from the previous solution ---------------------------------------------------------------


class NewtonBlock(ToyBlock):
    """`V (A + γI)⁻¹`, whose inverse is improved at each refresh: `X ← X(2I - (A + γI)X)`."""

    label = "one Newton step a refresh"

    def __init__(self, layer: Layer) -> None:
        super().__init__(layer)
        matrix = (*self.batch, self.d_in, self.d_in)
        self.statistics = {"A": Statistic(matrix, "input", symmetric=True)}
        self.solution_shapes = {"inverse": matrix}

    def observe_input(self, inputs: Rows, solution: Tensors | None = None) -> dict[str, Tensor]:
        return {"A": inputs.covariance()}

    def solve(
        self, part: str, means: Tensors, outlines: Any, previous: Any, damping: float
    ) -> dict[str, Tensor]:
        identity = torch.eye(self.d_in, dtype=self.dtype, device=means["A"].device)
        damped = means["A"] + damping * identity
        size = damped.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
        start = identity / size if previous is None else previous["inverse"]
        # A start that is too far off would not converge.
        residual = (identity - damped @ start).norm(dim=(-2, -1), keepdim=True)
        start = torch.where(residual < 1, start, (identity / size).expand_as(damped))
        return {"inverse": start @ (2 * identity - damped @ start)}

    def precondition(self, solution: Tensors, gradient: Tensor, damping: float) -> Tensor:
        return gradient @ solution["inverse"]


@dataclass(frozen=True, kw_only=True)
class NewtonMethod(Toy):
    made = NewtonBlock


# --- all rows of both sides -------------------------------------------------------------------


class DenseRowsBlock(ToyBlock):
    """`V / (F + γ)` with F the mean over samples of the squared gradient, from all rows."""

    label = "dense rows"
    keeps = "dense"

    def __init__(self, layer: Layer) -> None:
        super().__init__(layer)
        self.statistics = {"F": Statistic(self.shape, "output", degree=2)}
        self.solution_shapes = {"F": self.shape}

    def observe_pair(
        self, inputs: Rows, outputs: Rows, solution: Tensors | None = None
    ) -> dict[str, Tensor]:
        each = torch.einsum("...nso,...nsi->...noi", outputs.dense(), inputs.dense())
        return {"F": each.square().sum(-3)}

    def solve(
        self, part: str, means: Tensors, outlines: Any, previous: Any, damping: float
    ) -> dict[str, Tensor]:
        return {"F": means["F"]}

    def precondition(self, solution: Tensors, gradient: Tensor, damping: float) -> Tensor:
        return gradient / (solution["F"] + damping)

    def multiply(self, solution: Tensors, matrix: Tensor) -> Tensor:
        return matrix * solution["F"]


@dataclass(frozen=True, kw_only=True)
class DenseRowsMethod(Toy):
    made = DenseRowsBlock


# --- a rule before preconditioning ------------------------------------------------------------


class Damped(Transform):
    """Half of what the gradient was before, as long as there is a solution to divide it by."""

    def buffer_shapes(self, layer: Layer) -> dict[str, tuple[int, ...]]:
        return {"before": layer.matrix_shape}

    def __call__(
        self, gradient: Tensor, buffers: dict[str, Tensor], solution: Tensors | None, step: int
    ) -> Tensor:
        before = buffers.get("before")
        buffers["before"] = gradient.clone()
        return gradient if before is None or solution is None else gradient + before / 2


@dataclass(frozen=True, kw_only=True)
class WithRuleMethod(Toy):
    made = RankOneBlock

    def transforms(self) -> tuple[Transform, ...]:
        return (Damped(),)


RankOne = kronfac.register_method(RankOneMethod)
SampleSpace = kronfac.register_method(SampleSpaceMethod)
GradientOnly = kronfac.register_method(GradientOnlyMethod)
Newton = kronfac.register_method(NewtonMethod)
DenseRows = kronfac.register_method(DenseRowsMethod)
WithRule = kronfac.register_method(WithRuleMethod)

#: What the engine has to carry: matrices, vectors, rows, gradients, earlier solutions and rules.
KINDS: dict[str, Any] = {
    "matrices": kronfac.KFAC,
    "vectors": RankOne,
    "gathered rows": SampleSpace,
    "gradients": GradientOnly,
    "previous solution": Newton,
    "dense rows": DenseRows,
    "rule": WithRule,
}
