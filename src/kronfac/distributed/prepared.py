"""Which layers keep inverses beside their eigenvectors, where memory is short."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kronfac.state.layer_state import LayerState

#: Elements of inverses for each element of the parameters that a rank works on: those of square layers.
PER_PARAMETER = 2


def keep_prepared(states: Sequence[LayerState]) -> None:
    """Let layers keep what blocks prepare as far as there is room, the squarest first.

    Others apply their solutions as they are, in more products. All ranks that work on a layer work on the
    same ones, and choose the same.
    """
    own = [state for state in states if state.is_worker and state.view.slice is None]
    room = PER_PARAMETER * sum(math.prod(state.layer.matrix_shape) for state in own)
    able = [state for state in own if state.block.prepares]
    for state in sorted(able, key=_ratio):
        room -= _elements(state)
        state.keeps_prepared = room >= 0


def _elements(state: LayerState) -> int:
    *batch, d_out, d_in = state.layer.matrix_shape
    return math.prod(batch) * (d_out**2 + d_in**2)


def _ratio(state: LayerState) -> float:
    return _elements(state) / math.prod(state.layer.matrix_shape)
