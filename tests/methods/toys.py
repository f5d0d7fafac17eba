"""Small methods, one for each kind of thing that a block may ask of the engine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

import kronfac
from kronfac import Defaults, Method
from kronfac.layers import Layer
from kronfac.layers.rows import Rows
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
from kronfac.protocol.transform import LayerStep, Transform

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

    def observe_input(self, inputs: Rows, context: Context = NOTHING) -> dict[str, Tensor]:
        return {"a": inputs.total()}

    def observe_output(self, outputs: Rows, context: Context = NOTHING) -> dict[str, Tensor]:
        return {"b": outputs.total()}

    def solve(self, part: str, given: Given) -> dict[str, Tensor]:
        return dict(given.means)

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
        self, inputs: Rows, outputs: Rows, context: Context = NOTHING
    ) -> dict[str, Tensor]:
        return {"a": inputs.summed(), "g": outputs.summed()}

    def solve(self, part: str, given: Given) -> dict[str, Tensor]:
        a, g = given.means["a"], given.means["g"]
        samples = a.shape[-2]
        kernel = (a @ a.mT) * (g @ g.mT) / samples
        damped = kernel + given.damping * torch.eye(samples, dtype=a.dtype, device=a.device)
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

    def observe_gradient(self, gradient: Tensor, context: Context = NOTHING) -> dict[str, Tensor]:
        return {"L": gradient @ gradient.mT, "R": gradient.mT @ gradient}

    def solve(self, part: str, given: Given) -> dict[str, Tensor]:
        return {
            "left": inverse_fourth_root(given.means["L"], given.damping),
            "right": inverse_fourth_root(given.means["R"], given.damping),
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

    def observe_input(self, inputs: Rows, context: Context = NOTHING) -> dict[str, Tensor]:
        return {"A": inputs.covariance()}

    def solve(self, part: str, given: Given) -> dict[str, Tensor]:
        mean, previous = given.means["A"], given.previous
        identity = torch.eye(self.d_in, dtype=self.dtype, device=mean.device)
        damped = mean + given.damping * identity
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
        self, inputs: Rows, outputs: Rows, context: Context = NOTHING
    ) -> dict[str, Tensor]:
        each = torch.einsum("...nso,...nsi->...noi", outputs.dense(), inputs.dense())
        return {"F": each.square().sum(-3)}

    def solve(self, part: str, given: Given) -> dict[str, Tensor]:
        return {"F": given.means["F"]}

    def precondition(self, solution: Tensors, gradient: Tensor, damping: float) -> Tensor:
        return gradient / (solution["F"] + damping)

    def multiply(self, solution: Tensors, matrix: Tensor) -> Tensor:
        return matrix * solution["F"]


@dataclass(frozen=True, kw_only=True)
class DenseRowsMethod(Toy):
    made = DenseRowsBlock


# --- updated from the last solution at every update of the statistics ---------------------------


class ShermanMorrisonBlock(ToyBlock):
    """`V J` with J the inverse of `J⁻¹ ← ½ J⁻¹ + ½ ā āᵀ`, from one mean vector at a time."""

    label = "rank-one updates"

    def __init__(self, layer: Layer) -> None:
        super().__init__(layer)
        self.statistics = {"a": Statistic((*self.batch, self.d_in), "input", decay=0.0)}
        self.solution_shapes = {"J": (*self.batch, self.d_in, self.d_in)}

    @property
    def parts(self) -> dict[str, Part]:
        return {"J": Part(("a",), ("J",), 0, every="factor")}

    def observe_input(self, inputs: Rows, context: Context = NOTHING) -> dict[str, Tensor]:
        return {"a": inputs.total()}

    def solve(self, part: str, given: Given) -> dict[str, Tensor]:
        a = given.means["a"][..., None]
        start = torch.eye(self.d_in, dtype=a.dtype).expand(self.solution_shapes["J"])
        J = start if given.previous is None else given.previous["J"]
        along = J @ a
        return {"J": 2 * (J - along @ along.mT / (1 + a.mT @ along))}

    def precondition(self, solution: Tensors, gradient: Tensor, damping: float) -> Tensor:
        return gradient @ solution["J"]


@dataclass(frozen=True, kw_only=True)
class ShermanMorrisonMethod(Toy):
    made = ShermanMorrisonBlock


# --- moments in the basis of the solution ---------------------------------------------------------


class MomentBlock(ToyBlock):
    """`Q_G [(Q_Gᵀ V Q_A) / (S + γ)] Q_Aᵀ` with S moments in the eigenbasis; at first `v_G v_Aᵀ`."""

    moments: ClassVar[Statistic]

    def __init__(self, layer: Layer) -> None:
        super().__init__(layer)
        A, G = (*self.batch, self.d_in, self.d_in), (*self.batch, self.d_out, self.d_out)
        basis = ("A.vectors", "G.vectors")
        self.statistics = {
            "A": Statistic(A, "input", symmetric=True),
            "G": Statistic(G, "output", degree=2, symmetric=True),
            "S": replace(self.moments, shape=self.shape, basis=basis),
        }
        self.solution_shapes = {"A.vectors": A, "A.values": A[:-1], "G.vectors": G}
        self.solution_shapes |= {"G.values": G[:-1], "S": self.shape}

    def observe_input(self, inputs: Rows, context: Context = NOTHING) -> dict[str, Tensor]:
        return {"A": inputs.covariance()}

    def observe_output(self, outputs: Rows, context: Context = NOTHING) -> dict[str, Tensor]:
        return {"G": outputs.covariance()}

    def solve(self, part: str, given: Given) -> dict[str, Tensor]:
        if part == "S":
            start = given.latest("G.values")[..., None] * given.latest("A.values")[..., None, :]
            return {"S": given.means.get("S", start)}
        values, vectors = torch.linalg.eigh(given.means[part])
        return {f"{part}.values": values, f"{part}.vectors": vectors}

    def rebase(self, name: str, value: Tensor, before: Tensors, after: Tensors) -> Tensor:
        left = (after["G.vectors"].mT @ before["G.vectors"]).square()
        right = (after["A.vectors"].mT @ before["A.vectors"]).square()
        return left @ value @ right.mT

    def precondition(self, solution: Tensors, gradient: Tensor, damping: float) -> Tensor:
        left, right = solution["G.vectors"], solution["A.vectors"]
        return left @ (left.mT @ gradient @ right / (solution["S"] + damping)) @ right.mT


class SampleMomentBlock(MomentBlock):
    """S of each sample's gradient, added up over ranks at every update of the statistics."""

    label = "moments of samples"
    keeps = "dense"
    moments = Statistic((), "output", degree=2)

    @property
    def parts(self) -> dict[str, Part]:
        names = tuple(self.solution_shapes)
        return {
            "A": Part(("A",), names[:2], 0),
            "G": Part(("G",), names[2:4], 0),
            "S": Part(("S",), ("S",), 0, every="factor", after=("A", "G")),
        }

    def observe_pair(
        self, inputs: Rows, outputs: Rows, context: Context = NOTHING
    ) -> dict[str, Tensor]:
        if context.solution is None:
            return {}
        a = inputs.dense() @ context.solution["A.vectors"]
        g = outputs.dense() @ context.solution["G.vectors"]
        return {"S": torch.einsum("...nso,...nsi->...noi", g, a).square().sum(-3)}


