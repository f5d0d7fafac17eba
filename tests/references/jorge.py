"""Jorge as it is written (Singh, Sating & Bhatele 2023), for matrices; slow and plain.

``X = L̂⁴ M``, ``β = ‖X‖/(1+‖X‖)``, ``c = (1-β)/β``, ``L̂ ← β^(-1/4) L̂ (I - cX/4 + 5c²X²/32)``.
In the paper ``M = V Vᵀ``; the library adds εI to it, keeps β above a bound, and has a symmetric series.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.references.gradient_matrices import matrices, matrix_layers, step


def update(root: Tensor, moment: Tensor, series: str = "paper", least: float = 0.0) -> Tensor:
    """The next root from the last one."""
    one = torch.eye(len(root), dtype=root.dtype)
    X = torch.linalg.matrix_power(root, 4) @ moment
    beta = max(float(X.norm() / (1 + X.norm())), least)
    c = (1 - beta) / beta
    if series == "paper":
        return beta**-0.25 * root @ (one - c / 4 * X + 5 / 32 * c**2 * X @ X)
    K = one - c / 8 * X + 9 / 128 * c**2 * X @ X
    return beta**-0.25 * K @ root @ K.T


class Jorge:
    """Plain SGD on ``L̂ V R̂``."""

    def __init__(self, model: nn.Module, rate: float, epsilon: float, series: str, least: float):
        self.model, self.rate, self.epsilon = model, rate, epsilon
        self.series, self.least = series, least
        self.roots: dict[tuple[nn.Module, int, str], Tensor] = {}

    def step(self) -> None:
        for layer in matrix_layers(self.model):
            steps = []
            for group, V in enumerate(matrices(layer)):
                left = self.follow((layer, group, "L"), V @ V.T)
                right = self.follow((layer, group, "R"), V.T @ V)
                steps.append(left @ V @ right)
            step(layer, steps, self.rate)

    def follow(self, key: tuple[nn.Module, int, str], moment: Tensor) -> Tensor:
        one = torch.eye(len(moment))
        before = self.roots.get(key, self.epsilon**-0.25 * one)
        moment = moment + self.epsilon * one
        self.roots[key] = update(before, moment, self.series, self.least)
        return self.roots[key]
