"""Which first contributions are finite, for all layers at once."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import torch
from torch import Tensor

from kronfac.statistics.pending import Pending, Unscreened
from kronfac.statistics.running import count_dtype

#: What a side has observed of a single statistic.
_Entry = tuple[Pending, Unscreened, str, Tensor]


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
    for (_, _, _, value), wrong in zip(entries, bad.unbind(), strict=True):
        value.masked_fill_(wrong, 0)
    _count([(pending, first) for pending, first, _, _ in entries], finite)
    add_dropped([pending for pending, _, _, _ in entries], bad)


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
