"""From what was kept until the step to contributions."""

from __future__ import annotations

from collections.abc import Sequence

from kronfac.distributed.coordinator import Coordinator
from kronfac.state.layer_state import LayerState
from kronfac.statistics.norm_rows import gather_norms
from kronfac.step.gradient_statistics import observe_gradient


def settle(states: Sequence[LayerState], coordinator: Coordinator, step: int) -> None:
    """Turn everything that was observed into contributions."""
    gather_norms(state.pending for state in states)
    for state in states:
        state.pending.settle(state.solution_in_use)
        observe_gradient(state, list(state.running), coordinator)
        for name, running in state.running.items():
            if running.statistic.combine != "gather":
                continue
            if not coordinator.gives_rows:
                state.pending.sums.pop(name, None)
            if state.pending.has_observed(name):
                running.gathered_at = step
        state.has_new_statistics = True
