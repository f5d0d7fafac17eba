"""Clipping by the norm of all gradients together, before they are preconditioned."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor, nn

from kronfac.layers.shards import local


def clip_gradients(
    parameters: Sequence[nn.Parameter],
    bound: float,
    add_up: Callable[[Tensor], Tensor] | None,
    part_weight: Callable[[nn.Parameter], float] = lambda parameter: 1.0,
) -> None:
    """Scale gradients so that their norm is at most ``bound``; without waiting for the device.

    ``add_up`` adds the squared norms of other ranks, where each of them has a part of the gradients;
    ``part_weight`` says how much its own part then counts, since others may have the same.
    """
    alike: dict[Hashable, list[Tensor]] = {}
    weights: dict[Hashable, float] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            grad, weight = local(parameter.grad), part_weight(parameter)
            kind: Hashable = (grad.device, grad.dtype, grad.is_sparse, weight)
            alike.setdefault(kind, []).append(grad)
            weights[kind] = weight
    device = next((own[0].device for own in alike.values()), torch.device("cpu"))
    wide = torch.float32 if device.type == "mps" else torch.float64
    total = torch.zeros((), dtype=wide, device=device)
    for kind, own in alike.items():
        values = [grad.coalesce().values() if grad.is_sparse else grad for grad in own]
        norms = torch.stack(torch._foreach_norm(values)).to(wide)
        total = total + _on(device, norms.square_().sum()) * weights[kind]
    norm = (total if add_up is None else add_up(total)).sqrt()
    factor = (bound / (norm + 1e-6)).clamp(max=1)
    for own in alike.values():
        precise = torch.promote_types(own[0].dtype, torch.float32)
        own_factor = _on(own[0].device, factor).to(precise)
        if own[0].is_sparse:
            for grad in own:
                grad.mul_(own_factor)
        else:
            torch._foreach_mul_(own, own_factor)


def _on(device: torch.device, value: Tensor) -> Tensor:
    """A number on a device; if it is there already, nothing is asked for."""
    return value if value.device == device else value.to(device)
