"""Folding: what was observed since the last step goes into the running averages."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from kronfac.state.layer_state import LayerState
from kronfac.statistics.normalizer import Normalizer
from kronfac.statistics.pending import largest_sum
from kronfac.statistics.running import Running
from kronfac.statistics.screening import add_dropped, screen_all, sizes_of

#: A layer, and the name of one of its statistics.
Named = tuple[LayerState, str]


def fold(
    state: LayerState,
    name: str,
    decay: float,
    normalizer: Normalizer | None,
    preview: bool = False,
    share: float = 1.0,
) -> Tensor | None:
    """Decay a statistic's sum and count, add what is pending, and return the sum.

    ``share`` is one over the number of ranks that have observed the same, and add up what they have.

    ``preview`` changes neither: the result is what the sum will be if nothing more is observed, which is
    how statistics can leave before the step. It shares memory with what is pending if there was no sum.
    """
    running = state.running[name]
    own = running.statistic.decay
    decay = decay if own is None else own
    if preview:
        running = running.faded(decay)
    else:
        running.decay(decay)
    pending = state.pending
    is_settled = name in pending.landed or name in pending.shared_sums
    found = pending.contribution(name, normalizer, in_place=not preview)
    if found is not None:
        own = share if running.statistic.combine == "sum" and not is_settled else 1.0
        running.add(*(found if own == 1.0 else (one * own for one in found)))
    return running.sum


def fold_all(
    states: Sequence[LayerState], decay: float, normalizer: Normalizer, share: float = 1.0
) -> None:
    """The same for all statistics of some layers, in a few operations for most of them."""
    screen_all(state.pending for state in states)
    alike: dict[Hashable, list[Named]] = {}
    for state in states:
        for name in state.running:
            lender = state.lender(name)
            if lender is not state and lender.running[name] is state.running[name]:
                continue  # it is folded there
            if (kind := _kind(state, name, decay)) is None:
                fold(state, name, decay, normalizer, share=share)
            else:
                alike.setdefault(kind, []).append((state, name))
    for chosen in alike.values():
        _fold_alike(chosen, decay, normalizer, share)


def _kind(state: LayerState, name: str, decay: float) -> Hashable:
    """What statistics have in common that are folded together; ``None`` for those that are not."""
    running, pending = state.running[name], state.pending
    one, total = running.statistic, pending.sums.get(name)
    simple = one.combine == "sum" and not one.occurrences and one.source in ("input", "output")
    if total is None or not simple or name in pending.shared_sums:
        return None
    if (pending.rows is None) if one.source == "input" else not pending.finite:
        return None
    passes = tuple(pending.finite) if one.source == "output" else ()
    shares = tuple(pending.shares().items()) if one.source == "output" else ()
    begun = running.sum is not None and running.count is not None
    return total.device, total.dtype, one.source, one.degree, one.decay, passes, shares, begun


def _fold_alike(
    chosen: Sequence[Named], decay: float, normalizer: Normalizer, share: float
) -> None:
    first = chosen[0][0].running[chosen[0][1]].statistic
    totals = [state.pending.sums[name] for state, name in chosen]
    if first.source == "input":
        counts = [count for state, _ in chosen if (count := state.pending.rows) is not None]
    else:
        counts = _scale(chosen, totals, normalizer)
    if share != 1.0:
        totals, counts = [one * share for one in totals], [one * share for one in counts]
    running = [state.running[name] for state, name in chosen]
    _add_all(running, totals, counts, decay if first.decay is None else first.decay)


def _scale(chosen: Sequence[Named], totals: list[Tensor], normalizer: Normalizer) -> list[Tensor]:
    """Scale output statistics in place and return their counts; what would overflow is dropped."""
    scale = normalizer.scale(chosen[0][0].running[chosen[0][1]].statistic.degree)
    pendings = [state.pending for state, _ in chosen]
    names = [name for _, name in chosen]
    sizes = sizes_of(zip(pendings, names, totals, strict=True))
    fits = sizes * scale < largest_sum(sizes.dtype)
    torch._foreach_mul_(totals, (fits.to(sizes.dtype) * scale).unbind())
    passes = pendings[0].finite
    finite = {one: torch.stack([pending.finite[one] for pending in pendings]) for one in passes}
    add_dropped(pendings, fits.logical_not())
    return list((normalizer.count(finite, pendings[0].shares()) * fits).unbind())


def _add_all(
    running: Sequence[Running], totals: list[Tensor], counts: list[Tensor], decay: float
) -> None:
    """Decay running averages and add contributions to them."""
    sums = [one.sum for one in running if one.sum is not None]
    known = [one.count for one in running if one.count is not None]
    if len(sums) == len(known) == len(running):
        fading = Running.fading(sums[0].dtype, torch.stack(known), decay).unbind()
        torch._foreach_mul_(sums, fading)
        torch._foreach_mul_(known, fading)
        torch._foreach_add_(sums, totals)
        torch._foreach_add_(known, counts)
        for one in running:
            one.fresh = True
        return
    for one, total, count in zip(running, totals, counts, strict=True):
        one.add(total, count)
