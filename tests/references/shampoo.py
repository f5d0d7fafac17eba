"""Shampoo as it is written (Gupta, Koren & Singer 2018, algorithm 1), for matrices; slow and dense.

``L ← L + V Vᵀ``, ``R ← R + VᵀV``, ``W ← W - η (L + εI)^(-p) V (R + εI)^(-p)`` with p = 1/4.
An average with decay β in place of the sum is ``Σ β^(t-i) V_i V_iᵀ / Σ β^(t-i)``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.references.gradient_matrices import matrices, matrix_layers, step


class Shampoo:
    """Keeps every gradient that it has seen."""

    def __init__(
        self, model: nn.Module, rate: float, epsilon: float, power: float, decay: float | None
    ) -> None:
        self.model, self.rate, self.epsilon = model, rate, epsilon
        self.power, self.decay = power, decay
        self.seen: dict[nn.Module, list[list[Tensor]]] = {}

    def step(self) -> None:
        for layer in matrix_layers(self.model):
            history = self.seen.setdefault(layer, [])
            history.append([V.clone() for V in matrices(layer)])
            steps = []
            for V, *past in zip(history[-1], *history, strict=True):
                left = self.accumulated([W @ W.T for W in past])
                right = self.accumulated([W.T @ W for W in past])
                steps.append(self.root(left) @ V @ self.root(right))
            step(layer, steps, self.rate)

    def accumulated(self, moments: list[Tensor]) -> Tensor:
        if self.decay is None:
            return torch.stack(moments).sum(0)
        weights = [self.decay**age for age in reversed(range(len(moments)))]
        return sum(w * M for w, M in zip(weights, moments, strict=True)) / sum(weights)

    def root(self, moment: Tensor) -> Tensor:
        """``(M + εI)^(-p)`` by a singular value decomposition."""
        left, values, _ = torch.linalg.svd(moment + self.epsilon * torch.eye(len(moment)))
        return left @ (values**-self.power).diag() @ left.T
