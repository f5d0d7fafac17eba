"""What the summary says of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kronfac.distributed.coordinator import Team
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


def overview(team: Team, ownership: Ownership, states: Sequence[LayerState]) -> Overview:
    """Look at a team."""
    sizes = [_statistics(team, state) for state in states if not team.is_local]
    if team.spreads:
        sizes += [_gradient(team, state) for state in states]
    return Overview(
        line=_line(team),
        owners={state: owners(team, state) for state in states},
        message_bytes=sum(sizes) + ownership.message_bytes,
    )


def _line(team: Team) -> str:
    placement = team.placement
    assert placement is not None
    workers, size = placement.grid.workers, placement.grid.size
    chosen = "auto, " if team.settings.scheme == "auto" else ""
    work = "works" if workers == 1 else "work"
    who = f"{workers} of {size} ranks {work} on each layer"
    return f"{chosen}{placement.scheme}: {who}; this is rank {team.world.rank}."


def owners(team: Team, state: LayerState) -> str:
    """The ranks that solve a layer: ``"0"``, ``"0,3"`` for its parts, ``"0+3"`` for a divided one."""
    parts = []
    for part in state.block.parts:
        task, ranks = team.task(state, part), team.solvers(state, part)
        if task.rank is not None:
            parts.append(str(task.rank))
        elif not task.split:
            parts.append("all")
        else:
            named = "+".join(map(str, ranks))
            parts.append(named if len(named) <= _LONGEST else f"{len(ranks)} ranks")
    return parts[0] if len(set(parts)) == 1 else ",".join(parts)


def _statistics(team: Team, state: LayerState) -> int:
    """Bytes that leave, and those that all others send here if only this rank needs them."""
    total = 0
    for name, statistic in zip(state.running, team.unit(state).statistics, strict=True):
        wire = team.settings.wire_dtype
        size = statistic.elements * (statistic.itemsize if wire is None else wire.itemsize)
        collected = team.early.direct and team.root(state, name) == team.world.rank
        total += size * (team.world.size if collected else 1)
    return total


def _gradient(team: Team, state: LayerState) -> int:
    dtype = team.settings.wire_dtype or state.layer.weight.dtype
    return team.unit(state).gradient_elements * dtype.itemsize
