"""What the tests of Shampoo and Jorge share: small models, and what travels between ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import kronfac
from kronfac.layers.registry import find_layers
from tests.training import parameters

EPSILON = 0.01
#: Options under which a method is its plain equation at every step.
PLAIN: dict[str, Any] = {"damping": EPSILON, "factor_every": 1, "refresh_every": 1, "rescale": None}
#: Widths of both sides of both layers in :func:`bytes_sent`.
WIDTHS = (6, 6, 7, 3)


def make_model(kind: str) -> tuple[nn.Module, Tensor]:
    """A small model of linear layers, or of a convolution that may have groups; and its inputs."""
    torch.manual_seed(0)
    if kind == "linear":
        layers = [nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3, bias=False)]
        return nn.Sequential(*layers), torch.randn(7, 4)
    conv = nn.Conv2d(2, 4, 3, padding=1, groups=2 if kind == "grouped" else 1)
    head = nn.Linear(4 * 9, 3)
    return nn.Sequential(conv, nn.Tanh(), nn.Flatten(), head), torch.randn(7, 2, 3, 3)


def check_equal(kind: str, make_fast: Any, make_slow: Any, steps: int = 5) -> None:
    """Two optimizers lead to the same parameters, step by step."""
    (model, x), (slow, _) = make_model(kind), make_model(kind)
    optimizers = ((model, make_fast(model)), (slow, make_slow(slow)))
    for number in range(steps):
        for one, optimizer in optimizers:
            one.zero_grad()
            (one(x + number) - 1).square().sum(1).mean().backward()
            optimizer.step()
        torch.testing.assert_close(parameters(model), parameters(slow), rtol=1e-9, atol=1e-11)


def block_of(method: str, module: nn.Module, **options: Any) -> Any:
    """The block that a method has for a module."""
    (layer,) = find_layers("one", module)
    return getattr(kronfac, method).method(**options).block(layer)


def bytes_sent(rank: int, method: str, scheme: str) -> dict[str, int]:
    """What four steps of a rank send; statistics at each, a refresh at every other one."""
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    wrapped, base = DistributedDataParallel(model), SGD(model.parameters(), lr=0.1)
    options = {"damping": EPSILON, "factor_every": 1, "refresh_every": 2, "rescale": "graft"}
    optimizer = getattr(kronfac, method)(wrapped, base, distribute=scheme, **options)
    for number in range(4):
        optimizer.zero_grad()
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(2 * number + rank))
        F.cross_entropy(wrapped(x), torch.tensor([0, 1, 2, 0])).backward()
        optimizer.step()
    found: dict[str, int] = optimizer.stats()["bytes"]
    return found
