"""The page's adaptive damping trains networks without norms on full batches, as SGD does."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kronfac.train import data

PAGE = Path(__file__).parent.parent / "docs" / "quickstart.md"


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def cnn() -> nn.Module:
    layers = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 16, 10))


def snippet(**changes: str) -> str:
    """The code under "Adaptive damping", perhaps with another argument."""
    section = PAGE.read_text().split("## Adaptive damping")[1]
    code = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)[0]
    for old, new in changes.items():
        assert old in code
        code = code.replace(old, new)
    return code


def accuracy(model: nn.Module) -> float:
    source = data.load("digits")
    x, y = source.test_batch(torch.arange(source.num_test))
    with torch.no_grad():
        return float((model(x).argmax(1) == y).double().mean())


def trained(make: Callable[[], nn.Module], code: str, steps: int, seed: int) -> Any:
    source = data.load("digits")
    whole = source.train_batch(torch.arange(source.num_train))
    torch.manual_seed(seed)
    names: dict[str, Any] = {"model": make(), "loader": [whole] * steps, "loss_fn": F.cross_entropy}
    exec("import torch, kronfac\n" + code, names)
    return names["optimizer"]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("make", [mlp, cnn])
def test_the_snippet_reaches_what_sgd_reaches(make: Callable[[], nn.Module], seed: int) -> None:
    optimizer = trained(make, snippet(), 20, seed)
    assert accuracy(optimizer.model) > 0.97
    assert optimizer.stats()["damping_rejected"] < 5


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("rescale", "least"), [("None", 0.5), ('"kl-clip"', 0.95)])
@pytest.mark.parametrize("make", [mlp, cnn])
def test_no_rule_diverges(
    make: Callable[[], nn.Module], rescale: str, least: float, seed: int
) -> None:
    """Steps as solved are no good here, but they are undone in time."""
    code = snippet(**{'rescale="quadratic"': f"rescale={rescale}"})
    optimizer = trained(make, code, 40, seed)
    assert accuracy(optimizer.model) > least
    assert all(bool(torch.isfinite(p).all()) for p in optimizer.model.parameters())
