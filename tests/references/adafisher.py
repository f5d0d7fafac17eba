"""AdaFisher, slowly: dense factors whose diagonals are scaled, averaged and divided by."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.references.layer_rows import Losses, Seen, descend, look


class SlowAdaFisher:
    """AdaFisher with a rule for the averages: the paper's, or a true one."""

    def __init__(self, model: nn.Module, lr: float, average: str, every: int) -> None:
        self.model, self.lr, self.average, self.every = model, lr, average, every
        self.decay, self.damping, self.beta, self.gammas = 0.9, 1e-3, 0.9, (0.92, 0.008)
        self.moments: dict[nn.Module, Tensor] = {}
        self.diagonals: dict[tuple[nn.Module, str], Tensor] = {}
        self.taken = self.updates = 0

    def step(self, x: Tensor, losses: Losses) -> None:
        due = self.taken % self.every == 0
        self.taken, self.updates = self.taken + 1, self.updates + due
        for layer, seen in look(self.model, x, losses).items():
            if due:
                self.update_layer(layer, seen)
            before = self.moments.get(layer, torch.zeros_like(seen.V))
            self.moments[layer] = self.beta * before + (1 - self.beta) * seen.V
            moment = self.moments[layer] / (1 - self.beta**self.taken)
            H, S = (self.shown(self.diagonals[layer, side]) for side in "HS")
            fisher = torch.einsum("...o,...i->...oi", S, H)
            descend(layer, moment / (fisher + self.damping), self.lr)

    def update_layer(self, layer: nn.Module, seen: Seen) -> None:
        samples, positions = seen.a.shape[-3:-1]
        A = torch.einsum("...nsi,...nsj->...ij", seen.a, seen.a) / (samples * positions)
        G = torch.einsum("...nsi,...nsj->...ij", seen.g, seen.g) / samples
        for side, factor in (("H", A), ("S", G)):
            new = factor.diagonal(dim1=-2, dim2=-1)
            if self.average == "paper":
                old = self.diagonals.get((layer, side), torch.ones_like(new))
                updated = (1 - self.gammas[0]) * old + self.gammas[1] * scaled(new)
            else:  # the newest has more weight as long as there are few
                weight = (1 - self.decay) / (1 - self.decay**self.updates)
                old = self.diagonals.get((layer, side), new)
                updated = (1 - weight) * old + weight * new
            self.diagonals[layer, side] = updated

    def shown(self, diagonal: Tensor) -> Tensor:
        return diagonal if self.average == "paper" else scaled(diagonal)


def scaled(values: Tensor) -> Tensor:
    """From 0, the least, to 1, the largest."""
    return (values - values.min()) / (values.max() - values.min())
