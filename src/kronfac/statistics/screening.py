"""Which first contributions are finite, for all layers at once."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from kronfac.linalg import devices
from kronfac.linalg.largest import largest_entries
from kronfac.statistics.contributions import Unscreened
from kronfac.statistics.pending import Pending
from kronfac.statistics.running import count_dtype

#: What a side has observed of a single statistic.
_Entry = tuple[Pending, Unscreened, str, Tensor]
#: How many numbers are copied side by side at once.
_MOST_ELEMENTS = 2**26


def screen_all(pendings: Iterable[Pending]) -> None:
    """Zero contributions that are not finite and count the others; nothing is read from the device."""
    alike: dict[Hashable, list[_Entry]] = {}
    waiting = [pending for pending in pendings if pending.unscreened]
    for side in ("input", "output"):
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
        reads_part = symmetric and not devices.wants_few_kernels(value.device)
        parts.append(value.diagonal(dim1=-2, dim2=-1) if reads_part else value)
    return largest_entries(parts)


def _screen(entries: Sequence[_Entry]) -> None:
    """Those of the input side come first."""
    sizes = sizes_of((pending, name, value) for pending, _, name, value in entries)
    finite = sizes < torch.inf
    bad = finite.logical_not()
    if devices.wants_few_kernels(bad.device):
        zero_together([value for _, _, _, value in entries], bad)
    else:
        for (_, _, _, value), wrong in zip(entries, bad.unbind(), strict=True):
            value.masked_fill_(wrong, 0)
    _count([(pending, first) for pending, first, _, _ in entries], finite)
    pendings = [pending for pending, _, _, _ in entries]
    inputs = sum(first.forward_pass is None for _, first, _, _ in entries)
    dropped = bad.to(torch.int64)
    add_dropped(pendings[:inputs], dropped[:inputs])
    add_dropped(pendings[inputs:], dropped[inputs:])


def zero_together(values: Sequence[Tensor], bad: Tensor) -> None:
    """Zero some tensors, those of which ``bad`` is true, side by side in a few kernels."""
    for start, stop in _portions([value.numel() for value in values]):
        some, wrong = list(values[start:stop]), bad[start:stop].unbind()
        if len(some) == 1:
            some[0].masked_fill_(wrong[0], 0)
            continue
        flat = torch.cat([value.reshape(-1) for value in some])
        mask = torch.cat([one.expand(v.numel()) for one, v in zip(wrong, some, strict=True)])
        parts = flat.masked_fill_(mask, 0).split([value.numel() for value in some])
        torch._foreach_copy_(some, [p.view(v.shape) for p, v in zip(parts, some, strict=True)])


def _portions(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ranges of tensors that have together no more numbers than are copied at once."""
    start = found = 0
    for index, size in enumerate(sizes):
        if index > start and found + size > _MOST_ELEMENTS:
            yield start, index
            start, found = index, 0
        found += size
    if sizes:
        yield start, len(sizes)


def _count(entries: Sequence[tuple[Pending, Unscreened]], finite: Tensor) -> None:
    counted = finite.to(count_dtype(finite.device)).unbind()
    rows = [
        first.rows if first.forward_pass is None and isinstance(first.rows, int) else 1
        for _, first in entries
    ]
    torch._foreach_mul_(counted, rows)
    for (pending, first), flag, count in zip(entries, finite.unbind(), counted, strict=True):
        if first.forward_pass is not None:
            pending.finite[first.forward_pass] = flag
        else:
            pending.count_rows(count if isinstance(first.rows, int) else count * first.rows)


def add_dropped(pendings: Sequence[Pending], dropped: Tensor) -> None:
    """Count what is dropped: 0 or 1 for each layer."""
    if not pendings:
        return
    each = dropped.unbind()
    before, news = [], []
    for pending, one in zip(pendings, each, strict=True):
        if pending.dropped is None:
            pending.dropped = one.clone()
        else:
            before.append(pending.dropped)
            news.append(one)
    if before:
        torch._foreach_add_(before, news)
