"""Thermodynamic natural gradient descent of one layer, slowly: a dense matrix exponential."""

from __future__ import annotations

import torch
from torch import Tensor


class SlowTNGD:
    """`x(t) = M⁻¹b + e^{-Mt}(x₀ - M⁻¹b)` with `M = G ⊗ A + γI`; x₀ is the last x, or b."""

    def __init__(self, time: float, gamma: float, warm: bool) -> None:
        self.time, self.gamma, self.warm = time, gamma, warm
        self.last: Tensor | None = None

    def __call__(self, A: Tensor, G: Tensor, V: Tensor) -> Tensor:
        b = V.flatten()
        M = torch.kron(G, A) + self.gamma * torch.eye(len(b), dtype=b.dtype)
        start = self.last if self.warm and self.last is not None else b
        rest = torch.linalg.solve(M, b)
        self.last = rest + torch.matrix_exp(-M * self.time) @ (start - rest)
        return self.last.reshape(V.shape)


def integrate(M: Tensor, b: Tensor, start: Tensor, time: float, parts: int) -> Tensor:
    """The same by small steps of `dx = -(Mx - b) dt`."""
    x = start
    for _ in range(parts):
        x = x - (M @ x - b) * (time / parts)
    return x
