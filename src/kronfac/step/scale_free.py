"""Which weights have a scale that the loss does not depend on, as those in front of a batch norm.

Gradients of such a weight are orthogonal to it, output by output: ``⟨w_i, g_i⟩ = 0``. Any other weight of
``n`` inputs has products of about ``‖w_i‖‖g_i‖/√n``, so that

    ``n·Σ ⟨w_i, g_i⟩² / Σ ‖w_i‖²‖g_i‖²``

is about 1, and rounding makes it 1e-8 in single precision and 1e-4 in bfloat16. It is looked at whenever
a layer is solved, on the device. Where few outputs have nearly all of the gradient, these may be
orthogonal to their weights by chance, and it says nothing.

What is remembered of such a weight is its norm, which :mod:`.kept_norms` keeps and steps are a share of:
a network whose weight is ten times as long is the same network, and takes the same steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from kronfac.distributed.coordinator import Coordinator
from kronfac.layers.conv import ConvLayer
from kronfac.layers.layer import Layer
from kronfac.layers.parameter_view import ShardedView
from kronfac.layers.shards import box_of, is_cut_along, local
from kronfac.state.layer_state import LayerState

#: Below which it counts as zero.
THRESHOLD = 0.01
#: Outputs among which the gradient is spread, at least.
LEAST_OUTPUTS = 4


def mark_scale_free(states: Iterable[LayerState], coordinator: Coordinator, step: int) -> None:
    """Write the norm of each layer's weight into its ``"pace"`` if it is of that kind, and 0 if not.

    It is that of a row, in root mean square, when it is first found to be so. Layers that were solved at
    this step are looked at.
    """
    due = [state for state in states if _is_due(state, step)]
    sharded = [state for state in due if isinstance(state.view, ShardedView)]
    found = {s: _sums(s) for s in due if s.is_worker and not isinstance(s.view, ShardedView)}
    if sharded:
        parts = [_part_sums(state, coordinator) for state in sharded]
        device = parts[0].device
        totals = coordinator.total(torch.cat([part.to(device).reshape(-1) for part in parts]))
        own = totals.split([part.numel() for part in parts])
        for state, part, total in zip(sharded, parts, own, strict=True):
            found[state] = total if part.dim() == 1 else _of_rows(*total.view(3, -1))
    for state, sums in found.items():
        if state.is_worker:
            device, dtype = state.layer.weight.device, state.layer.factor_dtype
            products, bound, squares, weights = sums.to(device).unbind()
            kept = state.buffers.setdefault("pace", torch.zeros(2, dtype=dtype, device=device))[1]
            is_free = state.layer.matrix_shape[-1] * products < THRESHOLD * bound
            norm = (weights / math.prod(state.layer.matrix_shape[:-1])).sqrt().to(dtype)
            now = torch.where(is_free, torch.where(kept > 0, kept, norm), 0)
            known = bound.square() >= LEAST_OUTPUTS * squares.clamp(min=torch.finfo(dtype).tiny)
            kept.copy_(torch.where(known, now, kept))


def forget_scales(states: Iterable[LayerState], step: int) -> None:
    """Where nobody looks at scales, what a checkpoint says of them holds no longer."""
    for state in states:
        if _is_due(state, step) and "pace" in state.buffers:
            state.buffers["pace"][1].zero_()


def _is_due(state: LayerState, step: int) -> bool:
    known = state.rule == "orthogonal" and state.has_curvature  # rows are outputs then
    return known and state.solved_at == step and state.has_gradient


def _sums(state: LayerState) -> Tensor:
    """``Σ ⟨w_i, g_i⟩²``, ``Σ b_i``, ``Σ b_i²``, ``Σ ‖w_i‖²`` of a whole one, ``b_i = ‖w_i‖²‖g_i‖²``."""
    layer, view = state.layer, state.view
    pair = view.value_of(layer.weight), view.weight_grad.detach()
    weight, gradient = (layer.as_matrix(one).to(layer.factor_dtype) for one in pair)
    return _row_sums(weight, gradient)


def _part_sums(state: LayerState, coordinator: Coordinator) -> Tensor:
    """The part of this rank in the same sums, if ranks hold whole rows of the matrix.

    If not, its part in what they are made of: ``[3, d_out]`` with ``⟨w_i, g_i⟩``, ``‖w_i‖²``, ``‖g_i‖²``.
    """
    weight = state.layer.weight
    assert weight.grad is not None
    pair = local(weight.detach()), local(weight.grad)
    here, grad = (one.to(state.layer.factor_dtype) for one in pair)
    if _has_whole_rows(state.layer):
        found = _row_sums(here.flatten(1), grad.flatten(1))
    else:
        products = here * grad, here.square(), grad.square()
        found = torch.stack([_by_row(state.layer, one) for one in products])
    return found * coordinator.part_weight(weight)


def _has_whole_rows(layer: Layer) -> bool:
    """Whether a part of the weight consists of rows of the matrix, on all ranks alike."""
    by_output = isinstance(layer, ConvLayer) or layer.matrix_dim(0) == -2
    return by_output and not layer.part and is_cut_along(layer.weight, 0)


def _by_row(layer: Layer, part: Tensor) -> Tensor:
    """Sums of a part of a tensor shaped like the weight over the rows of its matrix."""
    whole = part.new_zeros(layer.weight.shape)
    whole[box_of(layer.weight, torch.distributed.get_rank())] = part
    return layer.as_matrix(whole).sum(-1).reshape(-1)


def _row_sums(weight: Tensor, gradient: Tensor) -> Tensor:
    products = (weight * gradient).sum(-1)
    return _of_rows(products, weight.square().sum(-1), gradient.square().sum(-1))


def _of_rows(products: Tensor, weights: Tensor, gradients: Tensor) -> Tensor:
    bounds = weights * gradients
    return torch.stack(
        [products.square().sum(), bounds.sum(), bounds.square().sum(), weights.sum()]
    )
