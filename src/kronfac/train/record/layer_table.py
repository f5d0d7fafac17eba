"""What K-FAC did with each layer, for events and reports."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kronfac.distributed.overview import owners
from kronfac.optimizer.base import Preconditioned
from kronfac.state.layer_state import LayerState


def describe_layers(
    optimizer: Preconditioned, seconds: Mapping[str, Mapping[str, float]]
) -> dict[str, Any]:
    """Fields of the ``layers`` event; seconds are given by layer and phase, as far as known."""
    ours = optimizer._preconditioner
    states = list(ours.layers.values())
    taken = {p for state in states for p in state.layer.parameters}
    placement = optimizer.placement
    return {
        "layers": [_row(optimizer, state, seconds.get(state.name, {})) for state in states],
        "skipped": [
            {"name": name, "why": ours.reasons.get(name, "")}
            for parameter, name in optimizer._names().items()
            if parameter not in taken
        ],
        "scheme": "one process" if placement is None else str(placement.scheme),
    }


def _row(
    optimizer: Preconditioned, state: LayerState, seconds: Mapping[str, float]
) -> dict[str, Any]:
    coordinator = optimizer._preconditioner.coordinator
    row: dict[str, Any] = {
        "name": state.name,
        "kind": state.layer.kind,
        "shape": list(state.layer.matrix_shape),
        "parameters": math.prod(state.layer.matrix_shape),
        "bytes": state.held_bytes,
        "ranks": "0" if coordinator is None else owners(coordinator, state),
    }
    if seconds:
        row["seconds"] = {name: round(value, 6) for name, value in seconds.items()}
    return row
