"""Gauss-Newton of each layer in the dual: ``v = Jᵀα/(γN)``, ``α = (I + HJJᵀ/(γN))⁻¹ g``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.oracles import loss_hessian
from tests.references.per_sample import layers, move, sample_gradients


def dual(J: Tensor, H: Tensor, g: Tensor, gamma: float, samples: int) -> Tensor:
    scaled = J @ J.T / (gamma * samples)
    return J.T @ torch.linalg.solve(torch.eye(len(g)) + H @ scaled, g) / (gamma * samples)


def primal(J: Tensor, H: Tensor, g: Tensor, gamma: float, samples: int) -> Tensor:
    curvature = J.T @ H @ J / samples + gamma * torch.eye(J.shape[1])
    return torch.linalg.solve(curvature, J.T @ g / samples)


def at_outputs(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, and Hessian and gradient of the sum of losses at them, flat."""
    outputs = model(x)
    H = torch.block_diag(*[loss_hessian(one.detach(), "categorical") for one in outputs])
    loss = F.cross_entropy(outputs, y, reduction="sum")
    return outputs, H, torch.autograd.grad(loss, outputs, retain_graph=True)[0].flatten()


def step(model: nn.Module, x: Tensor, y: Tensor, gamma: float) -> None:
    outputs, H, g = at_outputs(model, x, y)
    jacobians = [sample_gradients(layer, outputs.flatten()) for layer in layers(model)]
    for layer, J in zip(layers(model), jacobians, strict=True):
        move(layer, dual(J, H, g, gamma, len(x)))
