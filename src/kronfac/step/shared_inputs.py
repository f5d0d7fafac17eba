"""Settling which layers share an input, alike on all ranks, and noticing when they no longer do."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence

from kronfac.capture.seen_inputs import SeenInputs
from kronfac.distributed.coordinator import Coordinator
from kronfac.state.input_group import InputGroup, groups_of
from kronfac.state.layer_state import LayerState


class SharedInputs:
    """The option ``share_inputs``, and the layers that see the same input.

    They are found at the first factor step, from what each layer has seen there, and saved. A layer that
    was not used then, or has gone its own way since, stays alone.
    """

    def __init__(self, seen: SeenInputs) -> None:
        self.seen = seen
        #: Whether ranks know that they have the same groups.
        self._agreed = True

    def settle(self, states: Iterable[LayerState], coordinator: Coordinator) -> None:
        """Part layers that have not seen the same, before what they have seen is folded."""
        for group in groups_of(states):
            if group.sightings:
                group.part()
                if coordinator.sees_all:
                    group.dissolve()

    def fix(self, states: Sequence[LayerState], coordinator: Coordinator) -> None:
        """Find the layers that share an input among those of which it is not settled yet."""
        new = [s for s in states if not s.group_settled and s.layer.weight.requires_grad]
        if not self.seen.shares:
            for state in new:
                state.group_settled = True  # whoever loads it later cannot know what it has seen
        if not self.seen.shares or (self._agreed and not new):
            return
        observed = any(state.pending.has_inputs for state in states)
        here = self._leaders(states, set(new), coordinator) if observed else []
        numbers = [float(index) for index in here] or [-math.inf] * len(states)
        further = [-float(index) for index in here] or [-math.inf] * len(states)
        largest = coordinator.largest([float(observed), *numbers, *further])
        if not largest[0]:
            return  # nothing was observed at all
        self._agreed = True
        ends = zip(largest[1 : 1 + len(states)], largest[1 + len(states) :], strict=True)
        leader = {
            state: int(most) if most == -least else -1
            for state, (most, least) in zip(states, ends, strict=True)
        }
        for group in groups_of(states):
            if any(leader[state] < 0 for state in group.members):
                group.dissolve()
        found: dict[int, list[LayerState]] = {}
        for state in new:
            state.group_settled = True
            if leader[state] >= 0:
                found.setdefault(leader[state], []).append(state)
        groups = [InputGroup(members) for members in found.values() if len(members) > 1]
        if groups:
            coordinator.share_inputs(states, new)
        for group in groups:
            group.link()

    def _leaders(
        self, states: Sequence[LayerState], new: set[LayerState], coordinator: Coordinator
    ) -> list[int]:
        """By layer, the number of the first one that has seen the same, on this rank."""
        place = {state: index for index, state in enumerate(states)}
        first: dict[Hashable, int] = {}
        leaders = []
        for index, state in enumerate(states):
            keys = tuple(self.seen.noted.get(state, ()))
            if state.group is not None and not state.group.parted:
                leaders.append(place[state.group.leader])
            elif state in new and keys:
                stride = state.stride
                rows = None if stride is None else (stride.samples, stride.positions)
                alike = keys, rows, coordinator.input_bound(state)
                leaders.append(first.setdefault(alike, index))
            else:
                leaders.append(index)
        return leaders

    def begin_loading(
        self,
        states: Sequence[LayerState],
        saved: Mapping[LayerState, int | None],
        coordinator: Coordinator,
    ) -> None:
        """Take up the groups of a checkpoint: a number for each layer that shares its input."""
        self._agreed = False
        for group in groups_of(states):
            group.dissolve()
        for state in states:
            state.group_settled = saved.get(state) is not None
        if self._make(states, saved, coordinator):
            coordinator.share_inputs(states, states)

    def finish_loading(
        self,
        states: Sequence[LayerState],
        saved: Mapping[LayerState, int | None],
        coordinator: Coordinator,
    ) -> None:
        """Share what was loaded for each layer."""
        for group in self._make(states, saved, coordinator):
            group.link()

    def _make(
        self,
        states: Sequence[LayerState],
        saved: Mapping[LayerState, int | None],
        coordinator: Coordinator,
    ) -> list[InputGroup]:
        found: dict[Hashable, list[LayerState]] = {}
        for state in states:
            number = saved.get(state)
            if self.seen.shares and number is not None and number >= 0:
                found.setdefault((number, coordinator.input_bound(state)), []).append(state)
        return [InputGroup(own) for own in found.values() if len(own) > 1 and _fit(own)]

    def describe(self, states: Iterable[LayerState]) -> list[str]:
        """Lines of the summary: which layers share their input."""
        groups = groups_of(states)
        if not groups:
            return []
        lines = ["One input, with statistics that are taken, sent and kept once:"]
        return [*lines, *(f"  {' '.join(one.name for one in group.members)}" for group in groups)]


def _fit(states: Sequence[LayerState]) -> bool:
    """Whether layers can have the same statistics as they are now."""
    keys = {(state.layer.input_form, state.block.input_key) for state in states}
    form, made_of_rows = next(iter(keys))
    return len(keys) == 1 and form is not None and made_of_rows is not None
