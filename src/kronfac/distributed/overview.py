"""What the summary says of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kronfac.distributed.layout import Layout
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
        unit_bytes: of the largest layer's statistics, if these leave during the passes, a few at a time.
    """

    line: str
    owners: Mapping[LayerState, str]
    message_bytes: int
    unit_bytes: int | None = None


def overview(
    layout: Layout, states: Sequence[LayerState], direct: bool, weight_bytes: int, streams: bool
) -> Overview:
    """Look at several ranks.

    ``direct`` says whether statistics are sent to one rank as they are, ``weight_bytes`` what messages of
    weights need, ``streams`` whether statistics leave during the passes.
    """
    unit = max((state.observed_bytes for state in states), default=0) if streams else None
    sizes = [_statistics(layout, state, direct) for state in states if not layout.is_local]
    sizes = sizes if unit is None else [unit // 2]  # two messages of half a unit, of triangles
    if layout.spreads:
        sizes += [_gradient(layout, state) for state in states if layout.slice_of(state) is None]
    return Overview(
        line=_line(layout),
        owners={state: solved_by(layout, state) for state in states},
        message_bytes=sum(sizes) + weight_bytes,
        unit_bytes=unit,
    )


def _line(layout: Layout) -> str:
    placement = layout.placed
    workers, size = placement.grid.workers, placement.grid.size
    chosen = "auto, " if layout.settings.scheme == "auto" else ""
    work = "works" if workers == 1 else "work"
    who = f"{workers} of {size} ranks {work} on each layer"
    sliced = sum(1 for one in placement.assignments.values() if one.sliced)
    if sliced:
        who = f"slices of {sliced} layers, others on {workers} of {size} ranks each"
    return f"{chosen}{placement.scheme}: {who}; this is rank {layout.world.rank}."


def solved_by(layout: Layout, state: LayerState) -> str:
    """The ranks that solve a layer: ``"0"``, ``"0,3"`` for its parts, ``"0+3"`` for a divided one."""
    parts = []
    for part in state.block.shared_parts:
        task, ranks = layout.task(state, part), layout.solvers(state, part)
        if task.rank is not None:
            parts.append(str(task.rank))
        elif not task.split:
            parts.append("all")
        else:
            named = "+".join(map(str, ranks))
            parts.append(named if len(named) <= _LONGEST else f"{len(ranks)} ranks")
    return parts[0] if len(set(parts)) == 1 else ",".join(parts)


def _statistics(layout: Layout, state: LayerState, direct: bool) -> int:
    """Bytes that leave, and those that all others send here if only this rank needs them."""
    total = 0
    for name, statistic in zip(state.running, layout.units[state].statistics, strict=True):
        wire = layout.settings.wire_dtype
        size = statistic.elements * (statistic.itemsize if wire is None else wire.itemsize)
        if state.lender(name) is not state:
            continue  # it is sent once
        collected = direct and layout.root(state, name) == layout.world.rank
        if statistic.times:
            total += size * (layout.world.size if collected else 1)
    return total


def _gradient(layout: Layout, state: LayerState) -> int:
    dtype = layout.settings.wire_dtype or state.layer.weight.dtype
    return layout.units[state].gradient_elements * dtype.itemsize
