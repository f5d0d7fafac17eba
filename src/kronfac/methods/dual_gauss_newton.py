"""Gauss-Newton steps of each layer, solved in the dual: among the outputs of a batch's samples."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kronfac.adaptive.relative import Relative
from kronfac.layers import Layer
from kronfac.methods.sample_space.block import SampleBlock, SampleSpaceBlock, above_noise
from kronfac.methods.sample_space.gradients import SampleGradients
from kronfac.methods.sample_space.method import PerSampleMethod
from kronfac.optimizer.fronts import register_method
from kronfac.options.config import Options, check_count
from kronfac.protocol.block import Given, Tensors
from kronfac.protocol.method import Defaults


class ConjugateBlock(SampleBlock):
    """The dual problem by a few steps of conjugate gradients, with the kernel as a matrix.

    ``x = (v - Rᵀβ)/γ`` with ``(R Rᵀ + γI)β = R v``. After any number of steps ``⟨v, x⟩ > 0``: the k-th
    iterate has ``⟨Rv, β_k⟩`` at most that of the solution, for which ``⟨v, x⟩ = vᵀ(RᵀR + γI)⁻¹v``.
    """

    undamped = knows_curvature = True

    def __init__(
        self, layer: Layer, gradients: SampleGradients, max_bytes: int, iterations: int
    ) -> None:
        super().__init__(layer, gradients, max_bytes)
        self.iterations = iterations
        self.label = f"{iterations} cg, {gradients.label}"
        self.solution_shapes = {**gradients.shapes, "kernel": (None, None)}
        self.symmetric_solutions = frozenset(["kernel"])

    def solve(self, part: str, given: Given) -> dict[str, Tensor] | None:
        """See :meth:`Block.solve`."""
        rows = self.gradients.collect(given.means, 1 / math.sqrt(self.samples(given)))
        return None if rows is None else {**rows, "kernel": self.gradients.kernel(rows)}

    def precondition(self, solution: Tensors, gradient: Tensor, damping: float | Tensor) -> Tensor:
        """See :meth:`Block.precondition`."""
        shift = damping.reshape(-1) if isinstance(damping, Tensor) else damping
        right = self.gradients.along(solution, gradient)
        dual = conjugate_gradients(solution["kernel"], shift, right, self.iterations)
        return (gradient - self.gradients.back(solution, dual)) / damping

    def multiply(self, solution: Tensors, matrix: Tensor) -> Tensor:
        """See :meth:`Block.multiply`."""
        return self.gradients.back(solution, self.gradients.along(solution, matrix))

    def mean_curvature(self, solution: Tensors) -> Tensor:
        """See :meth:`Block.mean_curvature`."""
        mean = solution["kernel"].diagonal().sum() / self.gradients.size
        return above_noise(mean).reshape([1] * len(self.shape))


def conjugate_gradients(
    matrix: Tensor, shift: float | Tensor, right: Tensor, iterations: int
) -> Tensor:
    """Some steps towards ``(M + shift)⁻¹ b`` from zero; it stays where it is once it has arrived."""
    found, residual = torch.zeros_like(right), right
    direction, length = right, right.square().sum()
    enough = length * torch.finfo(right.dtype).eps ** 2
    for _ in range(iterations):
        image = matrix @ direction + shift * direction
        curvature = (direction * image).sum()
        going = (length > enough) & (curvature > 0)
        rate = torch.where(going, length / torch.where(going, curvature, 1), 0)
        found = found + rate * direction
        residual = residual - rate * image
        after = residual.square().sum()
        direction = (
            residual + torch.where(going, after / torch.where(going, length, 1), 0) * direction
        )
        length = torch.where(going, after, 0)
    return found


@dataclass(frozen=True, kw_only=True)
class DualGaussNewtonMethod(PerSampleMethod):
    """Gauss-Newton steps of each layer, solved in the dual.

    Roulet and Blondel 2023, "Dual Gauss-Newton Directions for Deep Learning". With J the derivative of
    the model's outputs with respect to one layer, H and g the loss's Hessian and gradient at them, and
    ``1/γ`` in place of the paper's step length, the step is
        primal: ``(JᵀHJ/N + γI)⁻¹ Jᵀg/N``,
        dual:   ``Jᵀα/(γN)`` with ``α = (I + HJJᵀ/(γN))⁻¹ g``,
    which are the same. The dual has as many unknowns as a batch has outputs. With ``H = SSᵀ`` of the
    likelihood and ``R = SᵀJ/√N``, which ``optimizer.observe(outputs, likelihood)`` sends back to each
    layer with ``fisher="exact"``, one backward pass an output, it is symmetric:
        ``(RᵀR + γI)⁻¹ v = (v - Rᵀβ)/γ`` with ``(RRᵀ + γI)β = Rv``.
    So any gradient can be solved for, that of a momentum buffer too, and at steps between refreshes. The
    paper has a new J at every step; here every tenth step has one, at a tenth of the cost. With
    ``refresh_every=1`` and this damping, one small net trained well at two of three rates only.

    The paper solves the whole model's dual by products with J and its transpose. Here each layer has its
    own kernel ``RRᵀ``, as wide as samples times outputs, C of them for a classifier, and keeps C times
    what ``EmpiricalNGD`` does, which is the same with the loss's own gradients. Choose it for models with
    few outputs. With ``fisher="mc"`` there is one row for each sample and draw instead, and ``RᵀR`` is
    right on average.

    Args:
        iterations: steps of conjugate gradients in the dual, each of which makes a better descent
            direction; ``None`` solves it exactly.
        keep: what is gathered of a layer: ``"rows"``, ``"gradients"`` or ``"auto"``, as in
            ``EmpiricalNGD``.
        max_bytes: most bytes of rows that one layer may keep of a rank's batch; more are refused.
    """

    defaults = Defaults(
        damping=Relative(10.0), factor_every=10, refresh_every=10, decay=0.0, fisher="exact"
    )
    made = SampleSpaceBlock

    iterations: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.iterations is not None:
            check_count("iterations", self.iterations)

    def check(self, options: Options) -> None:
        """See :meth:`Method.check`."""
        if not options.sampled:
            raise ValueError(
                f"DualGaussNewton needs the likelihood's own gradients, which fisher={options.fisher!r} "
                "does not observe; choose 'exact', or 'mc' where outputs are many."
            )

    def matrix_block(self, layer: Layer, gradients: SampleGradients) -> SampleBlock:
        """See :meth:`PerSampleMethod.matrix_block`."""
        if self.iterations is None:
            return super().matrix_block(layer, gradients)
        return ConjugateBlock(layer, gradients, self.max_bytes, self.iterations)


DualGaussNewton = register_method(DualGaussNewtonMethod)
