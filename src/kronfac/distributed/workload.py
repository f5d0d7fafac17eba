"""A layer's work in numbers, from what its block says of itself."""

from __future__ import annotations

from dataclasses import dataclass

from kronfac.distributed.comm.symmetric import packed_elements
from kronfac.linalg.orthogonal import orthogonal_flops
from kronfac.placement.costs import LayerUnit, PartUnit, StatisticUnit
from kronfac.protocol.statistic import Cadence
from kronfac.state.layer_state import LayerState


@dataclass(frozen=True)
class Intervals:
    """Steps from one refresh to the next, and from one update of the statistics to the next."""

    refresh: int
    factor: int

    def times(self, cadence: Cadence) -> float:
        """How often something is done in one refresh interval."""
        every = {"refresh": self.refresh, "factor": self.factor, "step": 1}[cadence]
        return max(1.0, self.refresh / every)


def unit_of(
    name: str,
    state: LayerState,
    triangles: bool,
    tied_to: str,
    intervals: Intervals,
    sliced: bool = False,
) -> LayerUnit:
    """A layer's work in numbers; ``sliced`` if all ranks work on it, each on a slice."""
    block, itemsize = state.block, state.layer.factor_dtype.itemsize
    times = dict.fromkeys(block.statistics, 1.0)
    for described in block.shared_parts.values():
        for key in described.statistics:
            times[key] = max(times[key], intervals.times(described.every))
    statistics = [
        StatisticUnit(
            f"{name}/{key}",
            packed_elements(one.shape, one.symmetric and triangles),
            itemsize,
            0.0 if one.is_replicated else times[key],
        )
        for key, one in block.statistics.items()
    ]
    parts = []
    for part, described in block.shared_parts.items():
        elements = 0
        for key in described.solution:
            shape = tuple(n or 0 for n in block.solution_shapes[key])
            elements += packed_elements(shape, key in block.symmetric_solutions and triangles)
        keys = tuple(f"{name}/{key}" for key in described.statistics)
        # What others observe through, or work with, goes to all of them as a whole.
        by_each = bool(described.after) or described.by_each
        to_all = sliced or not block.seen_through.isdisjoint(described.solution)
        divisible = not by_each and not to_all
        parts.append(
            PartUnit(
                part,
                keys,
                described.flops,
                elements,
                described.shared_flops if divisible else None,
                intervals.times(described.every),
                by_each,
            )
        )
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
        sliced=sliced,
    )
