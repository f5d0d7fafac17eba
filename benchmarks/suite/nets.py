"""Networks of the suite that the program does not have."""

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def mlp(*widths: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Flatten()]
    for m, n in pairwise(widths):
        layers += [nn.Linear(m, n), activation()]
    return nn.Sequential(*layers[:-1])


def autoencoder(*widths: int, activation: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    """There and back; the code itself is linear."""
    path = [*widths, *reversed(widths[:-1])]
    layers: list[nn.Module] = []
    for number, (m, n) in enumerate(pairwise(path)):
        layers += [nn.Linear(m, n), nn.Identity() if number == len(widths) - 2 else activation()]
    return nn.Sequential(*layers[:-1])


def vgg() -> nn.Sequential:
    layers: list[nn.Module] = []
    channels = 3
    for width in (24, 48, 96):
        for _ in range(2):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(
        *layers, nn.Flatten(), nn.Linear(96 * 16, 128), nn.ReLU(), nn.Linear(128, 10)
    )


def encoder() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(1, 24, 3, 2, 1), nn.BatchNorm2d(24), nn.ReLU()),
        *(nn.Conv2d(24, 48, 3, 2, 1), nn.BatchNorm2d(48), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(48 * 49, 128), nn.ReLU(), nn.Linear(128, 64)),
    )


class RowRNN(nn.Module):
    """A plain recurrent network that reads an image row by row."""

    def __init__(self, row: int, width: int, classes: int) -> None:
        super().__init__()
        self.row = row
        self.read = nn.Linear(row, width)
        self.recur = nn.Linear(width, width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(len(x), -1, self.row)
        state = torch.zeros(len(x), self.recur.in_features)
        for index in range(rows.shape[1]):
            state = torch.tanh(self.read(rows[:, index]) + self.recur(state))
        return self.head(state)


class Llama(nn.Module):
    """A decoder with RMS norms, rotary positions and gated MLPs."""

    def __init__(self, dim: int, depth: int, heads: int, tied: bool, vocab: int = 256) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, dim)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.blocks = nn.ModuleList(LlamaBlock(dim, heads) for _ in range(depth))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class LlamaBlock(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        hidden = 8 * dim // 3
        self.gate, self.up = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        q, k, v = (
            part(h).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(-2))
        h = self.between(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def rotated(x: Tensor) -> Tensor:
    """Rotary positions on `[N, heads, S, d]`."""
    half = x.shape[-1] // 2
    speeds = 10_000 ** (-torch.arange(half) / half)
    angles = torch.arange(x.shape[-2])[:, None] * speeds
    first, second = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def double_pendulum(samples: int) -> tuple[Tensor, Tensor]:
    """States of a double pendulum, and what they are half a second later."""
    generator = torch.Generator().manual_seed(1)
    start = torch.rand(samples, 4, generator=generator, dtype=torch.float64) * 4 - 2
    return start.float(), _later(_velocity, start, 50).float()


def lorenz(samples: int) -> tuple[Tensor, Tensor]:
    """States of Lorenz's system in units of ten, and what they are 0.4 units of time later."""
    generator = torch.Generator().manual_seed(2)
    centre, extent = torch.tensor([[0.0, 0.0, 25.0], [15.0, 20.0, 15.0]], dtype=torch.float64)
    start = torch.rand(samples, 3, generator=generator, dtype=torch.float64) * 2 - 1
    start = start * extent + centre
    return tuple(((x - centre) / 10).float() for x in (start, _later(_convection, start, 40)))


def _later(velocity: Callable[[Tensor], Tensor], state: Tensor, steps: int) -> Tensor:
    """By Runge and Kutta, a hundredth at a time."""
    dt = 0.01
    for _ in range(steps):
        k1 = velocity(state)
        k2 = velocity(state + dt / 2 * k1)
        k3 = velocity(state + dt / 2 * k2)
        k4 = velocity(state + dt * k3)
        state = state + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    return state


def _convection(state: Tensor) -> Tensor:
    """Lorenz's velocity."""
    x, y, z = state.unbind(1)
    return torch.stack([10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z], dim=1)


def _velocity(state: Tensor) -> Tensor:
    """Of two unit masses on unit rods; `[angle, angle, speed, speed]`."""
    a, b, u, v = state.unbind(1)
    gravity, delta = 9.81, a - b
    below = 3 - torch.cos(2 * delta)
    first = (
        -3 * gravity * a.sin()
        - gravity * (a - 2 * b).sin()
        - 2 * delta.sin() * (v.square() + u.square() * delta.cos())
    ) / below
    second = (
        2 * delta.sin() * (2 * u.square() + 2 * gravity * a.cos() + v.square() * delta.cos())
    ) / below
    return torch.stack([u, v, first, second], dim=1)
