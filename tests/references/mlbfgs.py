"""mL-BFGS of each layer: averages of weights and gradients, damped pairs, two loops."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tests.references.per_sample import flat, layers, move, sample_losses


@dataclass
class Memory:
    """What is kept for a layer."""

    weights: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    last: tuple[Tensor, Tensor] | None = None
    pairs: list[tuple[Tensor, Tensor]] = field(default_factory=list)


def average(values: list[Tensor], beta: float) -> Tensor:
    powers = [beta ** (len(values) - 1 - k) for k in range(len(values))]
    return sum(p * v for p, v in zip(powers, values, strict=True)) / sum(powers)


def damped(s: Tensor, y: Tensor, most: float, low: float, high: float) -> Tensor:
    mu = float(s @ y / (s @ s))
    tau = most
    if mu <= low:
        tau = min((1 - low) / (1 - mu), most)
    if mu >= high:
        tau = min((high - 1) / (mu - 1), most)
    return tau * y + (1 - tau) * s


def two_loops(pairs: list[tuple[Tensor, Tensor]], gradient: Tensor) -> Tensor:
    q, alphas = gradient.clone(), []
    for s, y in reversed(pairs):
        alphas.append((s @ q) / (s @ y))
        q = q - alphas[-1] * y
    if pairs:
        s, y = pairs[-1]
        q = q * (s @ y) / (y @ y)
    for (s, y), alpha in zip(pairs, reversed(alphas), strict=True):
        q = q + (alpha - (y @ q) / (s @ y)) * s
    return q


@dataclass
class MLBFGS:
    history: int
    beta: float
    every: int
    most: float
    bounds: tuple[float, float]
    memories: dict[int, Memory] = field(default_factory=dict)

    def step(self, model: nn.Module, x: Tensor, y: Tensor, number: int) -> None:
        losses = sample_losses(model, x, y)
        found = torch.autograd.grad(losses.mean(), list(model.parameters()))
        gradient = dict(zip(model.parameters(), found, strict=True))
        for index, layer in enumerate(layers(model)):
            memory = self.memories.setdefault(index, Memory())
            memory.weights.append(flat(layer, lambda p: p.detach().clone()))
            memory.gradients.append(flat(layer, gradient.__getitem__))
            if number % self.every == 0:
                self._add_pair(memory)
            move(layer, two_loops(memory.pairs, memory.gradients[-1]))

    def _add_pair(self, memory: Memory) -> None:
        now = average(memory.weights, self.beta), average(memory.gradients, self.beta)
        if memory.last is not None:
            s, y = now[0] - memory.last[0], now[1] - memory.last[1]
            y = damped(s, y, self.most, *self.bounds)
            if s @ y > 0:
                memory.pairs = [*memory.pairs, (s, y)][-self.history :]
        memory.last = now
