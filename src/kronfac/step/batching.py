"""Small layers of equal shape are preconditioned together: one batched product instead of many calls.

On several cores, or on a GPU, a product of small matrices does not keep the device busy; a batch of them
does. Solutions of a batch live side by side in one tensor, of which each layer holds its part. Which
layers go together depends on who has a gradient at this step and on nothing earlier, so that a run that
was resumed computes the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from kronfac.linalg.batching import MAX_ELEMENTS
from kronfac.state.layer_state import LayerState
from kronfac.state.timing import Phases

#: The damping γ of each layer.
Damping = Mapping[LayerState, float | Tensor]


class Batch:
    """The solutions of all layers of one kind, side by side."""

    def __init__(self, states: Sequence[LayerState]) -> None:
        self.states = list(states)
        self._stacked: dict[str, Tensor] = {}
        self._known: list[dict[str, Tensor] | None] = [None] * len(states)

    def precondition(
        self, gradients: Mapping[LayerState, Tensor], damping: Damping
    ) -> dict[LayerState, Tensor]:
        """Apply the solutions of those layers that have a gradient."""
        here = [index for index, state in enumerate(self.states) if state in gradients]
        solutions = self._solutions(here)
        if len(here) < len(self.states):
            solutions = {
                name: torch.stack([value[index] for index in here])
                for name, value in solutions.items()
            }
        states = [self.states[index] for index in here]
        stacked = torch.stack([gradients[state] for state in states])
        own = damping[states[0]]
        if isinstance(own, Tensor):
            own = torch.stack([torch.as_tensor(damping[state]) for state in states])
        found = states[0].block.precondition(solutions, stacked, own)
        return dict(zip(states, found.unbind(), strict=True))

    def _solutions(self, here: Iterable[int]) -> dict[str, Tensor]:
        for index in here:
            state = self.states[index]
            if state.solution is not self._known[index]:
                self._put(index, state)
        return self._stacked

    def _put(self, index: int, state: LayerState) -> None:
        """Move a new solution to its place among the others."""
        assert state.solution is not None
        for name, value in state.solution.items():
            if name not in self._stacked:
                self._stacked[name] = value.new_empty(len(self.states), *value.shape)
            place = self._stacked[name][index]
            if value.data_ptr() != place.data_ptr():  # parts that were not solved again are there
                place.copy_(value)
        state.solution = {name: self._stacked[name][index] for name in state.solution}
        self._known[index] = state.solution


class Batches:
    """The batches of one model's layers."""

    def __init__(self, phases: Phases) -> None:
        self._phases = phases
        self._batches: dict[Hashable, Batch] = {}

    def clear(self) -> None:
        """Forget all batches, after layers have come or gone."""
        self._batches.clear()

    def precondition(
        self,
        gradients: Mapping[LayerState, Tensor],
        states: Iterable[LayerState],
        damping: Damping,
    ) -> dict[LayerState, Tensor]:
        """Apply solutions to the gradients of this step, given all layers that there are."""
        alike: dict[Hashable, list[LayerState]] = {}
        result: dict[LayerState, Tensor] = {}
        for state in states:
            if state.solution is not None:
                alike.setdefault(_kind(state), []).append(state)
        for kind, members in alike.items():
            present = {state: gradients[state] for state in members if state in gradients}
            if kind is None or len(present) < 2:
                for state, gradient in present.items():
                    result[state] = self._alone(state, gradient, damping[state])
            else:
                with self._phases.part("precondition", *(state.name for state in present)):
                    result |= self._batch(kind, members).precondition(present, damping)
        return {state: result[state] for state in gradients}

    def _alone(self, state: LayerState, gradient: Tensor, damping: float | Tensor) -> Tensor:
        assert state.solution is not None
        with self._phases.part("precondition", state.name):
            return state.block.precondition(state.solution, gradient, damping)

    def _batch(self, kind: Hashable, members: list[LayerState]) -> Batch:
        batch = self._batches.get(kind)
        if batch is None or batch.states != members:
            batch = self._batches[kind] = Batch(members)
        return batch


def _kind(state: LayerState) -> Hashable:
    """What layers of one batch have in common; ``None`` for those that stay alone."""
    signature = state.block.signature
    if signature is None or math.prod(state.layer.matrix_shape) > MAX_ELEMENTS:
        return None
    return signature, state.layer.weight.device
