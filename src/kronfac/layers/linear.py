"""nn.Linear on inputs of any rank: ``[N, *shared, d]``."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from kronfac.layers.layer import Layer
from kronfac.layers.rows import DenseRows, Rows


class LinearLayer(Layer):
    """The weight is ``[d_out, d_in]`` and already the matrix."""

    module: nn.Linear

    def inputs(self, args: tuple[Any, ...]) -> Rows:
        """See :meth:`Layer.inputs`."""
        return DenseRows(self._rows(args[0]), ones=self.bias_trains)

    def outputs(self, grad: Tensor) -> Rows:
        """See :meth:`Layer.outputs`."""
        return DenseRows(self._rows(grad))

    def _rows(self, x: Tensor) -> Tensor:
        x = x.detach().to(self.factor_dtype)
        samples = x.shape[0] if x.dim() > 1 else 1
        return x.reshape(samples, math.prod(x.shape[1:-1]), x.shape[-1])

    def _weight_shape(self) -> tuple[int, ...]:
        return tuple(self.weight.shape)

    def _to_matrix(self, grad: Tensor) -> Tensor:
        return grad

    def _write_weight(self, grad: Tensor, matrix: Tensor) -> None:
        grad.copy_(matrix)