class GradientMomentBlock(MomentBlock):
    """S of the batch's gradient, at every step; nothing of it travels."""

    label = "moments of gradients"
    moments = Statistic((), "gradient", every="step", decay=0.9)

    @property
    def parts(self) -> dict[str, Part]:
        names = tuple(self.solution_shapes)
        return {
            "A": Part(("A",), names[:2], 0),
            "G": Part(("G",), names[2:4], 0),
            "S": Part(("S",), ("S",), 0, every="step"),
        }

    def observe_gradient(self, gradient: Tensor, context: Context = NOTHING) -> dict[str, Tensor]:
        if context.solution is None:
            return {}
        turned = context.solution["G.vectors"].mT @ gradient @ context.solution["A.vectors"]
        return {"S": turned.square()}


@dataclass(frozen=True, kw_only=True)
class SampleMomentsMethod(Toy):
    made = SampleMomentBlock


@dataclass(frozen=True, kw_only=True)
class GradientMomentsMethod(Toy):
    made = GradientMomentBlock


# --- rows that are compressed before they are gathered --------------------------------------------


class CompressedRowsBlock(SampleSpaceBlock):
    """The sample space again: each rank sends normalised rows with random signs, and their lengths."""

    label = "compressed rows"
    draws = True

    def __init__(self, layer: Layer) -> None:
        super().__init__(layer)
        lengths = Statistic((*self.batch, 1), "compressed", combine="gather")
        self.statistics = {**self.statistics, "lengths": lengths}

    def compress(self, given: Given) -> dict[str, Tensor]:
        a, g = given.means["a"], given.means["g"]
        assert given.rank_generator is not None
        signs = torch.randint(2, (a.shape[-2], 1), generator=given.rank_generator) * 2.0 - 1
        lengths = a.norm(dim=-1, keepdim=True)
        return {"a": a / lengths * signs, "g": g * signs, "lengths": lengths}

    def solve(self, part: str, given: Given) -> dict[str, Tensor]:
        means = {"a": given.means["a"] * given.means["lengths"], "g": given.means["g"]}
        assert sum(given.shards["lengths"]) == means["a"].shape[-2]
        return super().solve(part, replace(given, means=means))


