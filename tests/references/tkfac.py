"""TKFAC of one layer, slowly: dense matrices, row by row (Gao et al. 2021)."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.references.nets import Seen


class SlowTKFAC:
    """`δ Ψ ⊗ Φ + γI` solved densely, or the paper's factored damping; averages are running ones."""

    def __init__(self, solver: str = "eigen", gamma: float = 0.1) -> None:
        self.solver, self.gamma = solver, gamma
        self.sums: list[Tensor] = []
        self.count = 0.0

    def __call__(self, seen: Seen, number: int) -> Tensor:
        new = trace_sums(seen)
        old = self.sums or [torch.zeros_like(one) for one in new]
        self.sums = [0.5 * before + one for before, one in zip(old, new, strict=True)]
        self.count = 0.5 * self.count + len(seen.U)
        if number % 2 == 0:
            delta, Phi, Psi = (one / self.count for one in self.sums)
            self.solved = (delta, Phi / delta, Psi / delta)
        delta, Phi, Psi = self.solved
        if self.solver == "eigen":
            F = delta * torch.kron(Psi, Phi)
            damped = F + self.gamma * torch.eye(len(F), dtype=F.dtype)
            return torch.linalg.solve(damped, seen.V.flatten()).reshape(seen.V.shape)
        left, right = (
            delta.sqrt() * one + self.gamma**0.5 * torch.eye(len(one), dtype=one.dtype)
            for one in (Psi, Phi)
        )
        return torch.linalg.inv(left) @ seen.V @ torch.linalg.inv(right)


def trace_sums(seen: Seen) -> list[Tensor]:
    """Sums over rows of `tr Λ tr Γ`, `tr Γ · Λ` and `tr Λ · Γ`."""
    rows = list(zip(seen.a.flatten(0, 1), seen.g.flatten(0, 1), strict=True))
    pairs = [(torch.outer(a, a), torch.outer(g, g)) for a, g in rows]
    return [
        torch.stack([L.trace() * T.trace() for L, T in pairs]).sum(),
        torch.stack([T.trace() * L for L, T in pairs]).sum(0),
        torch.stack([L.trace() * T for L, T in pairs]).sum(0),
    ]
