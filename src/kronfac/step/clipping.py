"""Clipping by the norm of all gradients together, before they are preconditioned."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


def clip_gradients(
    parameters: Sequence[nn.Parameter], bound: float, add_up: Callable[[Tensor], Tensor] | None
) -> None:
    """Scale gradients so that their norm is at most ``bound``; without waiting for the device.

    ``add_up`` adds the squared norms of other ranks, where each of them has a part of the gradients.
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    device = grads[0].device if grads else torch.device("cpu")
    wide = torch.float32 if device.type == "mps" else torch.float64
    total = torch.zeros((), dtype=wide, device=device)
    for grad in grads:
        values = grad.coalesce().values() if grad.is_sparse else grad
        total = total + values.detach().norm().to(device, wide).square()
    norm = (total if add_up is None else add_up(total)).sqrt()
    factor = (bound / (norm + 1e-6)).clamp(max=1)
    for grad in grads:
        grad.mul_(factor.to(grad.device, torch.promote_types(grad.dtype, torch.float32)))
