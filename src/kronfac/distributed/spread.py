"""Preconditioned gradients on their way from those who have them to those who do not, at every step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kronfac.distributed.comm.broadcast import Broadcast, make_broadcasts
from kronfac.distributed.comm.collectives import Collectives
from kronfac.distributed.comm.flat import Item
from kronfac.distributed.layout import Layout
from kronfac.state.layer_state import LayerState
from kronfac.state.timing import Phases


class Spreading:
    """Broadcasts of gradients, kept from one step to the next."""

    def __init__(self, layout: Layout, phases: Phases) -> None:
        self.layout = layout
        self.phases = phases
        self._arranged: tuple[Collectives, tuple[Item, ...]] | None = None
        self._broadcasts: list[Broadcast] = []

    def attach(self, states: Sequence[LayerState]) -> None:
        """Gradients stay where they are."""

    def collect(self, states: Sequence[LayerState]) -> None:
        """Gradients are whole on all ranks."""

    def portions(
        self, states: Sequence[LayerState], at_once: bool
    ) -> Iterator[Sequence[LayerState]]:
        """All layers, whose gradients are sent when they have been worked on."""
        yield states
        with self.phases("spread"):
            self.spread([state for state in states if state.is_preconditioned])

    def spread(self, states: Sequence[LayerState]) -> None:
        """Send the gradients of some layers along the row, and write down what is received."""
        by_key = {self.layout.key(state, "gradient"): state for state in states}
        self._arrange(tuple(self._item(key, state) for key, state in by_key.items()))
        for broadcast in self._broadcasts:
            if broadcast.mine:
                for key in broadcast.keys:
                    state = by_key[key]
                    broadcast.put(key, state.view.gradient() if state.has_gradient else None)
            broadcast.launch()
        rounded = self.layout.settings.wire_dtype is not None
        for broadcast in self._broadcasts:
            broadcast.wait()
            for key in broadcast.keys:
                state = by_key[key]
                if state.has_gradient and (rounded or not broadcast.mine):
                    state.view.write(broadcast.take(key))

    def _item(self, key: str, state: LayerState) -> Item:
        layer, root = state.layer, self.layout.gradient_root(state)
        return Item(key, layer.matrix_shape, layer.weight.dtype, layer.weight.device, root=root)

    def _arrange(self, items: tuple[Item, ...]) -> None:
        arranged = (self.layout.row, items)
        if arranged != self._arranged:
            wire = self.layout.settings.wire_dtype
            self._broadcasts = make_broadcasts(items, self.layout.row, "spread", wire)
            self._arranged = arranged
