"""Layers and parts of layers solved at once, those of equal shapes in batches."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from kronfac.distributed.solving.together import Task, joins_others, solve_together
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
    given_by = {
        (state, part): first
        for (first, part), own in takers({state: parts[state] for state in wanted}).items()
        for state in own
    }
    together = [state for state in wanted if joins_others(state.block, parts[state])]
    works = {
        (s, part): _task(s, part, wanted[s])
        for s in together
        for part in parts[s]
        if (s, part) not in given_by
    }
    usable = set(finite)
    solved = solve_together(list(works.values()), [state in usable for state, _ in works])
    done: dict[Work, Solution] = dict(zip(works, solved, strict=True))
    found: dict[LayerState, Solution] = {}
    for state, given in wanted.items():
        taken = {part: given_by[state, part] for part in parts[state] if (state, part) in given_by}
        own = [part for part in parts[state] if part not in taken]
        lent = _united(
            [
                done[first, part] if (first, part) in done else _part_of(found[first], first, part)
                for part, first in taken.items()
            ]
        )
        if state in together:
            found[state] = _united([lent, *(done[state, part] for part in own)])
        elif lent is not None:
            found[state] = state.block.refresh(replace(given, solved=lent), own)
        else:
            found[state] = None
    return list(found.items())


def takers(due: Mapping[LayerState, Sequence[str]]) -> dict[Work, list[LayerState]]:
    """Of parts that several of these layers share, who solves each, and who takes it from there."""
    found: dict[Work, list[LayerState]] = {}
    for state, parts in due.items():
        group = state.group
        for part in parts:
            if group is None or part not in group.parts:
                continue
            first = next(one for one in group.members if part in due.get(one, ()))
            if first is not state:
                found.setdefault((first, part), []).append(state)
    return found


def _united(pieces: Sequence[Solution]) -> Solution:
    """Parts of one solution; ``None`` if one of them is missing."""
    whole: dict[str, Tensor] = {}
    for piece in pieces:
        if piece is None:
            return None
        whole |= piece
    return whole


def _part_of(solution: Solution, state: LayerState, part: str) -> Solution:
    if solution is None:
        return None
    return {name: solution[name] for name in state.block.parts[part].solution}


def _task(state: LayerState, part: str, given: Given) -> Task:
    block = state.block
    outlines = given.outlines or block.outlines(given.means)
    own = {name: given.means[name] for name in block.parts[part].statistics}
    return Task(block, part, replace(given, means=own, outlines=outlines))
