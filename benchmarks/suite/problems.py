"""Kinds of problems that tasks of the suite are made of."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kronfac.train import data
from suite import nets


@dataclass
class Problem:
    """A model, its loss on a training batch, and what it is judged by on test data."""

    model: nn.Module
    samples: int
    loss: Callable[[Tensor], Tensor]
    evaluate: Callable[[], float]


@cache
def images(name: str, train: int | None = None, test: int | None = 2000) -> Any:
    return data.load(name, train=train, test=test)


@cache
def text(length: int) -> Any:
    return data.load("text", length=length, size=2_000_000, test=100)


def classification(model: nn.Module, source: Any, flip: bool = False) -> Problem:
    def loss(indices: Tensor) -> Tensor:
        x, y = source.train_batch(indices)
        if flip:
            x = torch.where((indices % 2 == 0)[:, None, None, None], x, x.flip(-1))
        return F.cross_entropy(model(x), y)

    def evaluate() -> float:
        right = 0
        for indices in torch.arange(source.num_test).split(500):
            x, y = source.test_batch(indices)
            right += int((model(x).argmax(1) == y).sum())
        return 100 * right / source.num_test

    return Problem(model, source.num_train, loss, evaluate)


def autoencoder(*widths: int) -> Problem:
    source = images("mnist")
    model = nets.autoencoder(*widths)

    def pixels(batch: Tensor) -> Tensor:
        return (batch.flatten(1) * 0.3081 + 0.1307).clamp(0, 1)  # undo the normalisation

    def loss(indices: Tensor) -> Tensor:
        x = pixels(source.train_batch(indices)[0])
        return F.binary_cross_entropy_with_logits(model(x), x, reduction="sum") / len(x)

    def evaluate() -> float:
        x = pixels(source.test_batch(torch.arange(source.num_test))[0])
        return float((model(x).sigmoid() - x).square().sum(1).mean())

    return Problem(model, source.num_train, loss, evaluate)


def language(model: nn.Module, length: int) -> Problem:
    source = text(length)

    def loss(indices: Tensor) -> Tensor:
        x, y = source.train_batch(indices)
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    def evaluate() -> float:
        x, y = source.test_batch(torch.arange(source.num_test))
        return float(F.cross_entropy(model(x).flatten(0, 1), y.flatten()))

    return Problem(model, source.num_train, loss, evaluate)


def motion(states: tuple[Tensor, Tensor], dim: int) -> Problem:
    """The state of a system some time later, from its state now: a smooth, stiff regression."""
    x, y = states
    train, test = slice(0, 10_000), slice(10_000, None)
    model = nets.mlp(dim, 128, 128, 128, dim, activation=nn.SiLU)

    def loss(indices: Tensor) -> Tensor:
        return F.mse_loss(model(x[train][indices]), y[train][indices])

    def evaluate() -> float:
        error = (model(x[test]) - y[test]).square().mean()
        return float(error / y[test].var(0).mean())

    return Problem(model, 10_000, loss, evaluate)


def contrastive() -> Problem:
    """Two views of each image among all others of the batch (InfoNCE); judged by nearest neighbours."""
    source = images("fashion-mnist", train=20_000)
    model = nets.encoder()

    def view(x: Tensor, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        shift = torch.randint(-4, 5, (2,), generator=generator).tolist()
        moved = torch.roll(x, shift, (-2, -1))
        noise = torch.randn(x.shape, generator=generator)
        return moved * (0.6 + 0.8 * torch.rand(len(x), 1, 1, 1, generator=generator)) + 0.2 * noise

    def loss(indices: Tensor) -> Tensor:
        x = source.train_batch(indices)[0]
        seed = int(indices.sum())
        z = F.normalize(model(torch.cat([view(x, seed), view(x, seed + 1)])), dim=1)
        first, second = z.chunk(2)
        return F.cross_entropy(first @ second.T / 0.2, torch.arange(len(x)))

    def evaluate() -> float:
        known, labels = source.train_batch(torch.arange(4000))
        x, y = source.test_batch(torch.arange(source.num_test))
        near = F.normalize(model(x), dim=1) @ F.normalize(model(known), dim=1).T
        votes = F.one_hot(labels[near.topk(10, dim=1).indices], 10).sum(1)
        return 100 * float((votes.argmax(1) == y).double().mean())

    return Problem(model, 20_000, loss, evaluate)
