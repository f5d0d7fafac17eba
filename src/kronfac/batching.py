"""Small layers of equal shape are preconditioned together: one batched product instead of many calls.

On several cores, or on a GPU, a product of small matrices does not keep the device busy; a batch of them
does. Solutions of a batch live side by side in one tensor, of which each layer holds its part.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from kronfac.layer_state import LayerState
from kronfac.phases import Phases

#: Larger matrices keep a device busy by themselves, and copies of them would cost memory.
MAX_ELEMENTS = 2**18


class Batch:
    """The solutions of some layers, side by side."""

    def __init__(self, states: Sequence[LayerState]) -> None:
        self.states = list(states)
        self._stacked: dict[str, Tensor] = {}
        self._known: list[dict[str, Tensor] | None] = [None] * len(states)

    def precondition(self, gradients: Sequence[Tensor], damping: float) -> Sequence[Tensor]:
        """Apply each layer's solution to its gradient."""
        block = self.states[0].block
        return block.precondition(self._solutions(), torch.stack(list(gradients)), damping).unbind()

    def _solutions(self) -> dict[str, Tensor]:
        for index, state in enumerate(self.states):
            if state.solution is not self._known[index]:
                self._put(index, state)
        return self._stacked

    def _put(self, index: int, state: LayerState) -> None:
        """Move a new solution to its place among the others."""
        assert state.solution is not None
        for name, value in state.solution.items():
            if name not in self._stacked:
                self._stacked[name] = value.new_empty(len(self.states), *value.shape)
            self._stacked[name][index].copy_(value)
        state.solution = {name: self._stacked[name][index] for name in state.solution}
        self._known[index] = state.solution


class Batches:
    """Which layers go together; a layer that misses a step leaves its batch for that step."""

    def __init__(self, phases: Phases) -> None:
        self._phases = phases
        self._batches: dict[Hashable, Batch] = {}

    def clear(self) -> None:
        """Forget all batches, after layers have come or gone."""
        self._batches.clear()

    def precondition(
        self, gradients: dict[LayerState, Tensor], damping: float
    ) -> dict[LayerState, Tensor]:
        """Apply the solutions of layers that all have one."""
        alike: dict[Hashable, list[LayerState]] = {}
        result: dict[LayerState, Tensor] = {}
        for state in gradients:
            alike.setdefault(_kind(state), []).append(state)
        for kind, states in alike.items():
            batch = self._batch(kind, states)
            if batch is None:
                for state in states:
                    result[state] = self._alone(state, gradients[state], damping)
            else:
                with self._phases.part("precondition", *(state.name for state in states)):
                    found = batch.precondition([gradients[state] for state in states], damping)
                result |= dict(zip(states, found, strict=True))
        return result

    def _alone(self, state: LayerState, gradient: Tensor, damping: float) -> Tensor:
        assert state.solution is not None
        with self._phases.part("precondition", state.name):
            return state.block.precondition(state.solution, gradient, damping)

    def _batch(self, kind: Hashable, states: list[LayerState]) -> Batch | None:
        if kind is None or len(states) == 1:
            return None
        batch = self._batches.setdefault(kind, Batch(states))
        return batch if batch.states == states else None


def _kind(state: LayerState) -> Hashable:
    """What layers of one batch have in common; ``None`` for those that stay alone."""
    signature = state.block.signature
    if signature is None or math.prod(state.layer.matrix_shape) > MAX_ELEMENTS:
        return None
    return signature, state.layer.weight.device
