"""What K-FAC did with each layer, for events and reports."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kronfac.optimizer.base import Preconditioned
from kronfac.state.layer_state import LayerState


def describe_layers(
    optimizer: Preconditioned, seconds: Mapping[str, Mapping[str, float]]
) -> dict[str, Any]:
    """Fields of the ``layers`` event; seconds are given by layer and phase, as far as known."""
    placement = optimizer.placement
    return {
        "layers": [
            _row(state, optimizer.owners(state), seconds.get(state.name, {}))
            for state in optimizer.layers
        ],
        "skipped": [
            {"name": name, "why": reason} for name, (_, reason) in optimizer.left_out().items()
        ],
        "scheme": "one process" if placement is None else str(placement.scheme),
    }


def _row(state: LayerState, ranks: str, seconds: Mapping[str, float]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "name": state.name,
        "kind": state.layer.kind,
        "shape": list(state.layer.matrix_shape),
        "parameters": math.prod(state.layer.matrix_shape),
        "bytes": state.held_bytes,
        "ranks": ranks,
    }
    if seconds:
        row["seconds"] = {name: round(value, 6) for name, value in seconds.items()}
    return row
