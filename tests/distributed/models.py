"""Small models and batches for ranks: every kind of layer, nothing random, nothing that mixes samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

CLASSES = 3
TOKENS, WORDS, WIDTH = 4, 7, 4


def mlp() -> nn.Module:
    """Linear layers of several widths."""
    return nn.Sequential(
        nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, CLASSES)
    )


def cnn() -> nn.Module:
    """Convolutions with and without bias, in-place activations, a norm and a linear head."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=False),
        nn.GroupNorm(2, 4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 3, 2, stride=2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(12, CLASSES),
    )


def wide() -> nn.Module:
    """One factor that takes longer than all others together."""
    return nn.Sequential(nn.Linear(150, 4), nn.Tanh(), nn.Linear(4, CLASSES))


class Transformer(nn.Module):
    """Embedding, attention, layer norms and linear layers: scores for every token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 5)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return self.head(torch.tanh(self.up(self.norm2(x))))


class Shared(nn.Module):
    """A grouped convolution, a layer that is used twice, and two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.grouped = nn.Conv2d(4, 4, 3, padding=1, groups=2)
        self.twice = nn.Conv2d(4, 4, 1)
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.ones(4))
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.grouped(x))
        x = torch.tanh(self.twice(torch.tanh(self.twice(x)))).mean((-2, -1)) * self.scale
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Positions(nn.Module):
    """Inputs that stand for all samples: positions as ``[1, T]`` and ``[T]``, and learned queries.

    One layer has such inputs and ordinary ones.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Embedding(TOKENS + 2, WIDTH)
        self.places = nn.Embedding(TOKENS, WIDTH)
        self.queries = nn.Parameter(torch.randn(1, TOKENS, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.across = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        order = torch.arange(tokens.shape[1])
        x = self.tokens(tokens) + self.positions(order[None]) + self.places(order)
        x = x * self.project(torch.tanh(self.norm(self.queries))) + self.project(x)
        x = self.across(x.transpose(0, 1)).transpose(0, 1)  # samples in the second dimension
        return self.head(torch.tanh(x))


class Across(nn.Module):
    """Attention to inputs of another width: three weights and one bias for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, kdim=5, vdim=5, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.attention(x[..., :WIDTH], x, x, need_weights=False)[0].mean(1))
        return out


class Gated(nn.Module):
    """A gated layer and a head that are wider than the stream between them, without attention."""

    def __init__(self, words: int = WORDS, width: int = WIDTH, hidden: int = 9) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.norm = nn.LayerNorm(width)
        self.gate, self.up = nn.Linear(width, hidden), nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.head = nn.Linear(width, 11, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        y = self.norm(x)
        x = x + self.down(torch.tanh(self.gate(y)) * self.up(y))
        scores: Tensor = self.head(x)
        return scores


class Unseen(nn.Module):
    """Parameters whose products nobody sees, and two layers with curvature around them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.randn(1, TOKENS, WIDTH))
        self.recur = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.up = nn.ConvTranspose1d(WIDTH, 2 * WIDTH, 2, groups=2)
        self.experts = nn.Parameter(torch.randn(2, 2 * WIDTH, 5))
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(5, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.recur(self.tokens(tokens) + self.places)[0]
        x = torch.tanh(self.up(x.mT).mT[:, :-1])
        x = torch.einsum("nsd,edf->nsf", x, self.experts)
        scores: Tensor = self.head(torch.tanh(x)) * self.scale
        return scores


@dataclass(frozen=True)
class Kind:
    """How a model is made and what it reads."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...] = (5,)
    words: int = 0

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make()

    def batch(self, number: int, samples: int) -> tuple[Tensor, Tensor]:
        """The same inputs and labels whenever the number is the same."""
        generator = torch.Generator().manual_seed(1000 + number)
        if self.words:
            x = torch.randint(self.words, (samples, *self.shape), generator=generator)
            return x, torch.randint(CLASSES, x.shape, generator=generator)
        x = torch.randn(samples, *self.shape, generator=generator)
        return x, torch.randint(CLASSES, (samples,), generator=generator)


KINDS = {
    "mlp": Kind(mlp),
    "wide": Kind(wide, (150,)),
    "cnn": Kind(cnn, (2, 4, 4)),
    "transformer": Kind(Transformer, (TOKENS,), WORDS),
    "shared": Kind(Shared, (4, 4, 4)),
    "across": Kind(Across, (3, 5)),
    "positions": Kind(Positions, (TOKENS,), WORDS),
    "gated": Kind(Gated, (TOKENS,), WORDS),
    "unseen": Kind(Unseen, (TOKENS,), WORDS),
}


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1)


def momentum(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)


def adamw(model: nn.Module) -> Optimizer:
    """Two groups, as is usual: decay for matrices only."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return AdamW(groups, lr=0.01)


BASES = {"sgd": sgd, "momentum": momentum, "adamw": adamw}
