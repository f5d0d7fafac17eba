"""KLD-WRM on K-FAC as it is written (Puiu 2022), slow and dense.

Step k minimises ``g_kᵀs + ½ sᵀB_k s + λ_k Σ_i ρ^(k-i) ½ (θ-θ_i)ᵀ(F_i + γI)(θ-θ_i)`` with ``θ = θ_k + s``
and, in the variant "so", ``B = 0``. ρ times the condition for the last minimum, taken from that for this
one, leaves ``(λ_k S_k + B_k) s_k = -ĝ_k`` with ``S_k = Σ_i ρ^(k-i) (F_i + γI)`` and
``ĝ_k = g_k - ρ (λ_k/λ_{k-1}) (g_{k-1} + B_{k-1} s_{k-1})``.

K-FAC has ``S_k = w_k (Ḡ ⊗ Ā + γI)`` with averages of the factors and ``w_k = Σ_i ρ^(k-i)``. Here
``λ_k = 1/(η_k w_k)`` and, for "q", ``B_k = Ḡ ⊗ Ā + γI``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests import oracles
from tests.references.gradient_matrices import matrix_layers, step


class KLDWRM:
    """Keeps the factors of every batch."""

    def __init__(self, model: nn.Module, variant: str, rho: float, gamma: float) -> None:
        self.model, self.variant, self.rho, self.gamma = model, variant, rho, gamma
        self.factors: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}
        self.last: dict[nn.Module, tuple[Tensor, float]] = {}

    def step(self, x: Tensor, rate: float) -> None:
        """A step on the gradients that there are, which are those of these inputs."""
        updates = {layer: self.update(layer, x, rate) for layer in matrix_layers(self.model)}
        for layer, s in updates.items():
            step(layer, [s], -1.0)

    def update(self, layer: Any, x: Tensor, rate: float) -> Tensor:
        outputs, (call,) = oracles.run_layer(self.model, layer, x)
        (g,) = torch.autograd.grad((outputs - 1).square().sum(1).mean(), call.z)
        history = self.factors.setdefault(layer, [])
        history.append(oracles.kfac_factors(*oracles.layer_rows(layer, call.x, g)))
        weights = [self.rho**age for age in reversed(range(len(history)))]
        total = sum(weights)
        A, G = (
            sum(w * pair[side] for w, pair in zip(weights, history, strict=True)) / total
            for side in (0, 1)
        )
        F = torch.kron(G, A) + self.gamma * torch.eye(len(A) * len(G))
        gradient = oracles.matrix_gradient(layer)
        lam = 1 / (rate * total)
        corrected = gradient.flatten()
        if layer in self.last:
            left, before = self.last[layer]
            corrected = corrected - self.rho * lam / before * left
        B = F if self.variant == "q" else torch.zeros_like(F)
        s = -torch.linalg.solve(lam * total * F + B, corrected)
        self.last[layer] = gradient.flatten() + B @ s, lam
        return s.reshape(gradient.shape)
