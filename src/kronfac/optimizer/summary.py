"""The table that says what is done with every parameter of a model."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Mapping, Sequence

from torch import nn
from torch.nn.parameter import UninitializedParameter

from kronfac.distributed.overview import Overview
from kronfac.state.layer_state import LayerState
from kronfac.step.pipeline import Preconditioner

_WIDTH = 80
_HEADER = ("layer", "type", "d_out x d_in", "method", "memory")


def describe(
    title: str,
    states: Sequence[LayerState],
    left_out: Mapping[str, tuple[int, str]],
    lengths: Mapping[str, LayerState] | None = None,
    update_bytes: int = 0,
    ranks: Overview | None = None,
    remark: Sequence[str] = (),
) -> str:
    """Format layers, their sizes and memory, then every parameter that is left out and why.

    ``lengths`` are those of them, by name, that have no curvature, but steps by the rule of lengths. With
    several ranks, also who solves each layer; memory is then that of this rank.
    """
    lines = [title] if ranks is None else [title, _shorten(ranks.line, _WIDTH)]
    if states:
        header, rows = list(_HEADER), [_layer_row(state) for state in states]
        if ranks is not None:
            header.insert(-1, "owner")
            for state, row in zip(states, rows, strict=True):
                row.insert(-1, ranks.owners[state])
        lines += _table(header, rows)
    weights = sum(math.prod(state.layer.matrix_shape) for state in states)
    lines.append(f"{len(states)} layers, {weights:,} parameters preconditioned.")
    lengths = lengths or {}
    lines += _memory_lines([*states, *lengths.values()], ranks)
    if update_bytes:
        lines.append(f"The last update, which the quadratic model keeps: {_bytes(update_bytes)}.")
    notes = [f"  {_shorten(f'{state.name}: {state.note}', 76)}" for state in states if state.note]
    if notes:
        lines += ["Notes:", *notes]
    lines += [_shorten(line, _WIDTH) for line in remark]
    if not left_out:
        return "\n".join([*lines, "No parameter is left out."])
    chosen = {name: one for name, one in left_out.items() if name in lengths}
    rest = {name: one for name, one in left_out.items() if name not in lengths}
    lines += _left_out_lines("Not preconditioned, but with momentum and steps as long", chosen)
    lines += _left_out_lines("Not preconditioned", rest)
    return "\n".join(lines)


def left_out(
    preconditioner: Preconditioner,
    names: Mapping[nn.Parameter, str],
    trained: Collection[nn.Parameter],
) -> dict[str, tuple[int, str]]:
    """Size of every parameter that is not preconditioned, and why, by name."""
    states = preconditioner.layers.values()
    layers = [state.layer for state in states if state.has_curvature]
    active = [layer for layer in layers if layer.weight.requires_grad]
    taken = {p for layer in active for p in layer.parameters}
    beside_frozen = {layer.bias for layer in layers if layer not in active}
    unfrozen = {layer.bias for layer in active if layer.stale()}
    found = {}
    for parameter, name in names.items():
        if parameter in taken:
            continue
        if not parameter.requires_grad:
            reason = "frozen"
        elif parameter not in trained:
            reason = "not given to the base optimizer"
        elif preconditioner.detached:
            reason = "the optimizer is detached"
        elif parameter in beside_frozen:
            reason = "its weight is frozen"
        elif parameter in unfrozen:
            reason = "it joins its layer at the next factor step"
        else:
            reason = preconditioner.reasons.get(name, "not a parameter of the model")
        lazy = isinstance(parameter, UninitializedParameter)
        found[name] = (0 if lazy else parameter.numel(), reason)
    return found


def _memory_lines(states: Sequence[LayerState], ranks: Overview | None) -> list[str]:
    total = sum(state.held_bytes for state in states)
    observed = [state for state in states if state.observed]
    peak = sum(state.observed_bytes for state in observed)
    row = sum(state.row_bytes for state in observed)
    rows = [f"Rows are kept until the step and gathered: {_bytes(row)} for one row of every layer."]
    if ranks is None:
        return [
            f"Memory: {_bytes(total)} for statistics and solutions, and another {_bytes(peak)} for a",
            "moment when statistics are taken.",
            *(rows if row else ()),
        ]
    # What was observed since the last refresh waits on every rank, also where it is not kept.
    kept = sum(state.kept_bytes for state in observed)
    waiting = 2 * peak - kept if ranks.unit_bytes is None else kept + ranks.unit_bytes
    return [
        f"Memory of this rank: {_bytes(total)} for statistics and solutions, and up to",
        f"{_bytes(waiting)} until statistics are added up over ranks, and "
        f"{_bytes(ranks.message_bytes)} for messages.",
        *(rows if row else ()),
    ]


def _layer_row(state: LayerState) -> list[str]:
    *batch, d_out, d_in = state.layer.matrix_shape
    size = f"{d_out} x {d_in}" + (f" ({batch[0]} groups)" if batch else "")
    if state.layer.unit_wise:
        size = f"{batch[0]} x {d_in}"
    kind = _shorten(state.layer.kind, 12)
    return [state.name or "(model)", kind, size, state.block.label, _bytes(state.held_bytes)]


def _left_out_lines(title: str, left_out: Mapping[str, tuple[int, str]]) -> list[str]:
    if not left_out:
        return []
    count = sum(size for size, _ in left_out.values())
    lines = [f"{title} ({count:,} parameters):"]
    by_reason: dict[str, list[str]] = {}
    for name, (_, reason) in left_out.items():
        by_reason.setdefault(reason, []).append(name)
    for reason, names in by_reason.items():
        lines.append(_shorten(f"  {reason}:", _WIDTH))
        wrapped = textwrap.wrap(" ".join(names), _WIDTH - 4, break_on_hyphens=False)
        lines += [f"    {line}" for line in wrapped]
    return lines


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    """Columns as wide as needed; names are shortened in the middle to stay within 80 columns."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    excess = sum(widths) + 2 * (len(widths) - 1) - _WIDTH
    widths[0] = max(min(widths[0], 8), widths[0] - max(0, excess))
    lines = []
    for row in [header, *rows]:
        cells = [_shorten(row[0], widths[0]).ljust(widths[0])]
        cells += [cell.ljust(width) for cell, width in zip(row[1:-1], widths[1:-1], strict=True)]
        cells.append(row[-1].rjust(widths[-1]))
        lines.append("  ".join(cells).rstrip())
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]


def _shorten(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    keep = width - 2
    return text[: keep // 2] + ".." + text[len(text) - (keep - keep // 2) :]


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
