"""FNGD, layer by layer: weights of a refresh, and their mean until the next."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.references.per_sample import layers, move, sample_gradients, sample_losses


def weights(U: Tensor, gamma: float) -> Tensor:
    """``c = (NγI + UUᵀ)⁻¹ 1``."""
    return torch.linalg.solve(U @ U.T + len(U) * gamma * torch.eye(len(U)), torch.ones(len(U)))


class FNGD:
    """Remembers the mean weight of each layer."""

    def __init__(self, gamma: float, every: int) -> None:
        self.gamma = gamma
        self.every = every
        self.means: dict[int, Tensor] = {}

    def step(self, model: nn.Module, x: Tensor, y: Tensor, number: int) -> None:
        losses = sample_losses(model, x, y)
        gradients = [sample_gradients(layer, losses) for layer in layers(model)]
        for index, (layer, U) in enumerate(zip(layers(model), gradients, strict=True)):
            if number % self.every == 0:
                c = weights(U, self.gamma)
                self.means[index] = c.mean()
                move(layer, U.T @ c)
            else:
                move(layer, self.means[index] * U.sum(0))
