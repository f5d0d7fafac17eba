"""EKFAC of one layer, slowly: dense matrices all the way (George et al. 2018)."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.references.nets import Seen


class SlowEKFAC:
    """`(Q diag(S) Qᵀ + γI)⁻¹ vec(V)`; statistics at every step, the basis at every other."""

    def __init__(self, moments: str = "sample", gamma: float = 0.1) -> None:
        self.moments, self.gamma = moments, gamma
        self.factors: tuple[Tensor, Tensor] | None = None
        self.basis: Tensor | None = None
        self.start = self.total = torch.zeros(())
        self.count, self.weight = 0.0, 1.0
        self.seen = 0.0

    def __call__(self, seen: Seen, number: int) -> Tensor:
        self.average(seen)
        v = seen.V.flatten()
        if self.basis is not None:  # moments are observed in the basis that is there
            sample, decay = self.moments == "sample", 0.5 if self.moments == "sample" else 0.95
            new = len(seen.U) * seen.F if sample else torch.outer(v, v)
            self.total = decay * self.total + on_diagonal(new, self.basis)
            self.count = decay * self.count + (len(seen.U) if sample else 1)
            self.weight = 0.0 if sample else decay * self.weight
        if number % 2 == 0:
            A, G = self.curvature()
            self.basis = torch.kron(torch.linalg.eigh(G)[1], torch.linalg.eigh(A)[1])
            self.start = torch.kron(G, A)
            if self.count:
                self.total = on_diagonal(self.total, self.basis)
        F = self.total / self.count if self.count else self.start
        if self.moments == "gradient" and self.count:
            F = (1 - self.weight) * F * self.start.trace() / F.trace() + self.weight * self.start
        damped = F + self.gamma * torch.eye(len(F), dtype=F.dtype)
        return torch.linalg.solve(damped, v).reshape(seen.V.shape)

    def average(self, seen: Seen) -> None:
        """Sums of the factors over rows and samples, of which old batches count half."""
        new = self.sums(seen)
        old = self.factors or (torch.zeros_like(new[0]), torch.zeros_like(new[1]))
        self.factors = (0.5 * old[0] + new[0], 0.5 * old[1] + new[1])
        self.seen = 0.5 * self.seen + len(seen.U)
        self.positions = seen.a.shape[1]

    def sums(self, seen: Seen) -> tuple[Tensor, Tensor]:
        return (
            torch.einsum("nsi,nsj->ij", seen.a, seen.a),
            torch.einsum("nsi,nsj->ij", seen.g, seen.g),
        )

    def curvature(self) -> tuple[Tensor, Tensor]:
        """Factors whose Kronecker product is K-FAC's Fisher."""
        assert self.factors is not None
        A, G = self.factors
        return A / (self.seen * self.positions), G / self.seen


def on_diagonal(matrix: Tensor, basis: Tensor) -> Tensor:
    """What is left of a matrix that is made diagonal in a basis."""
    return basis @ (basis.T @ matrix @ basis).diagonal().diag() @ basis.T
