"""The rules that come with the engine."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kronfac.layers import Layer
from kronfac.options.config import Schedules
from kronfac.protocol.transform import LayerStep, Transform


class Momentum(Transform):
    """Heavy ball before preconditioning: ``buf ← μ·buf + V``; Nesterov looks ahead with ``V + μ·buf``."""

    def __init__(self, schedules: Schedules, nesterov: bool) -> None:
        self.schedules = schedules
        self.nesterov = nesterov

    def buffer_shapes(self, layer: Layer) -> Mapping[str, tuple[int, ...]]:
        """See :meth:`Transform.buffer_shapes`."""
        return {"momentum": layer.matrix_shape}

    def __call__(self, gradient: Tensor, at: LayerStep) -> Tensor:
        """See :meth:`Transform.__call__`."""
        mu, buffers = float(self.schedules.at("momentum", at.step)), at.buffers
        if "momentum" in buffers:
            buffers["momentum"].mul_(mu).add_(gradient)
        else:
            buffers["momentum"] = gradient.clone(memory_format=torch.contiguous_format)
        held = buffers["momentum"]
        return gradient + mu * held if self.nesterov else held
