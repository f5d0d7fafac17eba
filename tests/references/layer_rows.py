"""What slow references look at: rows and gradients of each layer, in float64 and by autograd alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tests import oracles

#: From a model's outputs to the loss of each sample.
Losses = Callable[[Tensor], Tensor]


@dataclass
class Seen:
    """One layer on one batch: inputs `a [*b, N, S, d_in]`, gradients of each sample's own loss
    `g [*b, N, S, d_out]`, and the gradient of the mean loss, `V [*b, d_out, d_in]`."""

    a: Tensor
    g: Tensor
    V: Tensor


def look(model: nn.Module, x: Tensor, losses: Losses) -> dict[nn.Module, Seen]:
    """All linear layers and convolutions of a model, by module."""
    found = {}
    for layer in model.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            outputs, (call,) = oracles.run_layer(model, layer, x)
            (g,) = torch.autograd.grad(losses(outputs).sum(), call.z)
            a, g = oracles.layer_rows(layer, call.x, g)
            found[layer] = Seen(a, g, oracles.gradient_from_rows(a, g) / len(x))
    return found


def descend(layer: nn.Module, step: Tensor, lr: float) -> None:
    """Take a step `[*b, d_out, d_in]` of plain SGD."""
    with torch.no_grad():
        if layer.bias is not None:
            layer.bias -= lr * step[..., -1].reshape(layer.bias.shape)
            step = step[..., :-1]
        layer.weight -= lr * step.reshape(layer.weight.shape)


def each(*tensors: Tensor, dims: int = 2) -> list[tuple[Tensor, ...]]:
    """The groups of grouped tensors one by one; `dims` are those of the last of them in a group."""
    if tensors[-1].dim() == dims:
        return [tensors]
    return list(zip(*tensors, strict=True))
