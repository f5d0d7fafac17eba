"""Eva, slowly: mean vectors as the papers average them, and dense inverses of what they make."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from tests.references.layer_rows import Losses, Seen, descend, each, look


class SlowEva:
    """SGD on steps preconditioned by Eva, with KL clip or at the norm of each layer's gradient."""

    def __init__(
        self, model: nn.Module, form: str, lr: float, damping: float, *, clips: bool
    ) -> None:
        self.model, self.form, self.lr, self.damping = model, form, lr, damping
        self.clips = clips
        self.means: dict[tuple[nn.Module, int], Tensor] = {}
        self.taken = 0

    def step(self, x: Tensor, losses: Losses) -> None:
        seen = look(self.model, x, losses)
        self.taken += 1
        steps = {layer: self.preconditioned(layer, one) for layer, one in seen.items()}
        total = sum((self.lr**2 * steps[layer] * one.V).sum() for layer, one in seen.items())
        clip = min(1.0, math.sqrt(1e-3 / float(total)))
        for layer, one in steps.items():
            factor = clip if self.clips else float(seen[layer].V.norm() / one.norm())
            descend(layer, factor * one, self.lr)

    def preconditioned(self, layer: nn.Module, seen: Seen) -> Tensor:
        V = seen.V
        left, right = seen.g.sum(-2).mean(-2), seen.a.mean((-3, -2))
        if self.form == "gradient":
            left, right = V.sum(-1) / V.shape[-1] ** 0.5, V.sum(-2) / V.shape[-2] ** 0.5
        left, right = self.averaged(layer, 0, left), self.averaged(layer, 1, right)
        found = [self.solve(*one) for one in each(left, right, V)]
        return torch.stack(found) if V.dim() == 3 else found[0]

    def averaged(self, layer: nn.Module, side: int, new: Tensor) -> Tensor:
        """`m ← (1-ξ)m + ξ·new` with ξ = 0.95; more for the newest as long as there are few."""
        xi = 0.95 / (1 - 0.05**self.taken)
        old = self.means.get((layer, side), new)
        self.means[layer, side] = (1 - xi) * old + xi * new
        return self.means[layer, side]

    def solve(self, left: Tensor, right: Tensor, V: Tensor) -> Tensor:
        if self.form == "gradient":
            return self.root(left) @ V @ self.root(right)
        b = torch.outer(left, left) if self.form == "kfac" else torch.eye(len(left)).to(left)
        curvature = torch.kron(b, torch.outer(right, right))
        damped = curvature + self.damping * torch.eye(len(curvature)).to(left)
        return torch.linalg.solve(damped, V.flatten()).reshape(V.shape)

    def root(self, vector: Tensor) -> Tensor:
        """The inverse fourth root of `vvᵀ + γI`."""
        values, vectors = torch.linalg.eigh(torch.outer(vector, vector))
        return vectors @ torch.diag((values.clamp(min=0) + self.damping) ** -0.25) @ vectors.mT
