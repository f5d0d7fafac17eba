"""Which layers all ranks work on, each on the slice that it holds, so that no gradient travels."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kronfac.layers.shards import box_of, is_dtensor
from kronfac.layers.slices import Slice
from kronfac.options.config import Rule
from kronfac.state.layer_state import LayerState

#: Rules that need nothing of other slices but norms of the whole. Orthogonal steps need all of it.
_BY_SLICES: frozenset[Rule] = frozenset(["solved", "graft", "unit"])


def local_slice(state: LayerState, rank: int, ranks: int) -> Slice | None:
    """The part of a layer's matrix that a global rank holds and can work on alone; ``None`` if it cannot.

    ``ranks`` hold all parts together. Whether it can is decided by shapes, placements and options, and so
    alike on all of them.
    """
    layer, weight = state.layer, state.layer.weight
    dim = _sharded_dim(weight)
    axis = None if dim is None else layer.matrix_dim(dim)
    if dim is None or axis is None or not _works_by_slices(state, axis):
        return None
    if layer.bias is not None and (axis == -1 or not _placed_alike(layer.bias, weight)):
        return None  # its gradient, a column of the matrix, is cut in another way
    here, holders = box_of(weight, rank)[dim], ranks / _parts(weight)
    return Slice(axis, here.start, here.stop, weight.shape[dim], 1 / holders)


def _works_by_slices(state: LayerState, axis: int) -> bool:
    """Whether rows (-2) or columns (-1) of a layer's step need nothing of others but norms."""
    block = state.block
    if block.cuts(axis) is None or any(one.is_replicated for one in block.statistics.values()):
        return False
    if any(part.after or part.by_each for part in block.parts.values()):
        return False
    lengths = state.rule in _BY_SLICES or (state.rule == "columns" and axis == -1)
    return lengths and all(one.takes_slices for one in state.transforms)


def _sharded_dim(tensor: Tensor) -> int | None:
    """The only dimension that a tensor is cut in, if it is cut in plain chunks."""
    placements = _placements(tensor)
    dims = {one.dim for one in placements if type(one).__name__ == "Shard"}
    others = [one for one in placements if type(one).__name__ not in ("Shard", "Replicate")]
    return dims.pop() if len(dims) == 1 and not others and _parts(tensor) > 1 else None


def _parts(tensor: Tensor) -> int:
    """How many parts a tensor is cut in, empty ones included."""
    count = 1
    for axis, one in enumerate(_placements(tensor)):
        count *= 1 if one.is_replicate() else tensor.device_mesh.size(axis)  # type: ignore[attr-defined]
    return count


def _placements(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.placements) if is_dtensor(tensor) else ()  # type: ignore[attr-defined]


def _placed_alike(bias: Tensor, weight: Tensor) -> bool:
    """Whether chunks of a bias belong to the same rows of the matrix as those of the weight."""
    cut = [not one.is_replicate() for one in _placements(weight)]
    same = [not one.is_replicate() for one in _placements(bias)]
    return (
        cut == same and _sharded_dim(bias) == 0 and bias.device_mesh == weight.device_mesh  # type: ignore[attr-defined]
    )
