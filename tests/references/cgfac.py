"""CG-FAC from its equations: the whole curvature of one layer, and textbook conjugate gradients."""

from __future__ import annotations

import torch
from torch import Tensor


def curvature(a: Tensor, g: Tensor, matvec: str, sharing: str) -> Tensor:
    """F of rows ``a: [N, S, d_in]`` and ``g: [N, S, d_out]`` of a loss that is a mean over N samples."""
    samples = len(a)
    g = samples * g
    if sharing == "reduce":
        a, g = a.mean(1, keepdim=True), g.sum(1, keepdim=True)
    if matvec == "empirical":
        each = torch.einsum("nso,nsi->noi", g, a).flatten(1)
        return each.T @ each / samples
    a, g = a.flatten(0, 1), g.flatten(0, 1)
    return torch.kron(g.T @ g / samples, a.T @ a / len(a))


def solve(F: Tensor, V: Tensor, damping: float, iterations: int) -> Tensor:
    """Conjugate gradients for ``(F + γI) x = vec(V)`` from ``vec(V)``."""
    B, b = F + damping * torch.eye(len(F), dtype=F.dtype), V.flatten()
    x = b.clone()
    r = b - B @ x
    p = r.clone()
    for _ in range(iterations):
        if r.norm() <= 1e-15 * b.norm():
            break
        step = (r @ r) / (p @ B @ p)
        x = x + step * p
        after = r - step * B @ p
        p = after + (after @ after) / (r @ r) * p
        r = after
    return x.reshape(V.shape)
