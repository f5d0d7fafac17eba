"""nn.Conv1d, nn.Conv2d and nn.Conv3d with every stride, dilation, padding, mode and group count."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from kronfac.layers.layer import Layer
from kronfac.layers.rows import MapRows, PatchRows, Rows
from kronfac.linalg.patches import Window


class ConvLayer(Layer):
    """One block per group; features are ordered taps first, channels inside (``channels_last``)."""

    module: nn.Conv1d | nn.Conv2d | nn.Conv3d

    def inputs(self, args: tuple[Any, ...]) -> Rows:
        """See :meth:`Layer.inputs`."""
        x = self._batched(args[0])
        padding = self._padding()
        if self.module.padding_mode != "zeros" and any(map(any, padding)):
            flat = [amount for pair in reversed(padding) for amount in pair]
            x = F.pad(x, flat, mode=self.module.padding_mode)
            padding = ((0, 0),) * len(padding)
        window = Window(
            kernel=self.module.kernel_size,
            stride=self.module.stride,
            dilation=self.module.dilation,
            padding=padding,
            groups=self.module.groups,
        )
        return PatchRows(x, window, ones=self.bias_trains)

    def outputs(self, grad: Tensor, args: tuple[Any, ...] = ()) -> Rows:
        """See :meth:`Layer.outputs`."""
        return MapRows(self._batched(grad), self.module.groups)

    @property
    def overlaps(self) -> bool:  # type: ignore[override]
        """See :attr:`Layer.overlaps`."""
        pairs = zip(self.module.kernel_size, self.module.stride, strict=True)
        return any(size > stride for size, stride in pairs)

    @property
    def geometry(self) -> Hashable:
        """See :attr:`Layer.geometry`."""
        module = self.module
        spacing = module.kernel_size, module.stride, module.dilation
        return *spacing, self._padding(), module.padding_mode, module.groups

    @property
    def input_form(self) -> Hashable:
        """See :attr:`Layer.input_form`; subclasses may make other rows."""
        if type(self).inputs is not ConvLayer.inputs:
            return None
        return ConvLayer, self.geometry, self.bias_trains, self.factor_dtype

    def _batched(self, x: Tensor) -> Tensor:
        x = x.detach().to(self.factor_dtype)
        unbatched = x.dim() == len(self.module.kernel_size) + 1
        return x.unsqueeze(0) if unbatched else x

    def _padding(self) -> tuple[tuple[int, int], ...]:
        """Padding as ``(before, after)`` per dimension; an odd total puts the extra one after."""
        module = self.module
        if module.padding == "same":
            totals = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
            return tuple((total // 2, total - total // 2) for total in totals)
        if module.padding == "valid":
            return ((0, 0),) * len(module.kernel_size)
        return tuple((int(amount), int(amount)) for amount in module.padding)

    def _weight_shape(self) -> tuple[int, ...]:
        groups = self.module.groups
        width = math.prod(self.module.kernel_size) * self.module.in_channels // groups
        shape = (self.module.out_channels // groups, width)
        return (groups, *shape) if groups > 1 else shape

    def _to_matrix(self, grad: Tensor) -> Tensor:
        return grad.movedim(1, -1).reshape(self._weight_shape())

    def _weight_place(self, grad: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
        target = grad.movedim(1, -1)
        return target, matrix.reshape(target.shape)
