"""Linear layers on inputs of any rank, ``[N, *shared, d]``."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

from torch import Tensor

from kronfac.layers.layer import Layer
from kronfac.layers.rows import DenseRows, Rows


class LinearLayer(Layer):
    """``y = x Wᵀ + b``: the weight is ``[d_out, d_in]`` and already the matrix."""

    def inputs(self, args: tuple[Any, ...]) -> Rows:
        """See :meth:`Layer.inputs`."""
        return DenseRows(self.rows(args[0]), ones=self.bias_trains)

    def outputs(self, grad: Tensor, args: tuple[Any, ...] = ()) -> Rows:
        """See :meth:`Layer.outputs`."""
        return DenseRows(self.rows(grad))

    @property
    def has_units(self) -> bool:
        """See :attr:`Layer.has_units`; subclasses may make other rows."""
        own = type(self)
        return own.inputs is LinearLayer.inputs and own.rows is LinearLayer.rows

    @property
    def input_form(self) -> Hashable:
        """See :attr:`Layer.input_form`."""
        if not self.has_units:
            return None
        return LinearLayer, self.bias_trains, self.factor_dtype

    def rows(self, x: Tensor) -> Tensor:
        """``[N, *shared, d] -> [N, S, d]``; a single vector is one sample."""
        x = x.detach().to(self.factor_dtype)
        samples = x.shape[0] if x.dim() > 1 else 1
        return x.reshape(samples, math.prod(x.shape[1:-1]), x.shape[-1])

    def matrix_dim(self, dim: int) -> int | None:
        """See :meth:`Layer.matrix_dim`; subclasses may make another matrix of their weight."""
        return dim - 2 if type(self)._to_matrix is LinearLayer._to_matrix else None

    def _weight_shape(self) -> tuple[int, ...]:
        return tuple(self.weight.shape)

    def _to_matrix(self, grad: Tensor) -> Tensor:
        return grad


class TransposedLinearLayer(LinearLayer):
    """``y = x W + b``: the weight is ``[d_in, d_out]``, as in the ``Conv1D`` of GPT-2."""

    def matrix_dim(self, dim: int) -> int | None:
        """See :meth:`Layer.matrix_dim`."""
        return -1 - dim if type(self)._to_matrix is TransposedLinearLayer._to_matrix else None

    def _weight_shape(self) -> tuple[int, ...]:
        d_in, d_out = self.weight.shape
        return d_out, d_in

    def _to_matrix(self, grad: Tensor) -> Tensor:
        return grad.T
