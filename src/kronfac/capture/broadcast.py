"""Inputs that one forward uses for all of its samples, such as the positions ``[1, T]`` of GPT-2.

The gradient that reaches such a row is a sum over samples. Its statistic is ``h hᵀ`` with ``h`` the sum
over all samples of the step, whichever micro-batch or rank they are in, and counts them once. So rows are
added up until the step, then over ranks, and only then squared: no split of the batch changes the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from kronfac.layers import Layer
from kronfac.layers.rows import DenseRows, Rows
from kronfac.protocol.context import Context
from kronfac.state.layer_state import LayerState
from kronfac.statistics.forward_pass import Pass
from kronfac.statistics.normalizer import Normalizer
from kronfac.statistics.running import count_dtype

#: Adds a flat tensor up over ranks, in place.
AddUp = Callable[[Tensor], None]


def serves_all_samples(state: LayerState, rows: Rows, first: Tensor, forward_pass: Pass) -> bool:
    """Whether rows stand for all samples of a pass, given the input or output that they come from."""
    lone = state.layer.picks_columns and first.dim() == 1
    if rows.samples != 1 and not lone:
        return False
    if forward_pass.samples == 1:  # it looks like any other
        return state.broadcast or bool(state.pending.summed)
    if lone and len(first) == forward_pass.samples:
        return _are_positions(state, first)  # or one token of each sample
    if not state.layer.picks_columns and first.dim() < 3:
        return False  # one row may be all that was routed to an expert
    # [1, N, d]: a sequence of length one with its samples in the second dimension
    return not (first.dim() == 3 and first.shape[1] == forward_pass.samples)


def _are_positions(state: LayerState, tokens: Tensor) -> bool:
    """Whether tokens are 0, 1, 2, ...; the host looks once."""
    if state.embeds_positions is None:
        order = torch.arange(len(tokens), device=tokens.device, dtype=tokens.dtype)
        state.embeds_positions = tokens.device.type != "meta" and torch.equal(tokens, order)
    return state.embeds_positions


def summed_rows(layer: Layer, rows: Rows, args: Sequence[Any]) -> Tensor:
    """Rows ``[*b, 1, S, d]`` of a call in a shape that does not depend on the call, if possible."""
    if layer.unit_wise:
        return rows.summed().unsqueeze(-2)
    dense = rows.dense()
    if not layer.picks_columns:
        return dense
    width = layer.matrix_shape[-1]
    whole = dense.new_zeros(1, width, dense.shape[-1])
    return whole.index_add_(1, args[0].reshape(-1), dense.reshape(1, -1, dense.shape[-1]))


def agree(states: Sequence[LayerState], largest: Callable[[list[float]], Tensor] | None) -> None:
    """Settle which layers have such inputs: alike on all ranks, whose rows must have one size.

    ``largest`` gives maxima over ranks; ``None`` in one process.
    """
    found = [float(state.pending.summed_size) for state in states]
    if largest is None:
        for state, size in zip(states, found, strict=True):
            state.broadcast = state.broadcast or size > 0
        return
    maxima = largest([*found, *(-size if size else -math.inf for size in found)]).tolist()
    for index, state in enumerate(states):
        most, least = maxima[index], -maxima[index + len(states)]
        if most > 0:
            state.broadcast = state.broadcast or most == least
            state.broadcast_size = int(most) if most == least else 0


def changes_in_size(state: LayerState) -> bool:
    """Whether ranks have to agree on the size at every step: nothing about the layer fixes it."""
    fixed = state.layer.picks_columns or state.layer.unit_wise
    return state.broadcast and not fixed


def settle(
    states: Iterable[LayerState], normalizer: Normalizer, add_up: AddUp | None, adds: bool
) -> None:
    """Add rows up over ranks and turn them into contributions, on a rank that adds them."""
    for state in states:
        pending = state.pending
        if state.broadcast:
            if add_up is None:
                state.broadcast_size = pending.summed_size
            flat = _flat(state, normalizer)
            if add_up is not None and state.broadcast_size:
                add_up(flat)
            if adds and state.broadcast_size:
                _contribute(state, flat)
        elif pending.summed:
            state.note = "one input for all samples, other on other ranks"
        pending.summed.clear()


def _flat(state: LayerState, normalizer: Normalizer) -> Tensor:
    """This rank's rows of all draws and the number of its samples, or zeros, ``[size + 1]``."""
    layer, summed = state.layer, state.pending.summed
    dtype, device = layer.factor_dtype, layer.weight.device
    flat = torch.zeros(state.broadcast_size + 1, dtype=dtype, device=device)
    if state.pending.summed_size == state.broadcast_size and summed:
        rows = torch.cat([one.rows.reshape(-1) for one in summed.values()])
        rows = rows * normalizer.scale(1)
        finite = torch.isfinite(rows.sum())
        flat[:-1] = rows.masked_fill_(~finite, 0)
        passes = next(iter(summed.values())).passes
        flat[-1] = normalizer.count(dict.fromkeys(passes, finite)).to(dtype)
    return flat


def _contribute(state: LayerState, flat: Tensor) -> None:
    layer, pending = state.layer, state.pending
    *batch, d_out, _ = layer.matrix_shape
    width = layer.matrix_shape[-1] if layer.unit_wise else d_out
    shares = [one.share for one in pending.summed.values()] or [1.0]
    rows = flat[:-1].reshape(len(shares), *batch, 1, -1, width)
    context = Context(state.solution_in_use)
    for each, share in zip(rows, shares, strict=True):
        for name, value in state.block.observe_output(DenseRows(each), context).items():
            before = pending.shared_sums.get(name)
            value = value * state.block.weight(name, share)
            if before is not None:
                value = pending.together(name, before, value)
            pending.shared_sums[name] = value
    pending.shared_count = flat[-1].to(count_dtype(flat.device))
