"""A layer's work in numbers, from what its block says of itself."""

from __future__ import annotations

from kronfac.distributed.comm.symmetric import packed_elements
from kronfac.linalg.orthogonal import orthogonal_flops
from kronfac.placement.costs import LayerUnit, PartUnit, StatisticUnit
from kronfac.state.layer_state import LayerState


def unit_of(name: str, state: LayerState, triangles: bool, tied_to: str) -> LayerUnit:
    """A layer's work in numbers."""
    block, itemsize = state.block, state.layer.factor_dtype.itemsize
    statistics = [
        StatisticUnit(
            f"{name}/{key}",
            packed_elements(one.shape, one.symmetric and triangles),
            itemsize,
        )
        for key, one in block.statistics.items()
    ]
    parts = []
    for part, described in block.parts.items():
        elements = 0
        for key in described.solution:
            shape = tuple(n or 0 for n in block.solution_shapes[key])
            elements += packed_elements(shape, key in block.symmetric_solutions and triangles)
        keys = tuple(f"{name}/{key}" for key in described.statistics)
        parts.append(PartUnit(part, keys, described.flops, elements, described.shared_flops))
    shape = state.layer.matrix_shape
    further = orthogonal_flops(*shape) if state.rule == "orthogonal" else 0
    return LayerUnit(
        name,
        tuple(statistics),
        tuple(parts),
        block.cost.precondition_flops + further,
        packed_elements(shape, False),
        itemsize,
        tied_to,
    )
