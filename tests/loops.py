"""K-FAC of linear layers written out, for loops whose passes are put together by hand."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def run(model: nn.Sequential, x: Tensor) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """The output of a chain of modules, and input (with ones) and output of each linear layer."""
    seen = {}
    for name, module in model.named_children():
        y = module(x)
        if isinstance(module, nn.Linear):
            ones = torch.ones(*x.shape[:-1], 1)
            seen[name] = (torch.cat([x, ones], -1).detach(), y)
        x = y
    return x, seen


def gram(rows: Tensor) -> Tensor:
    flat = rows.flatten(0, -2)
    return flat.T @ flat


def solved(a: Tensor, g: Tensor, gradient: Tensor, damping: float) -> Tensor:
    """``(G ⊗ A + γI)⁻¹ vec(V)``, as one large system."""
    matrix = torch.kron(g, a)
    matrix = matrix + damping * torch.eye(len(matrix))
    return torch.linalg.solve(matrix, gradient.flatten()).reshape(gradient.shape)


def matrix_of(gradients: dict[str, Tensor], name: str) -> Tensor:
    """Gradient of weight and bias as one matrix."""
    return torch.cat([gradients[f"{name}.weight"], gradients[f"{name}.bias"][:, None]], 1)
