"""How the parameters of a model are sharded over ranks, and what cannot be done with that."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from kronfac.distributed.comm.process_group import ProcessGroup
from kronfac.layers.shards import axes_of, box_of, is_dtensor, is_whole, root_mesh
from kronfac.placement.scheme import Distribute


@dataclass(frozen=True)
class Sharding:
    """Ranks that hold the shards of a model, in ``replicas`` groups that hold all of them."""

    replicas: int

    def part_weight(self, world: ProcessGroup, parameter: nn.Parameter) -> float:
        """One over the number of ranks that hold the same part of a parameter as this one."""
        boxes = [box_of(parameter, rank) for rank in world.global_ranks]
        return 1 / boxes.count(boxes[world.rank])


def sharding_of(
    world: ProcessGroup, parameters: Mapping[nn.Parameter, str], settings: Distribute
) -> Sharding | None:
    """How parameters, given with their names, are sharded; ``None`` if all of them are whole."""
    sharded = {p: name for p, name in parameters.items() if is_dtensor(p) and not is_whole(p)}
    for parameter, name in sharded.items():
        ranks = root_mesh(parameter).mesh.flatten().tolist()
        if ranks != list(world.global_ranks):
            raise ValueError(
                f"parameter {name!r} is sharded over a mesh of ranks {_some(ranks)}, but the optimizer "
                f"has ranks {_some(world.global_ranks)}: give it those of the mesh, in this order, by "
                "process_group=... (of each pipeline stage its own)."
            )
    if not sharded:
        return None
    if settings.scheme not in ("auto", "mem-opt"):
        raise ValueError(
            f"distribute={str(settings.scheme)!r} is for whole parameters; those of this model are "
            "sharded, which decides who works on what: leave distribute='auto'."
        )
    return Sharding(_replicas(list(sharded)))


def _replicas(sharded: list[nn.Parameter]) -> int:
    """How many ranks there are along the leading axes of the mesh over which nothing is sharded."""
    root = root_mesh(sharded[0])
    cut = root.ndim
    for parameter in sharded:
        axes = axes_of(parameter) or []
        for axis, placement in zip(axes, parameter.placements, strict=True):  # type: ignore[attr-defined]
            if not placement.is_replicate():
                cut = min(cut, axis)
    return math.prod(root.size(axis) for axis in range(cut))


def _some(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown}, ..." if len(ranks) > 8 else shown
