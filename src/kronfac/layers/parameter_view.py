"""How a layer's gradient becomes a matrix, and how the result goes back.

A layer is mathematics: it knows the shape of its matrix and where weight and bias are in it. A view is
storage: it knows which tensors hold them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from kronfac.layers.shards import local, whole

if TYPE_CHECKING:
    from kronfac.layers.layer import Layer
    from kronfac.layers.slices import Slice


class ParameterView:
    """The gradients of a layer's parameters that are whole on this rank."""

    #: Which part of the matrix is here and is worked on here, if it is not all of it.
    slice: Slice | None = None

    def __init__(self, layer: Layer) -> None:
        self.layer = layer

    @property
    def has_gradient(self) -> bool:
        """Whether there is a gradient to work on at this step."""
        grad = self.layer.weight.grad
        return self.layer.is_trained and grad is not None and not grad.is_sparse

    def grad_of(self, parameter: nn.Parameter) -> Tensor | None:
        """The whole gradient of one of the layer's parameters, to be read and overwritten."""
        return None if parameter.grad is None else local(parameter.grad)

    def value_of(self, parameter: nn.Parameter) -> Tensor:
        """All of one of the layer's parameters; do not write to it."""
        return local(parameter.detach())

    @property
    def weight_grad(self) -> Tensor:
        """The whole gradient of the weight."""
        grad = self.grad_of(self.layer.weight)
        assert grad is not None
        return grad

    @property
    def bias_grad(self) -> Tensor | None:
        """The whole gradient of the bias; ``None`` if it does not train, or has none."""
        bias = self.layer.bias
        return None if bias is None or not self.layer.bias_trains else self.grad_of(bias)

    @property
    def bias_shape(self) -> tuple[int, ...]:
        """Shape of the gradient of the bias."""
        assert self.layer.bias is not None
        return tuple(self.layer.bias.shape)

    def bias_column(self) -> Tensor:
        """The gradient of the bias that is the layer's own, or zeros; the bias trains."""
        layer, grad = self.layer, self.bias_grad
        assert layer.bias is not None
        if grad is None:
            grad = self.weight_grad.new_zeros(self.bias_shape, dtype=layer.bias.dtype)
        return layer._own_bias(grad.detach())

    def gradient(self) -> Tensor:
        """Return the gradient matrix ``V`` in factor precision; it may be a view: do not write to it."""
        layer = self.layer
        matrix = layer._to_matrix(self.weight_grad.detach()).to(layer.factor_dtype)
        if layer.bias is None or not layer.bias_trains:
            return matrix
        column = self.bias_column().reshape(*matrix.shape[:-1], 1)
        return torch.cat([matrix, column.to(matrix.dtype)], dim=-1)

    def weight(self) -> Tensor:
        """Return the parameters as a matrix shaped as ``V``, in factor precision; do not write to it."""
        layer, bias = self.layer, self.layer.bias
        matrix = layer._to_matrix(self.value_of(layer.weight)).to(layer.factor_dtype)
        if bias is None or not layer.bias_trains:
            return matrix
        column = layer._own_bias(self.value_of(bias)).reshape(*matrix.shape[:-1], 1)
        return torch.cat([matrix, column.to(matrix.dtype)], dim=-1)

    def places(self, matrix: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Where the parts of a matrix shaped as ``V`` belong: views of gradients, and their values."""
        layer, found = self.layer, []
        if layer.bias is not None and layer.bias_trains:
            if (grad := self.bias_grad) is not None:
                target = layer._own_bias(grad)
                found.append((target, matrix[..., -1].reshape(target.shape)))
            matrix = matrix[..., :-1]
        found.append(layer._weight_place(self.weight_grad, matrix))
        return found

    def shape_here(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of what is here of a tensor that belongs to the layer; of ``V`` it may be a part."""
        return shape

    def to_save(self, value: Tensor) -> Tensor:
        """What belongs to the layer as it is saved: in the same memory, with the shape of the whole."""
        return value

    def from_saved(self, value: Tensor) -> Tensor:
        """Undo :meth:`to_save`, whoever has saved it; all ranks do so together."""
        found: Tensor = whole(value)
        return found

    def write(self, matrix: Tensor) -> None:
        """Overwrite the parameters' gradients in place with a matrix shaped as ``V``."""
        with torch.no_grad():
            for target, value in self.places(matrix):
                target.copy_(value)


class ShardedView(ParameterView):
    """The gradients of parameters of which each rank has a part.

    Whole ones exist during a step, on the rank that works on the layer: others send their parts there
    beforehand, and are sent what has become of them (:mod:`kronfac.distributed.shard_exchange`).
    """

    def __init__(
        self,
        layer: Layer,
        gradients: Mapping[nn.Parameter, Tensor],
        values: Mapping[nn.Parameter, Tensor],
    ) -> None:
        super().__init__(layer)
        self._gradients = gradients
        self._values = values

    def grad_of(self, parameter: nn.Parameter) -> Tensor | None:
        """See :meth:`ParameterView.grad_of`."""
        return self._gradients.get(parameter)

    def value_of(self, parameter: nn.Parameter) -> Tensor:
        """See :meth:`ParameterView.value_of`."""
        return self._values[parameter]
