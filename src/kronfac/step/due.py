"""Which parts of which layers are solved again at a step."""

from __future__ import annotations

from collections.abc import Iterable

from kronfac.state.layer_state import Due, LayerState
from kronfac.step.schedule import Clock


def due_parts(clock: Clock, state: LayerState, taken: bool) -> tuple[str, ...]:
    """The parts of a layer, at a step that takes statistics (``taken``) or not.

    A layer without a solution waits for its refresh, and is then solved as a whole.
    """
    if not state.layer.weight.requires_grad:
        return ()
    refreshes, block = clock.refresh_due(state.last_refresh), state.block
    if state.solved_at is None:
        return block.due_parts("refresh", "factor") if refreshes else ()
    parts = block.due_parts("refresh") if refreshes else ()
    return (*parts, *block.due_parts("factor")) if taken else parts


def coming(clock: Clock, states: Iterable[LayerState]) -> Due:
    """What a step that takes statistics may solve."""
    found = {state: due_parts(clock, state, True) for state in states}
    return {state: parts for state, parts in found.items() if parts}


def take_due(clock: Clock, states: Iterable[LayerState], taken: bool) -> Due:
    """What is solved at this step; its layers then have nothing new any more.

    A layer that could not be solved yet waits for something new.
    """
    due = {}
    for state in states:
        if state.last_refresh is None and not state.has_new_statistics:
            continue
        parts = due_parts(clock, state, taken)
        if parts:
            due[state] = parts
            state.has_new_statistics = False
    return due
