"""Layers and parts of layers solved at once, those of equal shapes in batches."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from kronfac.distributed.together import Task, joins_others, solve_together
from kronfac.protocol.context import Given
from kronfac.state.layer_state import LayerState

#: A layer, and the name of a part of its solution.
Work = tuple[LayerState, str]
Solution = dict[str, Tensor] | None


def solve_parts(wanted: Mapping[Work, Given]) -> dict[Work, Solution]:
    """Solve single parts, each from what it is given; ``None`` where there is no solution."""
    found: dict[Work, Solution] = {}
    tasks: dict[Work, Task] = {}
    for (state, part), given in wanted.items():
        if joins_others(state.block, [part]):
            tasks[state, part] = _task(state, part, given)
        else:
            found[state, part] = state.block.refresh(given, [part])
    return found | dict(zip(tasks, solve_together(list(tasks.values())), strict=True))


def solve_layers(
    wanted: Mapping[LayerState, Given],
    parts: Mapping[LayerState, Sequence[str]],
    finite: Collection[LayerState],
) -> list[tuple[LayerState, Solution]]:
    """Solve some parts of layers; ``None`` where one of them has no solution.

    ``finite`` are those whose means are.
    """
    together = [state for state in wanted if joins_others(state.block, parts[state])]
    works = {(s, part): _task(s, part, wanted[s]) for s in together for part in parts[s]}
    found: dict[LayerState, Solution] = {state: {} for state in together}
    usable = set(finite)
    solved = solve_together(list(works.values()), [state in usable for state, _ in works])
    for (state, _), solution in zip(works, solved, strict=True):
        before = found[state]
        found[state] = None if before is None or solution is None else {**before, **solution}
    for state, given in wanted.items():
        if state not in found:
            found[state] = state.block.refresh(given, parts[state])
    return [(state, found[state]) for state in wanted]


def _task(state: LayerState, part: str, given: Given) -> Task:
    block = state.block
    outlines = given.outlines or block.outlines(given.means)
    own = {name: given.means[name] for name in block.parts[part].statistics}
    return Task(block, part, replace(given, means=own, outlines=outlines))
