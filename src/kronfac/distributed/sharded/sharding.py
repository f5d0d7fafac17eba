"""How the parameters of a model are sharded over ranks, and what cannot be done with that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from kronfac.distributed.comm.process_group import ProcessGroup
from kronfac.layers.shards import (
    batch_parts,
    box_of,
    is_dtensor,
    is_fully_sharded,
    is_whole,
    mesh_copies,
    part_of,
)
from kronfac.placement.grid import divisors
from kronfac.placement.scheme import Distribute


@dataclass(frozen=True)
class Sharding:
    """Ranks that hold the shards of a model.

    Args:
        replicas: how many groups of ranks hold all shards.
        parts: by rank, which part of a batch it sees; the ranks of tensor parallelism see the same.
    """

    replicas: int
    parts: tuple[int, ...]

    @property
    def observers(self) -> int:
        """How many ranks see the same samples."""
        return len(self.parts) // len(set(self.parts))

    def is_first(self, rank: int) -> bool:
        """Whether a rank is the first of those that see the same samples."""
        return self.parts.index(self.parts[rank]) == rank

    def before(self, rank: int) -> list[int]:
        """Ranks whose samples come before those of a rank, one of each that see the same."""
        first: dict[int, int] = {}
        for one, part in enumerate(self.parts):
            first.setdefault(part, one)
        return [one for part, one in first.items() if part < self.parts[rank]]

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
    placed = {p: name for p, name in parameters.items() if is_dtensor(p)}
    sharded = {p: name for p, name in placed.items() if not is_whole(p)}
    if not sharded:
        return None
    ranks, fully = world.global_ranks, is_fully_sharded(model)
    for parameter in _unlike(sharded):
        _check_ranks(ranks, _reached(ranks, [parameter]), sharded[parameter])
    if fully:  # copies of a mesh that no other mesh connects are other stages of a model
        own = _reached([ranks[world.rank]], _unlike(placed))
        _check_ranks(ranks, own, next(iter(sharded.values())))
    if settings.scheme not in ("auto", "mem-opt"):
        raise ValueError(
            f"distribute={str(settings.scheme)!r} is for whole parameters; those of this model are "
            "sharded, which decides who works on what: leave distribute='auto'."
        )
    held = [[part_of(p, rank) for rank in ranks] for p in _unlike(sharded)]
    parts = batch_parts(model, ranks) if fully else _times(list(zip(*held, strict=True)))
    return Sharding(_replicas(held), tuple(parts))


def _times(values: Sequence[Hashable]) -> list[int]:
    """How often each value has come before: as many ranks as hold other parts see the same samples."""
    seen = Counter[Hashable]()
    found = []
    for value in values:
        found.append(seen[value])
        seen[value] += 1
    return found


def _unlike(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """One of each kind of parameters that are placed alike."""
    kinds: dict[Hashable, nn.Parameter] = {}
    for p in parameters:
        kinds.setdefault((p.device_mesh, tuple(p.placements)), p)  # type: ignore[attr-defined]
    return list(kinds.values())


def _reached(some: Iterable[int], parameters: Iterable[nn.Parameter]) -> list[int]:
    """The ranks that hold parameters together with some ranks, or with others that do."""
    meshes = {tuple(copy) for p in parameters for copy in mesh_copies(p).flatten(1).tolist()}
    found, before = set(some) & {rank for mesh in meshes for rank in mesh}, set[int]()
    while found != before:
        before = set(found)
        found = found.union(*(mesh for mesh in meshes if not found.isdisjoint(mesh)))
    return sorted(found)


def _check_ranks(ranks: Sequence[int], found: Sequence[int], name: str) -> None:
    """Raise unless the optimizer's ranks are those that hold its parameters."""
    if set(found) != set(ranks):
        raise ValueError(
            f"parameter {name!r} is sharded over a mesh of ranks {_some(found)}, but the "
            f"optimizer has ranks {_some(ranks)}: give it those of the mesh by process_group=... (of "
            "each pipeline stage its own)."
        )


def _replicas(parts: Sequence[Sequence[Hashable]]) -> int:
    """How many stretches of ranks hold everything, given the parts of parameters that each rank holds."""
    size = len(parts[0])
    for count in reversed(divisors(size)):
        step = size // count
        rows = [[Counter(own[at : at + step]) for at in range(0, size, step)] for own in parts]
        if all(row == own[0] for own in rows for row in own):
            return count
    return 1


def _some(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown}, ..." if len(ranks) > 8 else shown
