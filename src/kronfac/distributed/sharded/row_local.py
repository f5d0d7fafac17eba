"""Which layers all ranks work on, each on the slice that it holds, so that no gradient travels.

All ranks then hold the solution of such a layer, where otherwise one does. Those that save most for what
they hold come first, and all of them together hold no more than a rank's parameters and gradients take.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from kronfac.layers.shards import box_of, is_dtensor
from kronfac.layers.slices import Slice
from kronfac.options.config import Rule
from kronfac.state.layer_state import LayerState

#: Rules that need nothing of other slices but norms of the whole. Orthogonal steps need all of it.
_BY_SLICES: frozenset[Rule] = frozenset(["solved", "graft", "unit"])
#: Elements of solutions that a rank may hold of such layers in any case: a gigabyte in single precision.
FREE_ELEMENTS = 2**28


def local_slices(
    new: Iterable[LayerState], states: Sequence[LayerState], rank: int, ranks: int
) -> dict[LayerState, Slice]:
    """The new ones of all layers that are worked on by slices, and those that a global rank holds.

    Each of ``ranks`` has a part. A parameter that several layers share is not worked on by slices.
    """
    uses = Counter(p for state in states for p in state.layer.parameters)
    found: dict[LayerState, Slice] = {}
    for state in new:
        piece = local_slice(state, rank, ranks)
        if piece is not None and all(uses[p] == 1 for p in state.layer.parameters):
            found[state] = piece
    room = budget(sum(p.numel() for p in uses), ranks)
    room -= sum(_held(state) for state in states if state.view.slice is not None)
    chosen = set()
    for state in sorted(found, key=lambda s: -math.prod(s.layer.matrix_shape) / _held(s)):
        if _held(state) <= room:
            room -= _held(state)
            chosen.add(state)
    return {state: piece for state, piece in found.items() if state in chosen}


def budget(parameters: int, ranks: int) -> int:
    """Elements of solutions that a rank may hold of layers that are worked on by slices."""
    return max(2 * parameters // ranks, FREE_ELEMENTS)


def _held(state: LayerState) -> int:
    """Elements of a layer's solution."""
    return sum(math.prod(n or 0 for n in shape) for shape in state.block.solution_shapes.values())


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
