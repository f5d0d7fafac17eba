"""Per-sample gradients of one layer: how they are observed and kept, and products with them.

Row n of ``U`` is the gradient of one sample's loss, ``uₙ = vec(Σₛ gₙₛ aₙₛᵀ)`` over its positions. It is
never needed as a matrix: three products are enough, the kernel ``K = U Uᵀ``, ``U vec(V)`` and ``Uᵀ c``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from kronfac.layers import Layer
from kronfac.layers.conv import ConvLayer
from kronfac.layers.rows import Rows
from kronfac.protocol.block import Shape, Statistic, Tensors

Keeping = Literal["auto", "rows", "gradients"]


class SampleGradients(ABC):
    """``U`` of one layer whose gradient matrix is ``[*b, d_out, d_in]``."""

    #: How rows are kept until both sides of a sample meet; see :attr:`Block.keeps`.
    keeps: Literal["summed", "dense"]
    #: What is gathered, and what a solution keeps of it, by name.
    statistics: Mapping[str, Statistic]
    shapes: Mapping[str, Shape]
    #: What one row is, for the summary.
    label: str

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        *self.batch, self.d_out, self.d_in = shape
        self.size = math.prod(shape)

    @abstractmethod
    def observe(self, inputs: Rows, outputs: Rows) -> dict[str, Tensor]:
        """Rows of one call, for each of the statistics."""

    @abstractmethod
    def collect(self, means: Tensors, scale: float = 1.0) -> dict[str, Tensor] | None:
        """What a solution keeps of gathered rows, times a number; ``None`` if they cannot be used."""

    @abstractmethod
    def kernel(self, rows: Tensors) -> Tensor:
        """``U Uᵀ``, ``[*b, n, n]``."""

    @abstractmethod
    def along(self, rows: Tensors, matrix: Tensor) -> Tensor:
        """``U vec(V)``, ``[*b, n]``."""

    @abstractmethod
    def back(self, rows: Tensors, weights: Tensor) -> Tensor:
        """``Uᵀ c`` as a matrix, for weights ``c: [*b, n]``."""

    def kept_numbers(self, inputs: Rows) -> int:
        """How many numbers both sides of a call are while they wait for each other."""
        positions = inputs.positions if self.keeps == "dense" else 1
        groups = math.prod(self.batch)
        return groups * inputs.samples * positions * (self.d_in + self.d_out)


class RowGradients(SampleGradients):
    """Exact, from all rows: ``a: [n, S, d_in]`` and ``g: [n, S, d_out]``, for layers without groups.

    Samples may differ in their number of positions; shorter ones are filled up with zeros.
    """

    keeps = "dense"
    label = "rows"

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__(shape)
        self.statistics = {
            "a": Statistic((self.d_in,), "output", combine="gather"),
            "g": Statistic((self.d_out,), "output", degree=1, combine="gather"),
            "positions": Statistic((1,), "output", combine="gather"),
        }
        self.shapes = {"a": (None, None, self.d_in), "g": (None, None, self.d_out)}

    def observe(self, inputs: Rows, outputs: Rows) -> dict[str, Tensor]:
        """See :meth:`SampleGradients.observe`."""
        a, g = inputs.dense(), outputs.dense()
        positions = a.new_full((inputs.samples, 1), float(inputs.positions))
        # Contributions are changed in place, but several draws of gradients meet the same inputs.
        rows = {"a": a.flatten(0, 1).clone(), "g": g.flatten(0, 1).clone()}
        return {**rows, "positions": positions}

    def collect(self, means: Tensors, scale: float = 1.0) -> dict[str, Tensor] | None:
        """See :meth:`SampleGradients.collect`."""
        a, g, positions = means["a"], means["g"] * scale, means["positions"].squeeze(-1)
        samples, rows = len(positions), len(a)
        longest = rows // samples
        even = (positions == longest) | (positions == 0)  # zero: a batch that was not finite
        if samples == rows or (samples * longest == rows and bool(even.all())):
            return {
                "a": a.unflatten(0, (samples, longest)),
                "g": g.unflatten(0, (samples, longest)),
            }
        if bool((positions == 0).any()):
            return None  # it is not known which rows to leave out
        longest = int(positions.max())
        there = torch.arange(longest, device=a.device) < positions[:, None]
        padded = {}
        for name, value in (("a", a), ("g", g)):
            padded[name] = value.new_zeros(samples, longest, value.shape[-1])
            padded[name][there] = value
        return padded

    def kernel(self, rows: Tensors) -> Tensor:
        """See :meth:`SampleGradients.kernel`: by pairs of rows or by gradients, whatever is cheaper."""
        a, g = rows["a"], rows["g"]
        samples, positions = a.shape[:2]
        if positions == 1:
            a, g = a.squeeze(1), g.squeeze(1)
            return (a @ a.mT) * (g @ g.mT)
        by_pairs = (samples * positions) ** 2 * (self.d_in + self.d_out)
        by_gradients = samples * (positions + samples) * self.d_in * self.d_out
        return _pair_kernel(a, g) if by_pairs < by_gradients else _gradient_kernel(a, g)

    def along(self, rows: Tensors, matrix: Tensor) -> Tensor:
        """See :meth:`SampleGradients.along`."""
        return ((rows["g"] @ matrix) * rows["a"]).sum((-2, -1))

    def back(self, rows: Tensors, weights: Tensor) -> Tensor:
        """See :meth:`SampleGradients.back`."""
        weighted = rows["g"] * weights[:, None, None]
        return weighted.flatten(0, 1).mT @ rows["a"].flatten(0, 1)


def _pair_kernel(a: Tensor, g: Tensor) -> Tensor:
    """``K_nm = Σ_st (a_ns·a_mt)(g_ns·g_mt)``, some samples at a time."""
    samples, positions, width = a.shape
    at_once = max(1, (width + g.shape[-1]) // positions)
    flat_a, flat_g = a.flatten(0, 1), g.flatten(0, 1)
    found = []
    for one, other in zip(a.split(at_once), g.split(at_once), strict=True):
        pairs = (one.flatten(0, 1) @ flat_a.mT) * (other.flatten(0, 1) @ flat_g.mT)
        found.append(pairs.unflatten(0, (-1, positions)).unflatten(2, (samples, -1)).sum((1, 3)))
    return torch.cat(found)


def _gradient_kernel(a: Tensor, g: Tensor) -> Tensor:
    """The same from gradients, of some outputs at a time."""
    samples, positions, width = a.shape
    at_once = max(1, positions * (width + g.shape[-1]) // width)
    total = a.new_zeros(samples, samples)
    for some in g.split(at_once, -1):
        gradients = (some.mT @ a).flatten(1)
        total += gradients @ gradients.mT
    return total


class WholeGradients(SampleGradients):
    """Exact, from gradients ``u: [n, d]`` of the whole layer, its groups together.

    Smaller than rows where a sample has many positions, as in convolutions.
    """

    keeps = "dense"
    label = "gradients"

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__(shape)
        self.statistics = {"u": Statistic((self.size,), "output", degree=1, combine="gather")}
        self.shapes = {"u": (None, self.size)}

    def observe(self, inputs: Rows, outputs: Rows) -> dict[str, Tensor]:
        """See :meth:`SampleGradients.observe`."""
        gradients = outputs.dense().mT @ inputs.dense()  # [*b, N, d_out, d_in]
        return {"u": gradients.movedim(-3, 0).reshape(inputs.samples, self.size)}

    def collect(self, means: Tensors, scale: float = 1.0) -> dict[str, Tensor] | None:
        """See :meth:`SampleGradients.collect`."""
        return {"u": means["u"] * scale}

    def kernel(self, rows: Tensors) -> Tensor:
        """See :meth:`SampleGradients.kernel`."""
        return rows["u"] @ rows["u"].mT

    def along(self, rows: Tensors, matrix: Tensor) -> Tensor:
        """See :meth:`SampleGradients.along`."""
        return rows["u"] @ matrix.reshape(-1)

    def back(self, rows: Tensors, weights: Tensor) -> Tensor:
        """See :meth:`SampleGradients.back`."""
        return (weights @ rows["u"]).reshape(self.shape)


class SummedGradients(SampleGradients):
    """One row a side of each sample: ``uₙ = (Σₛ gₙₛ)(Σₛ aₙₛ/S)ᵀ``, each group for itself.

    That is the gradient where there is one position, and an approximation elsewhere.
    """

    keeps = "summed"
    label = "summed rows"

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__(shape)
        a, g = (*self.batch, self.d_in), (*self.batch, self.d_out)
        self.statistics = {
            "a": Statistic(a, "output", combine="gather"),
            "g": Statistic(g, "output", degree=1, combine="gather"),
        }
        self.shapes = {name: one.sum_shape for name, one in self.statistics.items()}

    def observe(self, inputs: Rows, outputs: Rows) -> dict[str, Tensor]:
        """See :meth:`SampleGradients.observe`."""
        return {"a": inputs.summed(), "g": outputs.summed()}

    def collect(self, means: Tensors, scale: float = 1.0) -> dict[str, Tensor] | None:
        """See :meth:`SampleGradients.collect`."""
        return {"a": means["a"], "g": means["g"] * scale}

    def kernel(self, rows: Tensors) -> Tensor:
        """See :meth:`SampleGradients.kernel`."""
        a, g = rows["a"], rows["g"]
        return (a @ a.mT) * (g @ g.mT)

    def along(self, rows: Tensors, matrix: Tensor) -> Tensor:
        """See :meth:`SampleGradients.along`."""
        return ((rows["g"] @ matrix) * rows["a"]).sum(-1)

    def back(self, rows: Tensors, weights: Tensor) -> Tensor:
        """See :meth:`SampleGradients.back`."""
        return (rows["g"] * weights[..., None]).mT @ rows["a"]


def exact_gradients(layer: Layer, keep: Keeping) -> SampleGradients:
    """The exact form of a layer: gradients of convolutions and layers with groups, else rows."""
    shape = layer.matrix_shape
    wants_gradients = keep == "gradients" or (keep == "auto" and isinstance(layer, ConvLayer))
    return WholeGradients(shape) if wants_gradients or len(shape) > 2 else RowGradients(shape)
