"""From what a hook has seen to what a layer's statistics take in.

Each function returns whether something was recorded that may leave for other ranks at once.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kronfac.capture.broadcast import serves_all_samples, summed_rows
from kronfac.capture.waiting import WaitingInputs
from kronfac.layers.rows import Rows
from kronfac.layers.shards import whole
from kronfac.state.layer_state import LayerState
from kronfac.statistics.contributions import context_of
from kronfac.statistics.forward_pass import Pass
from kronfac.statistics.pending import Pending
from kronfac.statistics.sampled import Stride


def record_input(
    state: LayerState,
    values: tuple[Any, ...],
    forward_pass: Pass,
    into: Pending | None = None,
    waiting: WaitingInputs | None = None,
) -> bool:
    """Take in the inputs of one product; ``into`` keeps them apart from what is pending.

    ``waiting`` is where inputs may wait.
    """
    values = tuple(map(whole, values))
    rows = state.layer.inputs(values)
    if rows is None:
        return False
    broadcast = serves_all_samples(state, rows, values[0], forward_pass)
    if state.block.holds_rows and (broadcast or rows.samples != forward_pass.samples):
        state.fall_back_to_expand()
    pending = into or state.pending
    if not broadcast:
        pending.count_whole(rows, forward_pass)
        chosen = _choose(state, rows, forward_pass)
        if chosen is None:
            pending.skip_input(values[0].device)
            return True
        rows = chosen
    if state.block.holds_rows:
        state.block.check_rows(rows)
        pending.hold_input(rows, forward_pass)
        return True
    if waiting is not None and not broadcast and waiting.takes(state, rows, values[0]):
        waiting.add(state, pending, rows)
        return True
    times = forward_pass.samples if broadcast else 1  # one row for each sample
    found = state.block.observe_input(rows, context_of(forward_pass, state.solution_in_use))
    if times != 1:
        found = {name: value.mul_(state.block.weight(name, times)) for name, value in found.items()}
    pending.add_input(found, rows.count * times)
    return True


def record_output(
    state: LayerState,
    forward_pass: Pass,
    grad: Tensor,
    kept: tuple[Any, ...],
    draw: int,
    share: float,
) -> bool:
    """Take in the gradient of one product's output."""
    grad, kept = whole(grad), tuple(map(whole, kept))
    rows = state.layer.outputs(grad, kept)
    grouped = rows.samples == forward_pass.samples
    if serves_all_samples(state, rows, kept[0] if kept else grad, forward_pass):
        _sum_output(state, rows, forward_pass, kept, draw, share)
        return False
    if not grouped and state.layer.unit_wise:
        state.note = "rows not grouped by sample: each counts as one"
        rows = state.layer.ungrouped_outputs(grad, kept)
    elif not grouped and state.block.holds_rows:
        state.fall_back_to_expand()
    chosen = _choose(state, rows, forward_pass)
    if _stride(state) is not None:
        state.pending.count_chosen(chosen, rows, forward_pass)
    if chosen is None:
        state.pending.skip_output(forward_pass, grad.device)
        return True
    rows = chosen
    if state.block.holds_rows and grouped:
        if draw:  # each adds as much as the first
            state.block.check_rows(rows, draw + 1)
        state.pending.hold_output(rows, forward_pass, draw, share)
    else:
        found = state.block.observe_output(rows, context_of(forward_pass, state.solution_in_use))
        state.pending.add_output(found, forward_pass, share)
    return True


def _choose(state: LayerState, rows: Rows, forward_pass: Pass) -> Rows | None:
    """The rows of a call that statistics are taken from, the same on both sides; ``None`` if none."""
    stride = _stride(state)
    if stride is None or not rows.samples:
        return rows
    return stride.choose(rows, forward_pass, positions=state.block.leaves_out == "rows")


def _stride(state: LayerState) -> Stride | None:
    """How a layer leaves rows out, if it does."""
    if state.block.leaves_out == "nothing" or state.stride is None:
        return None
    return state.stride if state.stride.leaves_out else None


def _sum_output(
    state: LayerState,
    rows: Rows,
    forward_pass: Pass,
    kept: tuple[Any, ...],
    draw: int,
    share: float,
) -> None:
    """Add up the gradient of an input that stands for all samples, until the step."""
    if not any(one.source == "output" for one in state.block.statistics.values()):
        return
    summed = summed_rows(state.layer, rows, kept)
    if not state.pending.hold_summed(summed, forward_pass, draw, share):
        state.note = "one input for all samples, of changing size"