@dataclass(frozen=True, kw_only=True)
class CompressedRowsMethod(Toy):
    made = CompressedRowsBlock


# --- the parameters themselves --------------------------------------------------------------------


class WeightsBlock(ToyBlock):
    """`V · (W̄² + γ)` with the mean of the parameters over all steps."""

    label = "weights"

    def __init__(self, layer: Layer) -> None:
        super().__init__(layer)
        self.statistics = {"W": Statistic(self.shape, "weight", every="step", decay=1.0)}
        self.solution_shapes = {"W": self.shape}

    def observe_weight(self, weight: Tensor, context: Context = NOTHING) -> dict[str, Tensor]:
        return {"W": weight}

    def solve(self, part: str, given: Given) -> dict[str, Tensor]:
        return {"W": given.means["W"].clone()}

    def precondition(self, solution: Tensors, gradient: Tensor, damping: float) -> Tensor:
        return gradient * (solution["W"].square() + damping)


@dataclass(frozen=True, kw_only=True)
class WeightsMethod(Toy):
    made = WeightsBlock


# --- the model's outputs --------------------------------------------------------------------------


class OutputsBlock(SampleSpaceBlock):
    """`Uᵀ (U Uᵀ/N + γ)⁻¹ s / N` with s the squared length of each sample's gradient at the outputs."""

    label = "outputs"

    def __init__(self, layer: Layer) -> None:
        super().__init__(layer)
        one = (*self.batch, 1)
        self.statistics = {
            **self.statistics,
            "s": Statistic(one, "output", degree=2, combine="gather"),
        }
        self.solution_shapes = {**self.solution_shapes, "s": (*self.batch, None, 1)}

    def observe_pair(
        self, inputs: Rows, outputs: Rows, context: Context = NOTHING
    ) -> dict[str, Tensor]:
        assert context.output_gradient is not None
        assert context.outputs is not None
        assert context.outputs.shape == context.output_gradient.shape
        s = context.output_gradient.flatten(1).square().sum(1)[:, None].to(self.dtype)
        s = s.expand(*self.batch, *s.shape).clone()
        return {**super().observe_pair(inputs, outputs), "s": s}

    def solve(self, part: str, given: Given) -> dict[str, Tensor]:
        return {**super().solve(part, given), "s": given.means["s"]}

    def precondition(self, solution: Tensors, gradient: Tensor, damping: float) -> Tensor:
        a, g = solution["a"], solution["g"]
        weights = solution["inverse"] @ solution["s"] / a.shape[-2]
        return (g * weights).mT @ a


