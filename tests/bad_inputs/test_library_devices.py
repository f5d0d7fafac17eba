"""Any default device will do: what K-FAC makes for itself says where it is."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kronfac
from tests.training import batch

OPTIONS: list[dict[str, Any]] = [
    {},
    {"fisher": "mc"},
    {"refresh_every": kronfac.StaleInterval()},
    {"damping": kronfac.LevenbergMarquardt(every=1)},
    {"sharing": "reduce", "rescale": "graft"},
]


class RootNorm(nn.Module):
    """A root-mean-square norm of somebody else's, which is recognised by trying it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), RootNorm(6), nn.Tanh(), nn.Linear(6, 3))


@pytest.fixture
def default_is_meta() -> Iterator[None]:
    yield
    torch.set_default_device(None)


def train(options: dict[str, Any], device: str) -> dict[str, Tensor]:
    """Two steps of a model on the CPU, under another default device."""
    torch.set_default_device("cpu")
    model, data = normed(), batch()
    torch.set_default_device(device)
    optimizer = kronfac.KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)

    def closure() -> Tensor:
        optimizer.zero_grad()
        scores = model(data[0])
        if options.get("fisher") == "mc":
            optimizer.observe(scores)
        loss = nn.functional.cross_entropy(scores, data[1])
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)  # type: ignore[arg-type]
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_training_is_the_same_under_another_default_device(
    options: dict[str, Any], default_is_meta: None
) -> None:
    elsewhere = train(options, "meta")
    here = train(options, "cpu")
    for name, value in here.items():
        torch.testing.assert_close(elsewhere[name], value, rtol=0, atol=0)


def test_a_foreign_norm_is_found_under_another_default_device(default_is_meta: None) -> None:
    model = normed()
    torch.set_default_device("meta")
    optimizer = kronfac.KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert "No parameter is left out." in optimizer.summary()


def test_a_whole_model_on_the_meta_device_can_be_planned(default_is_meta: None) -> None:
    torch.set_default_device("meta")
    model = normed()
    optimizer = kronfac.KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert "2 layers" in optimizer.summary()
