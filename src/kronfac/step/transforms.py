"""The rules that come with the engine."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kronfac.layers import Layer
from kronfac.options.config import Schedules
from kronfac.protocol.transform import LayerStep, Transform


class Momentum(Transform):
    """Heavy ball before preconditioning: ``buf ← μ·buf + V``; Nesterov looks ahead with ``V + μ·buf``.

    Beside the buffer it keeps the sum of its weights, ``w ← μ·w + 1``, and of the squared norms,
    ``q ← μ·q + ‖V‖²``, from which :func:`coherence` tells how much gradients agree.
    """

    def __init__(self, schedules: Schedules, nesterov: bool) -> None:
        self.schedules = schedules
        self.nesterov = nesterov

    def buffer_shapes(self, layer: Layer) -> Mapping[str, tuple[int, ...]]:
        """See :meth:`Transform.buffer_shapes`."""
        return {"momentum": layer.matrix_shape, "coherence": (2,)}

    def __call__(self, gradient: Tensor, at: LayerStep) -> Tensor:
        """See :meth:`Transform.__call__`."""
        mu, buffers = float(self.schedules.at("momentum", at.step)), at.buffers
        # Far from overflow, also when it is added up.
        square = gradient.square().sum().clamp(max=torch.finfo(gradient.dtype).max * 2.0**-20)
        news = torch.stack([torch.ones_like(square), square])
        if "coherence" in buffers:
            buffers["coherence"].mul_(mu).add_(news)
        else:  # a checkpoint of version 0.1 has a buffer of many gradients, but not how they agreed
            buffers["coherence"] = news / (1 - mu) if "momentum" in buffers else news
        if "momentum" in buffers:
            buffers["momentum"].mul_(mu).add_(gradient)
        else:
            buffers["momentum"] = gradient.clone(memory_format=torch.contiguous_format)
        held = buffers["momentum"]
        return gradient + mu * held if self.nesterov else held


def coherence(buffers: Mapping[str, Tensor]) -> Tensor | None:
    """How much recent gradients agree: ``‖Σ wᵢ gᵢ‖ / √(Σ wᵢ · Σ wᵢ‖gᵢ‖²)``, a scalar in [0, 1].

    It is 1 if they are all the same and about ``√((1-μ)/(1+μ))`` if they are noise, whatever their scale.
    ``None`` without momentum, which is the memory that it needs.
    """
    if "momentum" not in buffers or "coherence" not in buffers:
        return None
    weight, squares = buffers["coherence"].unbind()
    most = (weight * squares).sqrt()
    ratio = buffers["momentum"].norm() / most.clamp(min=torch.finfo(most.dtype).tiny)
    # Squares that overflow, here or above, say nothing.
    return torch.where(torch.isfinite(ratio), ratio, torch.ones_like(ratio)).clamp(max=1)
