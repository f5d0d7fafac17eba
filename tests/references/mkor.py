"""MKOR, slowly: running averages of outer products, inverted densely at every update."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.references.layer_rows import Losses, Seen, descend, each, look


class SlowMKOR:
    """SGD on steps preconditioned by MKOR, each as long as its gradient."""

    def __init__(self, model: nn.Module, lr: float, update: str, every: int) -> None:
        self.model, self.lr, self.update, self.every = model, lr, update, every
        self.memory, self.threshold, self.keep = 0.95, 2.0, 0.9
        self.inverses: dict[tuple[nn.Module, str], list[Tensor]] = {}
        self.taken = 0

    def step(self, x: Tensor, losses: Losses) -> None:
        for layer, seen in look(self.model, x, losses).items():
            if self.taken % self.every == 0:
                self.update_layer(layer, seen)
            left, right = (torch.stack(self.inverses[layer, side]) for side in "GA")
            step = left @ seen.V @ right if seen.V.dim() == 3 else left[0] @ seen.V @ right[0]
            descend(layer, step * (seen.V.norm() / step.norm()), self.lr)
        self.taken += 1

    def update_layer(self, layer: nn.Module, seen: Seen) -> None:
        vectors = {"A": seen.a.mean((-3, -2)), "G": seen.g.sum(-2).mean(-2)}
        for side, vector in vectors.items():
            groups = [one for (one,) in each(vector, dims=1)]
            start = [torch.eye(len(one)).to(one) for one in groups]
            before = self.inverses.get((layer, side), start)
            pairs = zip(before, groups, strict=True)
            self.inverses[layer, side] = [self.updated(*pair) for pair in pairs]

    def updated(self, J: Tensor, v: Tensor) -> Tensor:
        identity, mu = torch.eye(len(v)).to(v), self.memory
        if J.abs().max() > self.threshold:
            J = self.keep * J + (1 - self.keep) * identity
        if self.update == "exact":
            return torch.linalg.inv(mu * torch.linalg.inv(J) + (1 - mu) * torch.outer(v, v))
        if self.update == "code":
            mixed = mu * J + (1 - mu) * identity
            v = v.clamp(-100, 100)
            return torch.linalg.inv(torch.linalg.inv(mixed) + torch.outer(v, v))
        weight = (1 - mu) / (mu**2 * (1 + mu * (1 - mu) * v @ J @ v))
        return mu * J + weight * J @ torch.outer(v, v) @ J
