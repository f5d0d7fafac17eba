"""Natural gradient with the empirical Fisher of each layer as a dense matrix."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.references.per_sample import layers, move, sample_gradients, sample_losses


def direction(U: Tensor, gamma: float) -> Tensor:
    """``(UᵀU/N + γI)⁻¹ ḡ``."""
    fisher = U.T @ U / len(U)
    return torch.linalg.solve(fisher + gamma * torch.eye(len(fisher)), U.mean(0))


def step(model: nn.Module, x: Tensor, y: Tensor, gamma: float) -> None:
    losses = sample_losses(model, x, y)
    for layer, U in [(layer, sample_gradients(layer, losses)) for layer in layers(model)]:
        move(layer, direction(U, gamma))
