"""How the parameters of a model are sharded over ranks, and what cannot be done with that."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from kronfac.distributed.comm.process_group import ProcessGroup
from kronfac.layers.shards import axes_of, box_of, data_ranks, is_dtensor, is_whole, root_mesh
from kronfac.placement.scheme import Distribute


@dataclass(frozen=True)
class Sharding:
    """Ranks that hold the shards of a model.

    Args:
        replicas: how many groups of ranks hold all shards.
        observers: how many ranks see the same samples: those of tensor parallelism.
    """

    replicas: int
    observers: int = 1

    def part_weight(self, world: ProcessGroup, parameter: nn.Parameter) -> float:
        """One over the number of ranks that hold the same part of a parameter as this one."""
        boxes = [box_of(parameter, rank) for rank in world.global_ranks]
        return 1 / boxes.count(boxes[world.rank])


def sharding_of(
    world: ProcessGroup,
    model: nn.Module,
    parameters: Mapping[nn.Parameter, str],
    settings: Distribute,
) -> Sharding | None:
    """How a model's parameters, given with names, are sharded; ``None`` if all of them are whole."""
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
    root, axes = root_mesh(next(iter(sharded))), set().union(*map(_sharded_axes, sharded))
    replicas = math.prod(root.size(axis) for axis in range(min(axes)))
    data = data_ranks(model) or root.size() // math.prod(root.size(axis) for axis in axes)
    return Sharding(replicas, world.size // data)


def _sharded_axes(parameter: nn.Parameter) -> set[int]:
    """The axes of the root mesh over which a parameter is sharded."""
    placed = zip(axes_of(parameter) or [], parameter.placements, strict=True)  # type: ignore[attr-defined]
    return {axis for axis, placement in placed if not placement.is_replicate()}


def _some(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown}, ..." if len(ranks) > 8 else shown
