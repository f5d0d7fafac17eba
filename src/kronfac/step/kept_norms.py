"""Weights whose scale the loss does not depend on keep their norm.

A gradient is orthogonal to such a weight. Every step makes the weight longer, and all later ones turn it
by less: a decay that no schedule knows of, fast where steps are long. Here it stays as long as it was
when :mod:`.scale_free` found it. With ``u`` for the step and ``r`` for the rate, what is written is

    ``(w - w')/r``, ``w' = n·(w - r·u)/‖w - r·u‖``

instead of ``u``: plain SGD goes to ``w'``, and nobody else touches the weight. Other bases, which make
something else of a gradient, let it grow.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from kronfac.distributed.coordinator import Coordinator
from kronfac.layers.parameter_view import ShardedView
from kronfac.layers.shards import local
from kronfac.state.layer_state import LayerState
from kronfac.statistics.running import count_dtype
from kronfac.step.lengths import side_by_side

#: Learning rates of the parameters that plain SGD steps.
Rates = dict[nn.Parameter, float | Tensor]


def has_norms(model: nn.Module) -> bool:
    """Whether there are norms of single channels, in front of which weights have no scale."""
    return any(isinstance(module, _NormBase) for module in model.modules())


def plain_rates(groups: Iterable[dict[str, Any]]) -> Rates:
    """Learning rates of parameters from which the base takes rate times gradient and nothing else."""
    rates: Rates = {}
    for group in groups:
        is_sgd = group.get("momentum") == 0 and "dampening" in group
        if is_sgd and not group.get("maximize"):
            rates |= dict.fromkeys(group["params"], group["lr"])
    return rates


def keep_norms(states: Iterable[LayerState], rates: Rates) -> None:
    """Write steps of whole weights that leave their norms as they are."""
    alike: dict[Hashable, list[LayerState]] = {}
    for state in states:
        weight, is_whole = state.layer.weight, not isinstance(state.view, ShardedView)
        if is_whole and "pace" in state.buffers and _may_keep(state, rates):
            kind = weight.device, weight.dtype, state.view.weight_grad.dtype
            alike.setdefault(kind, []).append(state)
    for own in alike.values():
        weights = [state.view.value_of(state.layer.weight) for state in own]
        steps = [state.view.weight_grad for state in own]
        kept = _kept(own)
        rate = side_by_side([rates[state.layer.weight] for state in own], kept)
        ahead = _ahead(weights, steps, rate)
        norms = torch.stack(torch._foreach_norm(ahead, dtype=kept.dtype))
        _write(weights, steps, rate, kept, norms)


def keep_norms_of_shards(
    states: Iterable[LayerState], rates: Rates, coordinator: Coordinator
) -> None:
    """The same for weights of which each rank has a part: all ranks, when steps are where they belong."""
    chosen = [s for s in states if isinstance(s.view, ShardedView) and _may_keep(s, rates)]
    if not chosen:
        return
    weights = [local(state.layer.weight.detach()) for state in chosen]
    steps = [local(_gradient(state)) for state in chosen]
    taken = [rates[state.layer.weight] for state in chosen]
    device = weights[0].device
    wide = count_dtype(device)
    nothing = torch.zeros((), dtype=wide, device=device)
    rate, one = side_by_side(taken, nothing), torch.ones_like(nothing)
    squares = [
        there.to(wide).square().sum() * coordinator.part_weight(state.layer.weight)
        for state, there in zip(chosen, _ahead(weights, steps, rate), strict=True)
    ]
    known = [_kept([s])[0].to(nothing) if s.is_worker else nothing for s in chosen]
    counts = [one if state.is_worker else nothing for state in chosen]
    total = coordinator.total(torch.stack([*squares, *known, *counts])).to(device, wide)
    square, kept, workers = total.view(3, -1).unbind()
    _write(weights, steps, rate, (kept / workers).to(wide), square.sqrt())


def _may_keep(state: LayerState, rates: Rates) -> bool:
    """What all ranks know of a layer."""
    known = state.rule == "orthogonal" and state.has_curvature and not state.layer.part
    return known and state.is_preconditioned and state.has_gradient and state.layer.weight in rates


def _gradient(state: LayerState) -> Tensor:
    grad = state.layer.weight.grad
    assert grad is not None
    return grad


def _kept(states: Sequence[LayerState]) -> Tensor:
    """Norms of whole weights that are to be kept; 0 where they may change."""
    rows = [math.sqrt(math.prod(state.layer.matrix_shape[:-1])) for state in states]
    found = torch._foreach_mul([state.buffers["pace"][1] for state in states], rows)
    return torch.stack(found)


def _ahead(
    weights: Sequence[Tensor], steps: Sequence[Tensor], rate: float | Tensor
) -> list[Tensor]:
    """Where steps lead."""
    if isinstance(rate, float):
        return list(torch._foreach_add(list(weights), list(steps), alpha=-rate))
    moves = torch._foreach_mul(list(steps), list(rate.to(steps[0].dtype).unbind()))
    return list(torch._foreach_sub(list(weights), moves))


def _write(
    weights: Sequence[Tensor],
    steps: Sequence[Tensor],
    rate: float | Tensor,
    kept: Tensor,
    norms: Tensor,
) -> None:
    """``q·u + (1 - q)/r·w`` in place of u, with ``q = n/‖w - r·u‖``; where nothing is kept q is 1."""
    ratio = kept / norms
    back = ((1 - ratio) / rate).to(weights[0].dtype)
    usable = (kept > 0) & (norms > 0) & norms.isfinite() & back.isfinite()
    own = torch.where(usable, ratio, 1).to(steps[0].dtype).unbind()
    theirs = torch.where(usable, back, 0).unbind()
    torch._foreach_mul_(list(steps), list(own))
    torch._foreach_add_(list(steps), torch._foreach_mul(list(weights), list(theirs)))
