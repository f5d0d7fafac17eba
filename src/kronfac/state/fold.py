"""Folding: what was observed since the last step goes into the running averages."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from kronfac.state.layer_state import LayerState
from kronfac.statistics.contributions import largest_sum
from kronfac.statistics.normalizer import Normalizer
from kronfac.statistics.pending import Pending
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
    found = state.pending.contribution(name, normalizer, in_place=not preview, share=share)
    if found is not None:
        running.add(*found)
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
            if not _is_simple(state, name):
                fold(state, name, decay, normalizer, share=share)
                continue
            running, total = state.running[name], state.pending.sums[name]
            begun = running.sum is not None and running.count is not None
            kind = total.device, total.dtype, running.statistic.decay, begun
            alike.setdefault(kind, []).append((state, name))
    for chosen in alike.values():
        _fold_alike(chosen, decay, normalizer, share)


def _is_simple(state: LayerState, name: str) -> bool:
    """Whether a statistic is the sum of what its layer has observed itself, and nothing else."""
    one, pending = state.running[name].statistic, state.pending
    simple = one.combine == "sum" and not one.occurrences and one.source in ("input", "output")
    if name not in pending.sums or not simple or name in pending.shared_sums:
        return False
    return pending.rows is not None if one.source == "input" else bool(pending.finite)


def _fold_alike(
    chosen: Sequence[Named], decay: float, normalizer: Normalizer, share: float
) -> None:
    ordered, counts = [], []
    by_degree: dict[int, list[Named]] = {}
    for state, name in chosen:
        if state.running[name].statistic.source == "input":
            assert state.pending.rows is not None
            ordered.append((state, name))
            counts.append(state.pending.rows)
        else:
            by_degree.setdefault(state.running[name].statistic.degree, []).append((state, name))
    for degree, found in by_degree.items():
        outputs = _by_counting(found)
        ordered += [one for alike in outputs for one in alike]
        counts += _scale(outputs, normalizer, degree)
    running = [state.running[name] for state, name in ordered]
    totals = [state.pending.sums[name] for state, name in ordered]
    if share != 1.0:
        totals, counts = [one * share for one in totals], [one * share for one in counts]
    own = running[0].statistic.decay
    _add_all(running, totals, counts, decay if own is None else own)


def _by_counting(chosen: Sequence[Named]) -> list[list[Named]]:
    """Output statistics, together where the same passes and shares of rows count."""
    alike: dict[Hashable, list[Named]] = {}
    for state, name in chosen:
        pending = state.pending
        key = tuple(pending.finite), tuple(pending.shares().items())
        alike.setdefault(key, []).append((state, name))
    return list(alike.values())


def _scale(outputs: list[list[Named]], normalizer: Normalizer, degree: int) -> list[Tensor]:
    """Scale output statistics in place and return their counts; what would overflow is dropped."""
    chosen = [(state.pending, name) for alike in outputs for state, name in alike]
    totals = [pending.sums[name] for pending, name in chosen]
    scale = normalizer.scale(degree)
    sizes = sizes_of((pending, name, pending.sums[name]) for pending, name in chosen)
    fits = sizes * scale < largest_sum(sizes.dtype)
    torch._foreach_mul_(totals, (fits.to(sizes.dtype) * scale).unbind())
    dropped = torch.empty_like(fits, dtype=torch.int64)
    add_dropped([pending for pending, _ in chosen], torch.logical_not(fits, out=dropped))
    counts = [_counts([state.pending for state, _ in alike], normalizer) for alike in outputs]
    return list(((torch.cat(counts) if len(counts) > 1 else counts[0]) * fits).unbind())


def _counts(pendings: Sequence[Pending], normalizer: Normalizer) -> Tensor:
    """What counts of layers that have seen the same passes."""
    passes = pendings[0].finite
    finite = {one: torch.stack([pending.finite[one] for pending in pendings]) for one in passes}
    return normalizer.count(finite, pendings[0].shares())


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
