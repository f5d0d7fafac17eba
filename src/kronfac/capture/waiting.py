"""Inputs that wait for the end of the forward, where those of equal shapes are taken together.

On an accelerator a kernel for each layer costs more than the copy that puts inputs side by side. So do,
on a CPU, the many small products of a convolution's borders, if its images are few. Waiting costs no
memory: only inputs wait that autograd keeps for the backward pass anyway, and to which nothing can be
written before it without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kronfac.capture.hooks import inside_backward
from kronfac.layers.conv import ConvLayer
from kronfac.layers.linear import LinearLayer
from kronfac.layers.rows import Rows
from kronfac.layers.saved_tensors import saves_elsewhere
from kronfac.layers.together import covariances, form_of, source_of
from kronfac.linalg import devices
from kronfac.state.layer_state import LayerState
from kronfac.state.timing import Phases
from kronfac.statistics.pending import Pending

#: Told of each side of a call that has been observed.
Listener = Callable[[LayerState, str], None]

_FORWARDS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
#: Images with more numbers than this keep a CPU busy by themselves.
_FEW_ELEMENTS = 1 << 20


@dataclass
class _Waiting:
    state: LayerState
    pending: Pending
    name: str
    rows: Rows


class WaitingInputs:
    """The inputs of a forward that have not been taken in yet."""

    def __init__(self, phases: Phases) -> None:
        self.phases = phases
        self._entries: list[_Waiting] = []
        #: Layers whose statistics will have grown.
        self._grown: list[LayerState] = []

    def __bool__(self) -> bool:
        return bool(self._entries)

    def clear(self) -> None:
        """Forget them."""
        self._entries.clear()
        self._grown.clear()

    def takes(self, state: LayerState, rows: Rows, first: Tensor) -> bool:
        """Whether rows are a plain second moment's, and nothing but a view of the input."""
        source = source_of(rows)
        if state.block.input_moment is None or source is None:
            return False
        if not devices.wants_few_kernels(source.device) and source.numel() > _FEW_ELEMENTS:
            return False
        return bool(source.untyped_storage()._cdata == first.untyped_storage()._cdata)

    def add(self, state: LayerState, pending: Pending, rows: Rows) -> None:
        """Let the rows of a call wait."""
        name = state.block.input_moment
        assert name is not None
        self._entries.append(_Waiting(state, pending, name, rows))

    def hand_over(self, before: Pending, after: Pending) -> None:
        """What waits for one is for another."""
        for one in self._entries:
            if one.pending is before:
                one.pending = after

    def tell(self, state: LayerState, listener: Listener | None) -> None:
        """Tell who listens that a layer's statistics have grown, once nothing waits."""
        if self:
            self._grown.append(state)
        elif listener is not None:
            listener(state, "input")

    def release(self, listener: Listener | None) -> None:
        """Take all of them in, and tell who listens."""
        entries, grown = list(self._entries), list(self._grown)
        self.clear()
        alike: dict[Hashable, list[_Waiting]] = {}
        for one in entries:
            key = form_of(one.rows), one.state.block.narrow_rows
            alike.setdefault(key, []).append(one)
        with torch.no_grad(), self.phases("observe-input"):
            for some in alike.values():
                self._take_in(some)
        if listener is not None:
            for state in grown:
                listener(state, "input")

    def _take_in(self, some: Sequence[_Waiting]) -> None:
        names = [one.state.name for one in some]
        with self.phases.part("observe-input", *names):
            found = covariances([one.rows for one in some], some[0].state.block.narrow_rows)
            for one, value in zip(some, found, strict=True):
                one.pending.add_input({one.name: value}, one.rows.count)


def may_wait(state: LayerState, inputs: Sequence[Any], product: Tensor) -> bool:
    """Whether autograd keeps the input of a call as it is until the backward pass."""
    first, module, layer = inputs[0], state.layer.module, state.layer
    if type(first) is not Tensor or type(product) is not Tensor:
        return False
    few = devices.wants_few_kernels(first.device)
    if type(layer) not in ((LinearLayer, ConvLayer) if few else (ConvLayer,)):
        return False
    if "forward" in vars(module):
        return False
    if type(module).forward not in [kind.forward for kind in _FORWARDS]:
        return False
    if type(layer.weight) is not nn.Parameter or layer.handle is not None:
        return False  # statistics of sharded layers leave one by one
    same = first.dtype == product.dtype == layer.factor_dtype
    return same and not saves_elsewhere() and not inside_backward()
