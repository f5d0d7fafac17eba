"""The method of parameters without curvature: their gradients pass, and only lengths are chosen."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kronfac.layers import Layer
from kronfac.protocol.block import Block, Cost, Given, Part, Shape, Statistic, Tensors
from kronfac.protocol.method import Method


class IdentityBlock(Block):
    """``P = V``: nothing is observed or solved."""

    label = "length only"
    statistics: Mapping[str, Statistic] = {}
    solution_shapes: Mapping[str, Shape] = {}
    undamped = knows_curvature = knows_trace = True

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype

    @property
    def parts(self) -> Mapping[str, Part]:
        """See :attr:`Block.parts`: none."""
        return {}

    def solve(self, part: str, given: Given) -> dict[str, Tensor] | None:
        """See :meth:`Block.solve`."""
        return {}

    def mean_curvature(self, solution: Tensors) -> Tensor:
        """See :meth:`Block.mean_curvature`."""
        return torch.ones([1] * len(self.shape), dtype=self.dtype)

    def precondition(self, solution: Tensors, gradient: Tensor, damping: float | Tensor) -> Tensor:
        """See :meth:`Block.precondition`."""
        return gradient

    @property
    def signature(self) -> Hashable:
        """See :attr:`Block.signature`."""
        return IdentityBlock, self.shape, self.dtype

    @property
    def cost(self) -> Cost:
        """See :meth:`Block.cost`."""
        return Cost(refresh_flops=0, precondition_flops=0, statistics_bytes=0, solution_bytes=0)


@dataclass(frozen=True, kw_only=True)
class IdentityMethod(Method):
    """What stands in for a method where it has no block."""

    def block(self, layer: Layer, grouped: bool = True) -> IdentityBlock:
        """See :meth:`Method.block`."""
        return IdentityBlock(layer.matrix_shape, layer.factor_dtype)
