"""How large the inputs of layers are, by what their solutions know of them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from kronfac.state.layer_state import LayerState


def take_input_sizes(states: Iterable[LayerState], step: int) -> None:
    """Write the root mean square of each layer's inputs into its ``"inputs"``.

    Layers that were solved at this step are looked at; those of which nothing is known have zero.
    """
    for state in states:
        due = state.rule == "orthogonal" and state.is_worker and state.solved_at == step
        if due and state.has_curvature and state.solution is not None:
            square, weight = state.block.input_square(state.solution), state.layer.weight
            like = torch.zeros((), dtype=state.layer.factor_dtype, device=weight.device)
            held = state.buffers.setdefault("inputs", like)
            held.copy_(like if square is None else square.clamp(min=0).sqrt_())
