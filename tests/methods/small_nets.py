"""Small float64 nets for methods that are compared with a slow reference over several steps."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.training import parameters

SAMPLES, CLASSES = 6, 3


def make(kind: str) -> nn.Module:
    """``"linear"``, ``"conv"`` or ``"grouped"``."""
    torch.manual_seed(0)
    if kind == "linear":
        net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, CLASSES, bias=False))
    else:
        groups = 2 if kind == "grouped" else 1
        conv = nn.Conv2d(2, 4, 3, padding=1, groups=groups)
        net = nn.Sequential(conv, nn.Tanh(), nn.Flatten(), nn.Linear(36, CLASSES))
    return net.double()


def batch(kind: str, number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    shape = (4,) if kind == "linear" else (2, 3, 3)
    x = torch.randn(SAMPLES, *shape, generator=generator, dtype=torch.float64)
    return x, torch.randint(CLASSES, (SAMPLES,), generator=generator)


def train(model: nn.Module, optimizer: Any, kind: str, numbers: range) -> None:
    for number in numbers:
        x, y = batch(kind, number)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def assert_follows(optimizer: Any, reference: Any, kind: str, steps: int = 5) -> None:
    """A method's parameters are those of its reference after every step."""
    for number in range(steps):
        train(optimizer.model, optimizer, kind, range(number, number + 1))
        x, y = batch(kind, number)
        reference.step(x, lambda out, y=y: F.cross_entropy(out, y, reduction="none"))
        torch.testing.assert_close(
            parameters(optimizer.model), parameters(reference.model), rtol=1e-8, atol=1e-10
        )


def twins(kind: str) -> tuple[nn.Module, nn.Module]:
    model = make(kind)
    return model, copy.deepcopy(model)
