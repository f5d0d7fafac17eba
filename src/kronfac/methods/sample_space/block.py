"""Blocks that keep per-sample gradients, and the exact solve among samples.

With ``F = UᵀU/N`` and ``K = U Uᵀ`` (Woodbury):
    ``(F + γI)⁻¹ v = (v - Uᵀ (K/N + γI)⁻¹ U v / N) / γ``.
``K`` is as wide as there are samples, however many parameters a layer has.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kronfac.layers import Layer
from kronfac.layers.rows import Rows
from kronfac.linalg.solve import eigen
from kronfac.methods.sample_space.gradients import SampleGradients
from kronfac.protocol.block import (
    NOTHING,
    Block,
    Context,
    Cost,
    Given,
    Statistic,
    Tensors,
    bytes_of,
)

#: A batch that stands for those to come where work has to be known before there is one.
TYPICAL_SAMPLES = 128


class SampleBlock(Block):
    """A block that keeps the per-sample gradients of the newest batch."""

    def __init__(self, layer: Layer, gradients: SampleGradients, max_bytes: int) -> None:
        self.name = layer.name
        self.shape = layer.matrix_shape
        self.dtype = layer.factor_dtype
        self.gradients = gradients
        self.max_bytes = max_bytes
        self.keeps = gradients.keeps
        self.statistics = dict(gradients.statistics)

    def check_rows(self, rows: Rows, draws: int = 1) -> None:
        """See :meth:`Block.check_rows`."""
        self._check(draws * self.gradients.kept_numbers(rows))

    def compress(self, given: Given) -> dict[str, Tensor]:
        """See :meth:`Block.compress`: all micro-batches and draws of a step have to fit together."""
        self._check(sum(rows.numel() for rows in given.means.values()))
        return dict(given.means)

    def _check(self, numbers: int) -> None:
        wanted = numbers * self.dtype.itemsize
        if wanted > self.max_bytes:
            raise ValueError(
                f"layer {self.name!r} would keep {numbers:,} numbers of a batch, {wanted:,} bytes, more "
                f"than max_bytes={self.max_bytes:,}; give smaller batches or a larger max_bytes, or name "
                "the layer in exclude."
            )

    def observe_pair(
        self, inputs: Rows, outputs: Rows, context: Context = NOTHING
    ) -> dict[str, Tensor]:
        """See :meth:`Block.observe_pair`."""
        return self.gradients.observe(inputs, outputs)

    def samples(self, given: Given) -> float:
        """N: what a sum over rows is divided by."""
        return float(given.counts[next(iter(self.gradients.statistics))])

    @property
    def cost(self) -> Cost:
        """See :meth:`Block.cost`. The batch is not known: :data:`TYPICAL_SAMPLES` of one position."""
        samples = TYPICAL_SAMPLES
        statistics = (one.shape for one in self.statistics.values())
        return Cost(
            refresh_flops=9 * samples**3 + 2 * samples**2 * sum(self.shape[-2:]),
            precondition_flops=4 * samples * math.prod(self.shape),
            statistics_bytes=bytes_of(statistics, self.dtype),
            solution_bytes=bytes_of(self.solution_shapes.values(), self.dtype),
        )


class SampleSpaceBlock(SampleBlock):
    """``(F + γI)⁻¹`` with the eigenvalues of ``K/N``, which are those of F that are not zero."""

    undamped = knows_curvature = True

    def __init__(self, layer: Layer, gradients: SampleGradients, max_bytes: int) -> None:
        super().__init__(layer, gradients, max_bytes)
        self.label = f"sample {gradients.label}"
        self.solution_shapes = {**gradients.shapes, "values": (None,), "vectors": (None, None)}

    def solve(self, part: str, given: Given) -> dict[str, Tensor] | None:
        """See :meth:`Block.solve`. Rows are divided by ``√N``, so that N is not needed again."""
        rows = self.gradients.collect(given.means, 1 / math.sqrt(self.samples(given)))
        if rows is None:
            return None
        solved = eigen(self.gradients.kernel(rows))
        if solved is None:
            return None
        return {**rows, "vectors": solved[0], "values": solved[1]}

    def precondition(self, solution: Tensors, gradient: Tensor, damping: float | Tensor) -> Tensor:
        """See :meth:`Block.precondition`."""
        shift = damping.reshape(-1) if isinstance(damping, Tensor) else damping
        vectors = solution["vectors"]
        along = self.gradients.along(solution, gradient) @ vectors
        inside = vectors @ (along / (solution["values"] + shift))
        return (gradient - self.gradients.back(solution, inside)) / damping

    def multiply(self, solution: Tensors, matrix: Tensor) -> Tensor:
        """See :meth:`Block.multiply`."""
        return self.gradients.back(solution, self.gradients.along(solution, matrix))

    def mean_curvature(self, solution: Tensors) -> Tensor:
        """See :meth:`Block.mean_curvature`; one number for all groups."""
        mean = solution["values"].sum() / self.gradients.size
        return above_noise(mean).reshape([1] * len(self.shape))


def above_noise(curvature: Tensor) -> Tensor:
    """Curvature, or zero where it is so small that its inverse would overflow."""
    info = torch.finfo(curvature.dtype)
    return torch.where(curvature > info.tiny / info.eps, curvature, 0)


class UngroupedBlock(Block):
    """A layer whose rows are not those of samples: its gradient stays as it is."""

    label = "rows not by sample: raw"
    undamped = knows_curvature = True

    def __init__(self, layer: Layer, gradients: SampleGradients) -> None:
        self.dims = len(layer.matrix_shape)
        #: Ranks have agreed on who keeps a statistic of this name.
        self.kept = list(gradients.statistics)[-1]
        self.dtype = layer.factor_dtype
        self.statistics = {self.kept: Statistic((1,), "output", degree=1)}
        self.solution_shapes = {"seen": (1,)}

    def observe_output(self, outputs: Rows, context: Context = NOTHING) -> dict[str, Tensor]:
        """See :meth:`Block.observe_output`."""
        return {self.kept: outputs.total().sum().reshape(1)}

    def solve(self, part: str, given: Given) -> dict[str, Tensor] | None:
        """See :meth:`Block.solve`."""
        return {"seen": given.means[self.kept].clone()}

    def precondition(self, solution: Tensors, gradient: Tensor, damping: float | Tensor) -> Tensor:
        """See :meth:`Block.precondition`."""
        return gradient.clone()

    def multiply(self, solution: Tensors, matrix: Tensor) -> Tensor:
        """See :meth:`Block.multiply`: none is known."""
        return torch.zeros_like(matrix)

    def mean_curvature(self, solution: Tensors) -> Tensor:
        """See :meth:`Block.mean_curvature`."""
        return torch.zeros_like(solution["seen"]).reshape([1] * self.dims)

    @property
    def cost(self) -> Cost:
        """See :meth:`Block.cost`."""
        return Cost(1, 1, self.dtype.itemsize, self.dtype.itemsize)
