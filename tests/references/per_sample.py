"""What references of per-sample methods share: each gradient by autograd, one at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.training import parameters

RATE = 0.1
#: Takes one step on a model: its inputs, labels and the number of the step.
Reference = Callable[[nn.Module, Tensor, Tensor, int], None]


class Sequence(nn.Module):
    """Linear layers on sequences, whose positions all count: scores of each sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))).square().mean(1)


def net(kind: str) -> tuple[nn.Module, tuple[int, ...]]:
    """A model with three classes, and the shape of a sample."""
    torch.manual_seed(0)
    if kind == "linear":
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), (4,)
    if kind == "sequence":
        return Sequence(), (4, 3)
    groups = 2 if kind == "grouped" else 1
    conv = nn.Conv2d(2, 4, 2, stride=2, groups=groups)
    return nn.Sequential(conv, nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)), (2, 4, 4)


def batch(shape: tuple[int, ...], number: int, samples: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + number)
    x = torch.randn(samples, *shape, generator=generator)
    return x, torch.randint(3, (samples,), generator=generator)


def layers(model: nn.Module) -> list[Any]:
    return [one for one in model.modules() if isinstance(one, nn.Linear | nn.Conv2d)]


def flat(layer: Any, of: Callable[[nn.Parameter], Tensor]) -> Tensor:
    """Something of all parameters of a layer as one vector."""
    return torch.cat([of(p).flatten() for p in layer.parameters()])


def sample_gradients(layer: Any, losses: Tensor) -> Tensor:
    """U: one row for each of some losses, ``[n, P]``."""
    rows = []
    for loss in losses:
        found = torch.autograd.grad(loss, list(layer.parameters()), retain_graph=True)
        rows.append(torch.cat([one.flatten() for one in found]))
    return torch.stack(rows)


def sample_losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def move(layer: Any, direction: Tensor, rate: float = RATE) -> None:
    """Step against a direction ``[P]``."""
    own = list(layer.parameters())
    with torch.no_grad():
        for p, part in zip(own, direction.split([p.numel() for p in own]), strict=True):
            p.sub_(rate * part.view_as(p))


def descend(optimizer: Any, x: Tensor, y: Tensor, parts: int = 1) -> None:
    """One step of an optimizer, in micro-batches."""
    optimizer.zero_grad()
    for some_x, some_y in zip(x.chunk(parts), y.chunk(parts), strict=True):
        outputs = optimizer.model(some_x)
        if optimizer.needs_observe:
            optimizer.observe(outputs)
        (F.cross_entropy(outputs, some_y, reduction="sum") / len(x)).backward()
    optimizer.step()


def assert_follows(
    make: Callable[..., Any], reference: Reference, kind: str, steps: int = 4, parts: int = 1
) -> None:
    """An optimizer and a reference stay together over some steps of plain descent."""
    model, shape = net(kind)
    slow = copy.deepcopy(model)
    optimizer = make(model, torch.optim.SGD(model.parameters(), lr=RATE))
    for number in range(steps):
        x, y = batch(shape, number)
        descend(optimizer, x, y, parts)
        reference(slow, x, y, number)
        torch.testing.assert_close(parameters(model), parameters(slow), rtol=1e-9, atol=1e-11)
