"""Layers that see the same input (queries, keys and values; gate and up): one ``A`` for all of them.

The first member observes, and holds what is pending; all of them hold the same running averages, and
solutions that depend on nothing else are solved once. An input counts when every member has seen it. At
the step, an input that only some of them have seen shows them apart: each then takes what it has seen
itself, and goes on alone from the averages that they had in common. So nothing depends on whether inputs
were shared, and whether they still are is found out at every step.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kronfac.statistics.pending import Pending

if TYPE_CHECKING:
    from kronfac.state.layer_state import LayerState


@dataclass(eq=False)
class Sighting:
    """An input that some members have seen since the last step, and what it contributes."""

    key: Hashable
    pending: Pending
    seen_by: list[LayerState]


class InputGroup:
    """Layers that see the same input, the first of which observes for all of them."""

    def __init__(self, members: Sequence[LayerState]) -> None:
        self.members = list(members)
        block = self.leader.block
        #: Names of the statistics that they have in common, of the parts that are solved once, and of
        #: the tensors that these make.
        self.statistics = tuple(n for n, one in block.statistics.items() if one.source == "input")
        self.parts = tuple(part for part in block.shared_parts if self._is_common(part))
        self.solutions = frozenset(n for part in self.parts for n in block.parts[part].solution)
        #: Inputs that not all members have seen yet.
        self.sightings: list[Sighting] = []
        #: Whether this rank has seen members apart; it is over for all ranks once they know.
        self.parted = False
        for state in self.members:
            state.group = self

    @property
    def leader(self) -> LayerState:
        """The member that observes."""
        return self.members[0]

    def _is_common(self, part: str) -> bool:
        keys = {state.block.solve_key(part) for state in self.members}
        described = self.leader.block.parts[part]
        return (
            len(keys) == 1
            and None not in keys
            and set(described.statistics) <= set(self.statistics)
        )

    def link(self) -> None:
        """Let all members hold the averages and solutions of the first."""
        for state in self.members[1:]:
            state.pending.clear_inputs()
            # It may observe nothing itself, and is saved as others are.
            state.pending.count_dropped(state.layer.weight.device)
            for name in self.statistics:
                state.running[name] = self.leader.running[name]
            known = self.leader.solution
            if known is not None and state.solution is not None:
                common = {n: known[n] for n in state.solution if n in self.solutions & known.keys()}
                state.solution = {**state.solution, **common}

    def claim(self, state: LayerState, key: Hashable) -> Sighting | None:
        """An input that other members have seen and this one sees now; ``None`` if there is none."""
        for one in self.sightings:
            if one.key == key and state not in one.seen_by:
                one.seen_by.append(state)
                return one
        return None

    def take_if_complete(self, sighting: Sighting) -> bool:
        """Count an input if all members have seen it; says whether they have."""
        if len(sighting.seen_by) < len(self.members):
            return False
        self.sightings.remove(sighting)
        self.leader.pending.add_inputs_of(sighting.pending)
        return True

    def part(self) -> None:
        """Give each member what it has seen, and averages of its own."""
        if self.parted:
            return
        self.parted = True
        for state in self.members[1:]:
            state.pending.add_inputs_of(self.leader.pending, copy=True)
            for name in self.statistics:
                state.running[name] = self.leader.running[name].copy()
        for sighting in self.sightings:
            for state in sighting.seen_by:
                state.pending.add_inputs_of(sighting.pending, copy=True)
        self.sightings.clear()

    def dissolve(self) -> None:
        """End it, after ranks have agreed; members go on alone."""
        self.part()
        for state in self.members:
            state.group = None


def groups_of(states: Iterable[LayerState]) -> list[InputGroup]:
    """All groups of some layers, in the order of the layers."""
    return list(dict.fromkeys(state.group for state in states if state.group is not None))
