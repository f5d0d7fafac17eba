"""Tasks that came later: kinds of layers and losses that the first seventeen do not have.

Recurrent modules and transposed convolutions, which have no curvature here, depthwise convolutions, layer
norms in a CNN, a loss of derivatives, noise in the loss, one-dimensional convolutions. They were divided
before anything was run on them, as the others.
"""

import math
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from suite.problems import Problem, classification, images, language


class Recurrent(nn.Module):
    """Bytes or rows, a recurrent module of torch, a linear head at every position or at the last."""

    def __init__(
        self, kind: type[nn.RNNBase], read: nn.Module, dim: int, width: int, out: int
    ) -> None:
        super().__init__()
        self.read, self.recur = read, kind(dim, width, batch_first=True)
        self.head = nn.Linear(width, out)
        self.everywhere = isinstance(read, nn.Embedding)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.recur(self.read(x))
        return self.head(states if self.everywhere else states[:, -1])


class Rows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.squeeze(1)


class UNet(nn.Module):
    """Two levels down, two up by transposed convolutions."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = _unit(nn.Conv2d(1, width, 3, padding=1), width)
        self.down = _unit(nn.Conv2d(width, 2 * width, 3, 2, 1), 2 * width)
        self.bottom = _unit(nn.Conv2d(2 * width, 4 * width, 3, 2, 1), 4 * width)
        self.up = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.join = _unit(nn.Conv2d(4 * width, 2 * width, 3, padding=1), 2 * width)
        self.top = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.last = nn.Conv2d(2 * width, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        down = self.down(first)
        joined = self.join(torch.cat([down, self.up(self.bottom(down))], 1))
        return self.last(torch.cat([first, self.top(joined)], 1))


def _unit(convolution: nn.Conv2d, width: int) -> nn.Sequential:
    return nn.Sequential(convolution, nn.GroupNorm(4, width), nn.SiLU())


class VAE(nn.Module):
    """Convolutions to a code of 16 numbers and noise, transposed ones back."""

    def __init__(self, code: int = 16) -> None:
        super().__init__()
        self.encode = nn.Sequential(
            *(nn.Conv2d(1, 32, 4, 2, 1), nn.ReLU(), nn.Conv2d(32, 64, 4, 2, 1), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(64 * 49, 2 * code)),
        )
        self.decode = nn.Sequential(
            *(nn.Linear(code, 64 * 49), nn.ReLU(), nn.Unflatten(1, (64, 7, 7))),
            *(nn.ConvTranspose2d(64, 32, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(32, 1, 4, 2, 1)),
        )

    def bound(self, x: Tensor, noise: Tensor) -> Tensor:
        """The negative evidence bound of each image."""
        mean, log_variance = self.encode(x).chunk(2, 1)
        found = self.decode(mean + noise * (log_variance / 2).exp())
        lost = F.binary_cross_entropy_with_logits(found, x, reduction="none").sum((1, 2, 3))
        return lost + 0.5 * (mean.square() + log_variance.exp() - log_variance - 1).sum(1)


def mobile_net() -> nn.Sequential:
    """Depthwise and pointwise convolutions with batch norms."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 32, 3, 1, 1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU6(),
    ]
    width = 32
    for wider, stride in ((64, 2), (128, 2), (128, 1), (256, 2)):
        layers += [nn.Conv2d(width, width, 3, stride, 1, groups=width, bias=False)]
        layers += [nn.BatchNorm2d(width), nn.ReLU6(), nn.Conv2d(width, wider, 1, bias=False)]
        layers += [nn.BatchNorm2d(wider), nn.ReLU6()]
        width = wider
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


