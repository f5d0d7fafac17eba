"""How a layer's gradient becomes a matrix, and how the result goes back.

A layer is mathematics: it knows the shape of its matrix and where weight and bias are in it. A view is
storage: it knows which tensors hold them. This one is for parameters that are whole on this rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kronfac.layers.layer import Layer


class ParameterView:
    """The gradients of a layer's whole parameters."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer

    @property
    def has_gradient(self) -> bool:
        """Whether there is a gradient to work on at this step."""
        weight = self.layer.weight
        return weight.requires_grad and weight.grad is not None and not weight.grad.is_sparse

    def gradient(self) -> Tensor:
        """Return the gradient matrix ``V`` in factor precision; it may be a view: do not write to it."""
        layer, grad = self.layer, self.layer.weight.grad
        assert grad is not None
        matrix = layer._to_matrix(grad.detach()).to(layer.factor_dtype)
        bias = layer.bias
        if bias is None or not layer.bias_trains:
            return matrix
        column = bias.grad if bias.grad is not None else torch.zeros_like(bias)
        column = layer._own_bias(column.detach()).reshape(*matrix.shape[:-1], 1)
        return torch.cat([matrix, column.to(matrix.dtype)], dim=-1)

    def weight(self) -> Tensor:
        """Return the parameters as a matrix shaped as ``V``, in factor precision; do not write to it."""
        layer, bias = self.layer, self.layer.bias
        matrix = layer._to_matrix(layer.weight.detach()).to(layer.factor_dtype)
        if bias is None or not layer.bias_trains:
            return matrix
        column = layer._own_bias(bias.detach()).reshape(*matrix.shape[:-1], 1)
        return torch.cat([matrix, column.to(matrix.dtype)], dim=-1)

    def places(self, matrix: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Where the parts of a matrix shaped as ``V`` belong: views of gradients, and their values."""
        layer, grad, bias = self.layer, self.layer.weight.grad, self.layer.bias
        assert grad is not None
        found = []
        if bias is not None and layer.bias_trains:
            if bias.grad is not None:
                target = layer._own_bias(bias.grad)
                found.append((target, matrix[..., -1].reshape(target.shape)))
            matrix = matrix[..., :-1]
        found.append(layer._weight_place(grad, matrix))
        return found

    def write(self, matrix: Tensor) -> None:
        """Overwrite the parameters' gradients in place with a matrix shaped as ``V``."""
        with torch.no_grad():
            for target, value in self.places(matrix):
                target.copy_(value)
