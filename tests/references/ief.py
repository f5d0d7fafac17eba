"""iEF, layer by layer: ``Δ = Uᵀ(UUᵀ + λI)⁻¹ s``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.references.per_sample import layers, move, sample_gradients


def direction(U: Tensor, s: Tensor, damping: float) -> Tensor:
    return U.T @ torch.linalg.solve(U @ U.T + damping * torch.eye(len(U)), s)


def step(model: nn.Module, x: Tensor, y: Tensor, damping: float) -> None:
    outputs = model(x)
    losses = F.cross_entropy(outputs, y, reduction="none")
    s = torch.stack(
        [
            torch.autograd.grad(loss, outputs, retain_graph=True)[0][number].square().sum()
            for number, loss in enumerate(losses)
        ]
    )
    for layer, U in [(layer, sample_gradients(layer, losses)) for layer in layers(model)]:
        move(layer, direction(U, s, damping))