class NextBlock(nn.Module):
    """A wide depthwise convolution, a layer norm over channels, a pointwise MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Conv2d(width, width, 5, padding=2, groups=width)
        self.norm = nn.LayerNorm(width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.mix(x).movedim(1, -1))
        return x + self.narrow(F.gelu(self.widen(h))).movedim(-1, 1)


def conv_next() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(3, 40, 4, 4), NextBlock(40), NextBlock(40)),
        *(nn.Conv2d(40, 80, 2, 2), NextBlock(80), NextBlock(80)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(80), nn.Linear(80, 10)),
    )


def denoiser() -> Problem:
    """Images of clothes from noisy ones."""
    source, model = images("fashion-mnist", train=20_000), UNet()

    def error(x: Tensor, seed: int) -> Tensor:
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
        return F.mse_loss(model(x + noise), x)

    def loss(indices: Tensor) -> Tensor:
        return error(source.train_batch(indices)[0], int(indices.sum()))

    def evaluate() -> float:
        return float(error(source.test_batch(torch.arange(1000))[0], 0))

    return Problem(model, 20_000, loss, evaluate)


def variational() -> Problem:
    source, model = images("mnist", train=20_000), VAE()

    def bound(x: Tensor, seed: int) -> Tensor:
        noise = torch.randn(len(x), 16, generator=torch.Generator().manual_seed(seed))
        return model.bound((x * 0.3081 + 0.1307).clamp(0, 1), noise).mean()

    def loss(indices: Tensor) -> Tensor:
        return bound(source.train_batch(indices)[0], int(indices.sum()))

    def evaluate() -> float:
        return float(bound(source.test_batch(torch.arange(1000))[0], 0))

    return Problem(model, 20_000, loss, evaluate)


def poisson() -> Problem:
    """`-Δu = f` in the unit square with `u = 0` around, by derivatives of a network; its error in `u`."""
    model = nn.Sequential(
        *(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()),
        *(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)),
    )
    generator = torch.Generator().manual_seed(3)
    points = torch.rand(4096, 2, generator=generator)
    grid = torch.cartesian_prod(torch.linspace(0, 1, 33), torch.linspace(0, 1, 33))

    def solution(x: Tensor) -> Tensor:
        a, b = x.unbind(1)
        return (math.pi * a).sin() * (math.pi * b).sin() + 0.3 * (3 * math.pi * a).sin() * (
            2 * math.pi * b
        ).sin()

    def source(x: Tensor) -> Tensor:
        a, b = x.unbind(1)
        first = 2 * (math.pi * a).sin() * (math.pi * b).sin()
        return math.pi**2 * (first + 13 * 0.3 * (3 * math.pi * a).sin() * (2 * math.pi * b).sin())

    def value(x: Tensor) -> Tensor:
        a, b = x.unbind(1)
        return model(x)[:, 0] * 16 * a * (1 - a) * b * (1 - b)

    def loss(indices: Tensor) -> Tensor:
        x = points[indices].requires_grad_()
        [slope] = torch.autograd.grad(value(x).sum(), x, create_graph=True)
        curved = [
            torch.autograd.grad(slope[:, i].sum(), x, create_graph=True)[0][:, i] for i in (0, 1)
        ]
        return (sum(curved) + source(x.detach())).square().mean()

    def evaluate() -> float:
        right = solution(grid)
        return float((value(grid) - right).square().mean() / right.square().mean())

    return Problem(model, 4096, loss, evaluate)


class Sums(nn.Module):
    """A transformer encoder that reads two numbers and an equals sign."""

    def __init__(self, modulus: int, dim: int = 96) -> None:
        super().__init__()
        self.tokens = nn.Embedding(modulus + 1, dim)
        self.places = nn.Parameter(0.02 * torch.randn(3, dim))
        layer = nn.TransformerEncoderLayer(dim, 4, 2 * dim, dropout=0.0, batch_first=True)
        self.encode = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(dim, modulus)

    def forward(self, pairs: Tensor) -> Tensor:
        return self.head(self.encode(self.tokens(pairs) + self.places)[:, -1])


def addition(modulus: int = 53) -> Problem:
    """`a + b` modulo a prime, four fifths of all pairs to learn from."""
    numbers = torch.arange(modulus)
    pairs = torch.cartesian_prod(numbers, numbers)
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(4))
    x = torch.cat([pairs, torch.full((len(pairs), 1), modulus)], 1)[order]
    y, model, known = pairs.sum(1)[order] % modulus, Sums(modulus), 4 * len(pairs) // 5

    def loss(indices: Tensor) -> Tensor:
        return F.cross_entropy(model(x[indices]), y[indices])

    def evaluate() -> float:
        return float(F.cross_entropy(model(x[known:]), y[known:]))

    return Problem(model, known, loss, evaluate)


@cache
def waves() -> tuple[Tensor, Tensor]:
    """Which of eight rhythms a noisy signal has."""
    generator = torch.Generator().manual_seed(5)
    labels = torch.randint(8, (12_000,), generator=generator)
    times = torch.linspace(0, 1, 128)
    pitch = (4 + labels)[:, None] * (1 + 0.03 * torch.randn(12_000, 1, generator=generator))
    phase = 2 * math.pi * torch.rand(12_000, 1, generator=generator)
    noise = 1.5 * torch.randn(12_000, 128, generator=generator)
    bent = pitch * (times + 0.2 * times.square())
    return ((2 * math.pi * bent + phase).sin() + noise).unsqueeze(1), labels


def rhythms() -> Problem:
    x, y = waves()
    layers: list[nn.Module] = []
    width = 1
    for dilation in (1, 2, 4, 8):
        layers += [nn.Conv1d(width, 32, 5, padding=2 * dilation, dilation=dilation)]
        layers += [nn.BatchNorm1d(32), nn.ReLU()]
        width = 32
    model = nn.Sequential(*layers, nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(32, 8))

    def loss(indices: Tensor) -> Tensor:
        return F.cross_entropy(model(x[indices]), y[indices])

    def evaluate() -> float:
        return 100 * float((model(x[10_000:]).argmax(1) == y[10_000:]).double().mean())

    return Problem(model, 10_000, loss, evaluate)


def byte_lstm() -> Problem:
    return language(Recurrent(nn.LSTM, nn.Embedding(256, 64), 64, 128, 256), 64)


def row_gru() -> Problem:
    return classification(
        Recurrent(nn.GRU, Rows(), 28, 64, 10), images("fashion-mnist", train=20_000)
    )
