"""The table that says what is done with every parameter of a model."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence

from kronfac.layer_state import LayerState

_WIDTH = 80


def describe(
    title: str,
    states: Sequence[LayerState],
    left_out: Mapping[str, tuple[int, str]],
    update_bytes: int = 0,
) -> str:
    """Format layers, their sizes and memory, then every parameter that is left out and why."""
    lines = [title]
    if states:
        rows = [_layer_row(state) for state in states]
        lines += _table(["layer", "type", "d_out x d_in", "method", "memory"], rows)
    total = sum(state.held_bytes for state in states)
    weights = sum(math.prod(state.layer.matrix_shape) for state in states)
    peak = sum(state.block.cost.statistics_bytes for state in states)
    lines += [
        f"{len(states)} layers, {weights:,} parameters preconditioned.",
        f"Memory: {_bytes(total)} for statistics and solutions, and another {_bytes(peak)} for a",
        "moment when statistics are taken.",
    ]
    if update_bytes:
        lines.append(f"The last update, which the quadratic model keeps: {_bytes(update_bytes)}.")
    notes = [f"  {_shorten(f'{state.name}: {state.note}', 76)}" for state in states if state.note]
    if notes:
        lines += ["Notes:", *notes]
    lines += _left_out_lines(left_out)
    return "\n".join(lines)


def _layer_row(state: LayerState) -> list[str]:
    *batch, d_out, d_in = state.layer.matrix_shape
    size = f"{d_out} x {d_in}" + (f" ({batch[0]} groups)" if batch else "")
    if state.layer.unit_wise:
        size = f"{batch[0]} x {d_in}"
    kind = _shorten(state.layer.kind, 12)
    return [state.name or "(model)", kind, size, state.block.label, _bytes(state.held_bytes)]


def _left_out_lines(left_out: Mapping[str, tuple[int, str]]) -> list[str]:
    if not left_out:
        return ["No parameter is left out."]
    count = sum(size for size, _ in left_out.values())
    lines = [f"Not preconditioned ({count:,} parameters, the base optimizer's own step):"]
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
