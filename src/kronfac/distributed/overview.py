"""What the summary says of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kronfac.distributed.coordinator import Distributed
from kronfac.distributed.parameter_owners import Ownership
from kronfac.state.layer_state import LayerState

#: Ranks that divide one part are counted where their names would take more characters.
_LONGEST = 7


@dataclass(frozen=True)
class Overview:
    """Several ranks, seen from one of them.

    Args:
        line: who they are and how they share out the work.
        owners: by layer, who solves it.
        message_bytes: memory that is kept for messages on this rank, at most.
    """

    line: str
    owners: Mapping[LayerState, str]
    message_bytes: int


def overview(
    coordinator: Distributed, ownership: Ownership, states: Sequence[LayerState]
) -> Overview:
    """Look at a team."""
    sizes = [_statistics(coordinator, state) for state in states if not coordinator.is_local]
    if coordinator.spreads:
        sizes += [_gradient(coordinator, state) for state in states]
    return Overview(
        line=_line(coordinator),
        owners={state: owners(coordinator, state) for state in states},
        message_bytes=sum(sizes) + ownership.message_bytes,
    )


def _line(coordinator: Distributed) -> str:
    placement = coordinator.placement
    assert placement is not None
    workers, size = placement.grid.workers, placement.grid.size
    chosen = "auto, " if coordinator.settings.scheme == "auto" else ""
    work = "works" if workers == 1 else "work"
    who = f"{workers} of {size} ranks {work} on each layer"
    return f"{chosen}{placement.scheme}: {who}; this is rank {coordinator.world.rank}."


def owners(coordinator: Distributed, state: LayerState) -> str:
    """The ranks that solve a layer: ``"0"``, ``"0,3"`` for its parts, ``"0+3"`` for a divided one."""
    parts = []
    for part in state.block.parts:
        task, ranks = coordinator.task(state, part), coordinator.solvers(state, part)
        if task.rank is not None:
            parts.append(str(task.rank))
        elif not task.split:
            parts.append("all")
        else:
            named = "+".join(map(str, ranks))
            parts.append(named if len(named) <= _LONGEST else f"{len(ranks)} ranks")
    return parts[0] if len(set(parts)) == 1 else ",".join(parts)


def _statistics(coordinator: Distributed, state: LayerState) -> int:
    """Bytes that leave, and those that all others send here if only this rank needs them."""
    total = 0
    for name, statistic in zip(state.running, coordinator.unit(state).statistics, strict=True):
        wire = coordinator.settings.wire_dtype
        size = statistic.elements * (statistic.itemsize if wire is None else wire.itemsize)
        collected = (
            coordinator.early.direct and coordinator.root(state, name) == coordinator.world.rank
        )
        total += size * (coordinator.world.size if collected else 1)
    return total


def _gradient(coordinator: Distributed, state: LayerState) -> int:
    dtype = coordinator.settings.wire_dtype or state.layer.weight.dtype
    return coordinator.unit(state).gradient_elements * dtype.itemsize
