"""Which first contributions are finite, for all layers at once."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import torch
from torch import Tensor

from kronfac.statistics.pending import Pending, Unscreened
from kronfac.statistics.running import count_dtype

#: What a side has observed of a single statistic.
_Entry = tuple[Pending, Unscreened, str, Tensor]
#: How many numbers are copied side by side at once.
_MOST_ELEMENTS = 2**26


def screen_all(pendings: Iterable[Pending]) -> None:
    """Zero contributions that are not finite and count the others; nothing is read from the device."""
    waiting = [pending for pending in pendings if pending.unscreened]
    for side in ("input", "output"):
        alike: dict[Hashable, list[_Entry]] = {}
        for pending in waiting:
            first = pending.unscreened.get(side)
            if first is None:
                continue
            if len(first.values) > 1:  # they are dropped together
                pending.screen(side)
                continue
            del pending.unscreened[side]
            ((name, value),) = first.values.items()
            alike.setdefault((value.device, value.dtype), []).append((pending, first, name, value))
        for entries in alike.values():
            _screen(entries)


def sizes_of(entries: Iterable[tuple[Pending, str, Tensor]]) -> Tensor:
    """The largest entry of each contribution; a second moment has it on its diagonal."""
    parts = []
    for pending, name, value in entries:
        symmetric = pending.block.statistics[name].symmetric
        # Of many small parts a processor reads less, and other devices have to ask for each.
        reads_part = symmetric and value.device.type == "cpu"
        parts.append(value.diagonal(dim1=-2, dim2=-1) if reads_part else value)
    return torch.stack(torch._foreach_norm(parts, torch.inf))


def _screen(entries: Sequence[_Entry]) -> None:
    sizes = sizes_of((pending, name, value) for pending, _, name, value in entries)
    finite = torch.isfinite(sizes)
    bad = finite.logical_not()
    if bad.device.type == "cpu":
        for (_, _, _, value), wrong in zip(entries, bad.unbind(), strict=True):
            value.masked_fill_(wrong, 0)
    else:
        _zero_alike(entries, bad)
    _count([(pending, first) for pending, first, _, _ in entries], finite)
    add_dropped([pending for pending, _, _, _ in entries], bad)


def _zero_alike(entries: Sequence[_Entry], bad: Tensor) -> None:
    """Zero what is not finite, contributions of equal shape in one kernel."""
    alike: dict[Hashable, list[int]] = {}
    for index, (_, _, _, value) in enumerate(entries):
        alike.setdefault(value.shape, []).append(index)
    for own in alike.values():
        size = max(1, _MOST_ELEMENTS // max(1, entries[own[0]][3].numel()))
        for start in range(0, len(own), size):
            some = own[start : start + size]
            if len(some) == 1:
                entries[some[0]][3].masked_fill_(bad[some[0]], 0)
                continue
            values = [entries[index][3] for index in some]
            wrong = torch.stack([bad[index] for index in some])
            stacked = torch.stack(values)
            stacked.masked_fill_(wrong[(..., *[None] * values[0].dim())], 0)
            torch._foreach_copy_(values, stacked.unbind())


def _count(entries: Sequence[tuple[Pending, Unscreened]], finite: Tensor) -> None:
    counted = finite.to(count_dtype(finite.device)).unbind()
    rows = [first.rows if isinstance(first.rows, int) else 1 for _, first in entries]
    if entries[0][1].forward_pass is None:
        torch._foreach_mul_(counted, rows)
    for (pending, first), flag, count in zip(entries, finite.unbind(), counted, strict=True):
        if first.forward_pass is not None:
            pending.finite[first.forward_pass] = flag
        else:
            pending.count_rows(count if isinstance(first.rows, int) else count * first.rows)


def add_dropped(pendings: Sequence[Pending], bad: Tensor) -> None:
    """Count what is dropped, once for each layer."""
    each = bad.to(torch.int64).unbind()
    before, news = [], []
    for pending, one in zip(pendings, each, strict=True):
        if pending.dropped is None:
            pending.dropped = one.clone()
        else:
            before.append(pending.dropped)
            news.append(one)
    if before:
        torch._foreach_add_(before, news)
