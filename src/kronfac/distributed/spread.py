"""Preconditioned gradients on their way from those who have them to those who do not, at every step."""

from __future__ import annotations

from collections.abc import Sequence

from kronfac.distributed.comm.broadcast import Parcel, make_parcels
from kronfac.distributed.comm.collectives import Channel
from kronfac.distributed.comm.flat import Item
from kronfac.distributed.coordinator import Team
from kronfac.state.layer_state import LayerState


class Spreading:
    """Parcels of gradients, kept from one step to the next."""

    def __init__(self, team: Team) -> None:
        self.team = team
        self._layout: tuple[Channel, tuple[Item, ...]] | None = None
        self._parcels: list[Parcel] = []

    def spread(self, states: Sequence[LayerState]) -> None:
        """Send the gradients of some layers along the row, and write down what is received."""
        by_key = {self.team.key(state, "gradient"): state for state in states}
        self._arrange(tuple(self._item(key, state) for key, state in by_key.items()))
        for parcel in self._parcels:
            if parcel.mine:
                for key in parcel.keys:
                    state = by_key[key]
                    parcel.put(key, state.layer.gradient() if state.has_gradient else None)
            parcel.launch()
        rounded = self.team.settings.wire_dtype is not None
        for parcel in self._parcels:
            parcel.wait()
            for key in parcel.keys:
                state = by_key[key]
                if state.has_gradient and (rounded or not parcel.mine):
                    state.layer.write(parcel.take(key))

    def _item(self, key: str, state: LayerState) -> Item:
        layer, root = state.layer, self.team.gradient_root(state)
        return Item(key, layer.matrix_shape, layer.weight.dtype, layer.weight.device, root=root)

    def _arrange(self, items: tuple[Item, ...]) -> None:
        layout = (self.team.row, items)
        if layout != self._layout:
            wire = self.team.settings.wire_dtype
            self._parcels = make_parcels(items, self.team.row, "spread", wire)
            self._layout = layout
