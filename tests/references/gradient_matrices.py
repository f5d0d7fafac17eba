"""Gradients of layers as matrices, one for each group of a convolution, with the bias as last column."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def matrix_layers(model: nn.Module) -> list[Any]:
    """The linear layers and convolutions of a model."""
    return [one for one in model.modules() if isinstance(one, nn.Linear | nn.Conv2d)]


def matrices(layer: Any) -> list[Tensor]:
    """The gradient ``[d_out, d_in]`` of each group."""
    matrix = layer.weight.grad.flatten(1)
    if layer.bias is not None:
        matrix = torch.cat([matrix, layer.bias.grad[:, None]], 1)
    return list(matrix.chunk(getattr(layer, "groups", 1)))


def step(layer: Any, steps: list[Tensor], rate: float) -> None:
    """Subtract the steps of all groups."""
    whole = torch.cat(steps)
    with torch.no_grad():
        if layer.bias is not None:
            layer.bias -= rate * whole[:, -1]
            whole = whole[:, :-1]
        layer.weight -= rate * whole.reshape(layer.weight.shape)
