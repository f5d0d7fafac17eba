"""Statistics that gradients and weights show: they are equal on all ranks, and nothing travels."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import Tensor

from kronfac.distributed.coordinator import Coordinator
from kronfac.protocol.context import Context
from kronfac.state.fold import fold
from kronfac.state.layer_state import LayerState


def look_at_gradients(states: Iterable[LayerState]) -> bool:
    """Whether some statistics are those of gradients or weights."""
    return any(one.is_replicated for state in states for one in state.block.statistics.values())


def observe_gradient(state: LayerState, names: Collection[str], coordinator: Coordinator) -> None:
    """Take in those statistics of a layer that its gradient and weights show."""
    wanted = [name for name in names if state.running[name].statistic.is_replicated]
    if not wanted or not state.has_gradient or not coordinator.observes_gradient(state):
        return
    block, context = state.block, Context(state.solution_in_use)
    found: dict[str, Tensor] = {}
    if any(block.statistics[name].source == "gradient" for name in wanted):
        found |= block.observe_gradient(state.view.gradient(), context)
    if any(block.statistics[name].source == "weight" for name in wanted):
        found |= block.observe_weight(state.view.weight(), context)
    state.pending.add_gradient({name: found[name] for name in wanted if name in found})


def follow_gradients(states: Iterable[LayerState], decay: float, coordinator: Coordinator) -> None:
    """Fold the statistics of every step, at a step that takes no others."""
    for state in states:
        names = [name for name, one in state.block.statistics.items() if one.every == "step"]
        if names:
            observe_gradient(state, names, coordinator)
            for name in names:
                fold(state, name, decay, None)
            state.pending.clear_gradients(names)
