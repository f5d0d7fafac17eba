"""Rows or columns of a layer's matrix that are worked on where they are, without the others.

Where the curvature does not mix the rows of a weight (an embedding's tokens, the outputs of a layer whose
``G`` is diagonal or the identity), a rank can precondition its shard as it is.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from kronfac.layers.parameter_view import ParameterView
from kronfac.layers.shards import is_dtensor, local, whole

if TYPE_CHECKING:
    from kronfac.layers.layer import Layer


@dataclass(frozen=True)
class Slice:
    """Some rows or columns of a layer's matrix ``[d_out, d_in]``.

    Args:
        dim: ``-2`` for rows, ``-1`` for columns.
        start: the first of them.
        stop: the one after the last.
        of: how many there are in all.
        weight: one over the number of ranks that hold the same slice, among those that hold all of them.
    """

    dim: int
    start: int
    stop: int
    of: int
    weight: float = 1.0

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the slice of a tensor."""
        sizes = list(whole)
        sizes[self.dim] = self.stop - self.start
        return tuple(sizes)

    def whole_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Undo :meth:`shape`."""
        sizes = list(shape)
        sizes[self.dim] = self.of
        return tuple(sizes)

    def cut(self, tensor: Tensor) -> Tensor:
        """The slice of a matrix, as a view."""
        return tensor.narrow(self.dim, self.start, self.stop - self.start)

    def entries(self, tensor: Tensor) -> Tensor:
        """Of a tensor with a number for each row or column, those of the slice, as a view."""
        return tensor[..., self.start : self.stop]


class SlicedView(ParameterView):
    """The slice of a layer's gradients that this rank holds."""

    def __init__(self, layer: Layer, piece: Slice) -> None:
        super().__init__(layer)
        self.slice = piece

    @property
    def bias_shape(self) -> tuple[int, ...]:
        """See :attr:`ParameterView.bias_shape`."""
        assert self.layer.bias is not None
        return tuple(local(self.layer.bias).shape)

    def shape_here(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See :meth:`ParameterView.shape_here`."""
        assert self.slice is not None
        return self.slice.shape(shape) if shape == self.layer.matrix_shape else shape

    def to_save(self, value: Tensor) -> Tensor:
        """See :meth:`ParameterView.to_save`: a ``DTensor``, which loaders cut for any number of ranks."""
        whole_shape = self.layer.matrix_shape
        if self.slice is None or tuple(value.shape) != self.slice.shape(whole_shape):
            return value
        mesh, placements = self._placed()
        kind = sys.modules["torch.distributed.tensor"].DTensor
        stride = (whole_shape[-1], 1)
        found: Tensor = kind.from_local(
            value, mesh, placements, run_check=False, shape=whole_shape, stride=stride
        )
        return found

    def from_saved(self, value: Tensor) -> Tensor:
        """See :meth:`ParameterView.from_saved`."""
        if is_dtensor(value):
            placed = value.device_mesh, list(value.placements)  # type: ignore[attr-defined]
            if placed == self._placed():
                return local(value)
            value = whole(value)
        assert self.slice is not None
        return self.slice.cut(value) if value.shape == self.layer.matrix_shape else value

    def _placed(self) -> tuple[Any, list[Any]]:
        """How the matrix is placed: as the weight is, in its own dimension."""
        assert self.slice is not None
        weight: Any = self.layer.weight
        made = sys.modules["torch.distributed.tensor"]
        dim = self.slice.dim + 2
        return weight.device_mesh, [
            one if one.is_replicate() else made.Shard(dim) for one in weight.placements
        ]
