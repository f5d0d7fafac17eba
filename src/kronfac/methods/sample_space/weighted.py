"""Steps that are weighted sums of per-sample gradients, ``Δ = Uᵀ c``: the gradient has ``c = 1/N``.

The weights belong to the samples of one batch. With their mean ``c̄``, or any number, the same step is
    ``Δ = N c̄ V + Uᵀ(c - c̄)``, since ``V = Uᵀ1/N``.
The first term is linear in whatever gradient is there; the second, the correction, is of this batch only.
At a step whose batch was not observed nothing is known of single samples, and the mean is all that there
is: the gradient is multiplied by ``N c̄`` of the last batch that was.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from kronfac.layers import Layer
from kronfac.linalg.solve import eigen
from kronfac.methods.sample_space.block import SampleBlock, above_noise
from kronfac.methods.sample_space.gradients import SampleGradients
from kronfac.protocol.block import NOTHING, Context, Given, Part, Statistic, Tensors


class WeightedBlock(SampleBlock):
    """``Δ = Uᵀ c`` with weights ``c`` that a method chooses."""

    knows_curvature = True

    #: What else of each sample the weights depend on.
    further: ClassVar[Mapping[str, Statistic]] = {}

    def __init__(self, layer: Layer, gradients: SampleGradients, max_bytes: int) -> None:
        super().__init__(layer, gradients, max_bytes)
        self.label = f"weighted {gradients.label}"
        self.one = (1,) * len(self.shape)
        gathered = {**gradients.statistics, **self.further}
        self.gathered = tuple(gathered)
        # A part of every step needs a statistic of every step.
        steps = Statistic((1,), "gradient", every="step", decay=0.0)
        self.statistics = {**gathered, "steps": steps}
        self.solution_shapes = {
            "scale": self.one,
            "correction": self.shape,
            "mean": self.one,
            "at": (1,),
            "fresh": (1,),
        }

    @property
    def parts(self) -> Mapping[str, Part]:
        """See :attr:`Block.parts`: the weights, and whether they are those of this step."""
        solution = tuple(name for name in self.solution_shapes if name != "fresh")
        return {
            "": Part(self.gathered, solution, self.cost.refresh_flops),
            "now": Part(("steps",), ("fresh",), 1, every="step"),
        }

    def observe_gradient(self, gradient: Tensor, context: Context = NOTHING) -> dict[str, Tensor]:
        """See :meth:`Block.observe_gradient`."""
        return {"steps": gradient.new_ones(1, dtype=self.dtype)}

    def solve(self, part: str, given: Given) -> dict[str, Tensor] | None:
        """See :meth:`Block.solve`."""
        if part == "now":
            return {"fresh": (given.latest("at") == given.step).to(self.dtype)}
        rows = self.gradients.collect(given.means)
        if rows is None:
            return None
        solved = eigen(self.gradients.kernel(rows))
        if solved is None:
            return None
        vectors, values = solved
        samples = self.samples(given)
        mean = above_noise(self.mean_eigenvalue(values, samples))
        shift = given.damping * mean if given.relative else torch.full_like(mean, given.damping)
        targets = self.targets(given, len(values)).to(values) @ vectors
        weights = vectors @ (targets / (values + self.shift(shift, samples)))
        if given.relative:  # without any curvature the gradient stays as it is
            weights = torch.where(mean > 0, weights, 1 / samples)
        common = weights.mean().clamp(min=0)  # a negative one would climb between refreshes
        return {
            "scale": (samples * common).reshape(self.one),
            "correction": self.gradients.back(rows, weights - common),
            "mean": mean.reshape(self.one),
            "at": torch.full_like(values[:1], given.step),
        }

    @abstractmethod
    def mean_eigenvalue(self, values: Tensor, samples: float) -> Tensor:
        """What relative damping is a share of, from the eigenvalues of K."""

    @abstractmethod
    def shift(self, damping: Tensor, samples: float) -> Tensor:
        """What is added to the eigenvalues of K."""

    @abstractmethod
    def targets(self, given: Given, rows: int) -> Tensor:
        """``t: [n]`` in ``c = (K + shift)⁻¹ t``."""

    def precondition(self, solution: Tensors, gradient: Tensor, damping: float | Tensor) -> Tensor:
        """See :meth:`Block.precondition`."""
        return solution["scale"] * gradient + solution["fresh"] * solution["correction"]

    def mean_curvature(self, solution: Tensors) -> Tensor:
        """See :meth:`Block.mean_curvature`."""
        return solution["mean"]
