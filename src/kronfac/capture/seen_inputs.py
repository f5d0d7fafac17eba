"""Which layers see the same tensor: by its memory, as long as nothing is written there in between.

Under ``torch.compile`` memory is used again without a trace, so inputs of compiled layers are taken for
different ones.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from kronfac.capture.recording import record_input
from kronfac.capture.waiting import WaitingInputs
from kronfac.state.input_group import Sighting
from kronfac.state.layer_state import LayerState
from kronfac.statistics.forward_pass import Pass
from kronfac.statistics.pending import Pending


class SeenInputs:
    """The inputs of a step, for layers that may have the same, or are known to."""

    def __init__(self, shares: bool, waiting: WaitingInputs) -> None:
        self.shares = shares
        self.waiting = waiting
        #: What layers of which it is not settled yet have seen, in order.
        self.noted: dict[LayerState, list[Hashable]] = {}
        #: An address is not given to another tensor while somebody refers to it.
        self._memory: dict[int, StorageWeakRef] = {}

    def clear(self) -> None:
        """Forget them, after a step."""
        for state in self.noted:
            if state.group is not None:
                state.group.sightings.clear()
        self.noted.clear()
        self._memory.clear()

    def record(
        self,
        state: LayerState,
        values: tuple[Any, ...],
        forward_pass: Pass,
        traced: bool,
        waits: bool = False,
    ) -> LayerState | None:
        """Take in the inputs of one product, or let them wait for the end of the forward.

        Returns the layer whose statistics have grown, or will have, if any.
        """
        group, waiting = state.group, self.waiting if waits else None
        if group is None or group.parted:
            if self.shares and not state.group_settled:
                self.noted.setdefault(state, []).append(
                    self._key(state, values, forward_pass, traced)
                )
            grown = record_input(state, values, forward_pass, waiting=waiting)
            return state if grown else None
        self.noted.setdefault(state, [])
        key = self._key(state, values, forward_pass, traced)
        sighting = group.claim(state, key)
        if sighting is None:
            sighting = Sighting(key, Pending(state.block), [state])
            record_input(state, values, forward_pass, sighting.pending, waiting)
            group.sightings.append(sighting)
        if not group.take_if_complete(sighting):
            return None
        self.waiting.hand_over(sighting.pending, group.leader.pending)
        return group.leader

    def _key(
        self, state: LayerState, values: tuple[Any, ...], forward_pass: Pass, traced: bool
    ) -> Hashable:
        """What makes two inputs the same, for layers that make the same of them."""
        form, made_of_rows = state.layer.input_form, state.block.input_key
        first = values[0]
        plain = type(first) in (Tensor, nn.Parameter) and not first.is_inference()
        if traced or form is None or made_of_rows is None or not plain:
            return object()  # equal to nothing else
        storage = first.untyped_storage()
        self._memory.setdefault(storage._cdata, StorageWeakRef(storage))
        memory = storage._cdata, first.storage_offset(), first.dtype, first._version
        layout = tuple(first.shape), first.stride()
        stride = state.stride
        chosen = None if stride is None else (stride.samples, stride.positions, stride.first)
        broadcast = state.broadcast or bool(state.pending.summed)
        return forward_pass, memory, layout, form, made_of_rows, chosen, broadcast
