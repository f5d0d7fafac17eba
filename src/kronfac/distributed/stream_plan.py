"""In which messages statistics leave for good, in an order that all ranks follow."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from kronfac.distributed.comm.flat import Item
from kronfac.distributed.layout import Layout
from kronfac.state.layer_state import LayerState


@dataclass(frozen=True, eq=False)
class Slot:
    """A statistic that leaves for its keeper, ``item.root``."""

    state: LayerState
    name: str
    item: Item

    @property
    def source(self) -> str:
        """Which side of the layer shows it."""
        return self.state.block.statistics[self.name].source

    @property
    def is_lent(self) -> bool:
        """Whether another layer observes it."""
        return self.state.lender(self.name) is not self.state

    @property
    def elements(self) -> int:
        """Its size."""
        return math.prod(self.item.shape)


@dataclass
class Learned:
    """What earlier steps have shown, alike on all ranks."""

    #: Statistics in the order in which they are complete; ``None`` before the first step.
    order: list[str] | None = None
    #: How often each is observed in a pass.
    calls: dict[str, int] = field(default_factory=dict)
    #: Whether N of a step was the same multiple of that of its first pass on all ranks.
    proportional: bool | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain lists and dicts."""
        return dict(vars(self))


@dataclass(frozen=True, eq=False)
class StreamPlan:
    """Messages as lists of statistics. Those of the cycle leave in turn, others only at a step."""

    slots: Mapping[str, Slot]
    cycle: Sequence[Sequence[str]]
    spare: Sequence[Sequence[str]]

    @cached_property
    def messages(self) -> list[Sequence[str]]:
        """All of them."""
        return [*self.cycle, *self.spare]

    @cached_property
    def where(self) -> dict[str, int]:
        """By statistic, the number of its message."""
        return {key: number for number, keys in enumerate(self.messages) for key in keys}

    def leaves_early(self, key: str) -> bool:
        """Whether a statistic leaves in turn."""
        return self.where.get(key, len(self.cycle)) < len(self.cycle)

    @cached_property
    def digest(self) -> int:
        """A number that differs between plans."""
        items = [[self.slots[key].item for key in keys] for keys in self.messages]
        return zlib.crc32(repr((len(self.cycle), items)).encode())


def make_plan(layout: Layout, learned: Learned, holds_outputs: bool) -> StreamPlan:
    """The messages of a step. ``holds_outputs`` keeps output statistics until the step.

    Without better knowledge, inputs are complete in the order of layers, and outputs in the opposite one.
    Messages have half the size of the largest layer's statistics, or one statistic.
    """
    slots = dict(_slots(layout))
    inputs = [key for key, slot in slots.items() if slot.source == "input"]
    outputs = [key for key, slot in slots.items() if slot.source == "output"]
    order = [*inputs, *reversed(outputs)] if learned.order is None else learned.order
    early = [
        key
        for key in order
        if key in slots
        and not slots[key].is_lent
        and slots[key].state.layer.weight.requires_grad
        and not (holds_outputs and slots[key].source == "output")
    ]
    known = set(early)
    limit = unit_elements(slots) // 2
    cycle = _grouped(slots, early, limit)
    spare = _grouped(slots, [key for key in slots if key not in known], limit)
    return StreamPlan(slots, cycle, spare)


def unit_elements(slots: Mapping[str, Slot]) -> int:
    """Elements of the largest layer's statistics."""
    sizes: dict[LayerState, int] = {}
    for slot in slots.values():
        sizes[slot.state] = sizes.get(slot.state, 0) + slot.elements
    return max(sizes.values(), default=0)


def _slots(layout: Layout) -> Iterator[tuple[str, Slot]]:
    """Statistics that are sums of what is observed in forward and backward, and not at the step."""
    for state in layout.units:
        if state.block.holds_rows or state.fell_back:
            continue
        layer = state.layer
        for name, running in state.running.items():
            one = running.statistic
            observed = one.source == "input" or (one.source == "output" and not state.broadcast)
            if one.combine != "sum" or not observed:
                continue
            key, symmetric = layout.own_key(state, name), layout.settings.triangles
            yield (
                key,
                Slot(
                    state,
                    name,
                    Item(
                        key,
                        tuple(one.shape),
                        layer.factor_dtype,
                        layer.weight.device,
                        one.symmetric and symmetric,
                        layout.keeper(state, name),
                    ),
                ),
            )


def _grouped(slots: Mapping[str, Slot], keys: Sequence[str], limit: int) -> list[list[str]]:
    """Neighbours that travel together: of one precision on one device, and not too large."""
    groups: list[list[str]] = []
    size, kind = 0, None
    for key in keys:
        item, elements = slots[key].item, slots[key].elements
        if not groups or size + elements > limit or (item.dtype, item.device) != kind:
            groups.append([])
            size, kind = 0, (item.dtype, item.device)
        groups[-1].append(key)
        size += elements
    return groups
