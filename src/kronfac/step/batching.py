"""Layers of equal shape are preconditioned together: one batched product instead of many calls.

On several cores, or on a GPU, a product of small matrices does not keep the device busy; a batch of them
does, and every operation that one layer needs costs a launch. Solutions of a batch live side by side in
one tensor, of which each layer holds its part. Which layers go together depends on who has a gradient at
this step and on nothing earlier, so that a run that was resumed computes the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kronfac.layers.stacks import stack_kind
from kronfac.linalg.batching import MAX_BATCH_ELEMENTS, MAX_ELEMENTS
from kronfac.state.layer_state import LayerState
from kronfac.state.timing import Phases

#: The damping γ of each layer.
Damping = Mapping[LayerState, float | Tensor]


@dataclass(frozen=True, eq=False)
class Group:
    """Layers whose steps are computed together, and the batch of solutions that they belong to."""

    states: Sequence[LayerState]
    batch: Batch

    @property
    def is_solved(self) -> bool:
        """Whether they have solutions; all of them or none."""
        return _is_solved(self.states[0])


class Batch:
    """The solutions of all layers of one kind, side by side; that of a single one stays where it is."""

    def __init__(self, states: Sequence[LayerState]) -> None:
        self.states = list(states)
        self._stacked: dict[str, Tensor] = {}
        self._known: list[dict[str, Tensor] | None] = [None] * len(states)
        self._damping: tuple[list[Tensor], Tensor] | None = None

    def precondition(
        self, states: Sequence[LayerState], gradients: Tensor, damping: Damping
    ) -> Tensor:
        """Apply the solutions of some of these layers to gradients ``[k, *b, d_out, d_in]``."""
        first, block = states[0], states[0].block
        if len(states) == 1:
            own = first.cut(first.applied(damping[first]))
            return block.precondition(own, gradients[0], damping[first])[None]
        here = [self.states.index(state) for state in states]
        solutions = first.cut(self._solutions(here, damping))
        return block.precondition(solutions, gradients, self._dampings(states, damping))

    def place(self, states: Sequence[LayerState], damping: Damping) -> None:
        """Move new solutions of some of these layers to their places, where products expect them."""
        if len(self.states) > 1:
            self._place([self.states.index(state) for state in states], damping)

    def forget_prepared(self) -> None:
        """Let go of what blocks prepare; solutions stay."""
        if self.states[0].block.prepares and self.states[0].keeps_prepared:
            self._stacked = {}
            self._known = [None] * len(self.states)
            for state in self.states:
                state.forget_prepared()

    @staticmethod
    def raw_columns(states: Sequence[LayerState]) -> Tensor | None:
        """Columns ``[k, 1, d_in]`` whose gradients pass as they are, if any."""
        found = []
        for state in states:
            assert state.solution is not None
            raw = state.block.raw_columns(state.cut(state.solution))
            if raw is None:
                return None
            found.append(raw)
        return torch.stack(found).unsqueeze(-2)

    def _dampings(self, states: Sequence[LayerState], damping: Damping) -> float | Tensor:
        """One number for all of them, or one of each; side by side until one changes."""
        first = damping[states[0]]
        if not isinstance(first, Tensor):
            return first
        own = [torch.as_tensor(damping[state]) for state in states]
        known = self._damping
        if known is None or len(known[0]) != len(own) or any(map(_differ, known[0], own)):
            known = self._damping = (own, torch.stack(own))
        return known[1]

    def _place(self, here: Sequence[int], damping: Damping) -> None:
        for index in here:
            state = self.states[index]
            applied = state.applied(damping[state])
            if applied is not self._known[index]:
                self._put(index, state, applied)

    def _solutions(self, here: Sequence[int], damping: Damping) -> dict[str, Tensor]:
        self._place(here, damping)
        if len(here) == len(self.states):
            return self._stacked
        return {
            name: torch.stack([value[index] for index in here])
            for name, value in self._stacked.items()
        }

    def _put(self, index: int, state: LayerState, applied: dict[str, Tensor]) -> None:
        """Move what is multiplied by to its place among the others."""
        for name, value in applied.items():
            if name not in self._stacked:
                self._stacked[name] = value.new_empty(len(self.states), *value.shape)
            place = self._stacked[name][index]
            if value.data_ptr() != place.data_ptr():  # parts that were not solved again are there
                place.copy_(value)
        moved = {name: self._stacked[name][index] for name in applied}
        state.move_applied(moved)
        self._known[index] = moved


class Batches:
    """The batches of one model's layers."""

    def __init__(self, phases: Phases) -> None:
        self._phases = phases
        self._batches: dict[Hashable, Batch] = {}

    def clear(self) -> None:
        """Forget all batches, after layers have come or gone."""
        self._batches.clear()

    def forget_prepared(self) -> None:
        """Let go of what blocks prepare of their solutions, until it is needed again."""
        for batch in self._batches.values():
            batch.forget_prepared()

    def groups(
        self, present: Mapping[LayerState, Hashable], states: Sequence[LayerState]
    ) -> list[Group]:
        """Which layers that have a gradient go together, given all layers of a portion.

        ``present`` says of each what else has to be equal.
        """
        alike: dict[Hashable, list[LayerState]] = {}
        for state in states:
            if state in present or _is_solved(state):
                alike.setdefault(_kind(state), []).append(state)
        found: list[Group] = []
        for kind, members in alike.items():
            size = _batch_size(members[0])
            for number, start in enumerate(range(0, len(members), size)):
                batch = self._batch((states[0], kind, number), members[start : start + size])
                now: dict[Hashable, list[LayerState]] = {}
                for state in batch.states:
                    if state in present:
                        key = present[state], stack_kind(state.view)
                        now.setdefault(key, []).append(state)
                found += [Group(chosen, batch) for chosen in now.values()]
        return found

    def precondition(self, group: Group, gradients: Tensor, damping: Damping) -> Tensor:
        """Apply the solutions of a group to its gradients ``[k, *b, d_out, d_in]``."""
        with self._phases.part("precondition", *(state.name for state in group.states)):
            return group.batch.precondition(group.states, gradients, damping)

    def _batch(self, kind: Hashable, members: list[LayerState]) -> Batch:
        batch = self._batches.get(kind)
        if batch is None or batch.states != members:
            batch = self._batches[kind] = Batch(members)
        return batch


def _kind(state: LayerState) -> Hashable:
    """What layers of one batch have in common; those that stay alone have it with nobody."""
    signature = state.block.signature
    solved = _is_solved(state)
    if signature is None:
        return state, solved
    layer, piece = state.layer, state.view.slice
    kind = signature, type(layer), layer.weight.shape, layer.weight.device
    return *kind, state.rule, solved, piece, state.keeps_prepared


def _is_solved(state: LayerState) -> bool:
    return state.solved_at is not None and state.solution is not None


def _batch_size(state: LayerState) -> int:
    """How many layers like this one a batch has at most.

    A processor is busy with one large matrix, and its caches are too small for several. Elsewhere it is
    the memory for copies of gradients that is bounded.
    """
    elements = math.prod(state.layer.matrix_shape)
    if elements <= MAX_ELEMENTS:
        return 2**31
    if state.layer.weight.device.type == "cpu":
        return 1
    return max(1, MAX_BATCH_ELEMENTS // elements)


def _differ(one: Tensor, other: Tensor) -> bool:
    return one is not other