@dataclass(frozen=True, kw_only=True)
class OutputsMethod(Toy):
    made = OutputsBlock
    needs_observe = True


# --- a rule before preconditioning ------------------------------------------------------------


class Damped(Transform):
    """Half of what the gradient was before, and what the curvature makes of it at the last rate."""

    def buffer_shapes(self, layer: Layer) -> dict[str, tuple[int, ...]]:
        return {"before": layer.matrix_shape}

    def __call__(self, gradient: Tensor, at: LayerStep) -> Tensor:
        before = at.buffers.get("before")
        at.buffers["before"] = gradient.clone()
        if before is None or at.solution is None or at.block is None:
            return gradient
        return gradient + before / 2 + at.rate * at.block.multiply(at.solution, before)


@dataclass(frozen=True, kw_only=True)
class WithRuleMethod(Toy):
    made = RankOneBlock

    def transforms(self) -> tuple[Transform, ...]:
        return (Damped(),)


# --- random numbers -------------------------------------------------------------------------------


class RandomBlock(RankOneBlock):
    """Rank one again, each of its vectors with random signs of which each layer and side has its own."""

    label = "random signs"
    draws = True

    @property
    def parts(self) -> dict[str, Part]:
        return {name: Part((name,), (name,), 1) for name in self.statistics}

    def solve(self, part: str, given: Given) -> dict[str, Tensor]:
        mean = given.means[part]
        signs = torch.randint(2, mean.shape, generator=given.generator(part)) * 2.0 - 1
        return {part: mean * signs.to(mean.dtype)}


class Shaken(Transform):
    """Changes the steps that were solved: half of the last one, and random numbers, are added."""

    draws = True

    def buffer_shapes(self, layer: Layer) -> dict[str, tuple[int, ...]]:
        return {"last": layer.matrix_shape}

    def __call__(self, gradient: Tensor, at: LayerStep) -> Tensor:
        return gradient

    def after(self, update: Tensor, gradient: Tensor, at: LayerStep) -> Tensor:
        noise = torch.rand(gradient.shape, generator=at.generator(), dtype=gradient.dtype)
        last = at.buffers.get("last", torch.zeros_like(update))
        at.buffers["last"] = update + last / 2 + gradient * noise
        return at.buffers["last"]


@dataclass(frozen=True, kw_only=True)
class RandomMethod(Toy):
    made = RandomBlock


@dataclass(frozen=True, kw_only=True)
class ShakenStepsMethod(Toy):
    made = RankOneBlock

    def transforms(self) -> tuple[Transform, ...]:
        return (Shaken(),)


RankOne = kronfac.register_method(RankOneMethod)
SampleSpace = kronfac.register_method(SampleSpaceMethod)
GradientOnly = kronfac.register_method(GradientOnlyMethod)
Newton = kronfac.register_method(NewtonMethod)
DenseRows = kronfac.register_method(DenseRowsMethod)
ShermanMorrison = kronfac.register_method(ShermanMorrisonMethod)
SampleMoments = kronfac.register_method(SampleMomentsMethod)
GradientMoments = kronfac.register_method(GradientMomentsMethod)
CompressedRows = kronfac.register_method(CompressedRowsMethod)
Weights = kronfac.register_method(WeightsMethod)
Outputs = kronfac.register_method(OutputsMethod)
WithRule = kronfac.register_method(WithRuleMethod)
Random = kronfac.register_method(RandomMethod)
ShakenSteps = kronfac.register_method(ShakenStepsMethod)

#: What the engine has to carry, by what is special about it.
KINDS: dict[str, Any] = {
    "matrices": kronfac.KFAC,
    "vectors": RankOne,
    "gathered rows": SampleSpace,
    "gradients": GradientOnly,
    "previous solution": Newton,
    "dense rows": DenseRows,
    "every update": ShermanMorrison,
    "moments of samples": SampleMoments,
    "moments of gradients": GradientMoments,
    "compressed rows": CompressedRows,
    "weights": Weights,
    "outputs": Outputs,
    "rule": WithRule,
    "random solutions": Random,
    "rule after": ShakenSteps,
}
