"""Sums over the positions of a norm's calls in few kernels, from what autograd keeps of them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kronfac.layers.saved_tensors import saves_elsewhere
from kronfac.linalg.precision import full_precision


def products_and_sums(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """``Σ g·x`` and ``Σ g`` over positions, ``[N, C, S] -> [N, C]`` each, in one kernel.

    They are the gradients of a batch norm's weight and bias, if each channel of each sample is a
    channel of its own, with mean zero and variance one. Rounding is that of the products: what is lost
    where means are large is lost by rounding ``x`` itself.
    """
    shape, size = x.shape[:2], x.shape[0] * x.shape[1]
    zeros, ones = _zeros_and_ones(1 << (size - 1).bit_length(), x.dtype, x.device)
    zeros, ones = zeros[:size], ones[:size]
    channels = grad.reshape(1, size, -1), x.reshape(1, size, -1)
    statistics = ones, None, None, zeros, ones
    found = torch.ops.aten.native_batch_norm_backward(
        *channels, *statistics, True, 0.0, [False, True, True]
    )
    return found[1].view(shape), found[2].view(shape)


@full_precision
def normalised_sums(
    grad: Tensor, x: Tensor, mean: Tensor, scale: Tensor, with_gradients: bool
) -> tuple[Tensor, Tensor | None]:
    """``Σ g·x̂`` and ``Σ g`` over positions, ``[N, S, C] -> [N, C]``, without the map ``x̂``.

    ``mean`` and ``scale`` are those of each position, ``[N, S, 1]``:
    ``Σ g·x̂ = Σ scale·(g·x) - Σ (mean·scale)·g``, where sums with weights are products.
    """
    weights = (mean * scale).mT
    if with_gradients:
        _, ones = _zeros_and_ones(1, x.dtype, x.device)
        weights = torch.cat([weights, ones.expand_as(weights)], dim=1)
    sums = weights @ grad  # [N, 1 or 2, C]
    products = torch.baddbmm(sums[:, :1], scale.mT, grad * x, beta=-1)
    return products[:, 0], sums[:, 1] if with_gradients else None


@lru_cache(maxsize=16)
def _zeros_and_ones(size: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.zeros(size, dtype=dtype, device=device), torch.ones(
        size, dtype=dtype, device=device
    )


#: Nodes of norms that keep their input with mean and scale.
_NORMS = ("NativeLayerNormBackward0", "NativeGroupNormBackward0")
_BATCH_NORMS = tuple(f"{kind}BatchNormBackward0" for kind in ("Native", "Cudnn", "Miopen"))


def saved_by_norm(product: Tensor) -> tuple[Tensor, ...] | None:
    """What autograd keeps of a norm's call: its input, mean and scale, ``x̂ = (x - mean)·scale``.

    It is there until backward and nothing may be written to it. ``None`` where the output comes from
    something else, or what is kept is packed (checkpointing, offloading).
    """
    node: Any = product.grad_fn
    if node is None or saves_elsewhere():
        return None
    name = node.name()
    if name not in _NORMS and not (
        name in _BATCH_NORMS and getattr(node, "_saved_training", False)
    ):
        return None
    found = node._saved_input, node._saved_result1, node._saved_result2
    return tuple(one.detach() for one in found)
