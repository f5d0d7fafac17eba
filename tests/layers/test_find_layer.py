"""Which modules have a layer, and the half sentence that says why others have none."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from kronfac.layers import Layer, find_layers
from kronfac.layers.conv import ConvLayer
from kronfac.layers.linear import LinearLayer


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class Renamed(nn.Linear):
    """A subclass that adds nothing to the computation."""


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class ScaledConv(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class StandardisedConv(nn.Conv2d):
    """Convolves with another weight, without a forward of its own."""

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(x, weight - weight.mean(), bias)


def parametrized(module: nn.Module, name: str) -> nn.Module:
    parametrize.register_parametrization(module, name, Doubled())
    return module


def old_weight_norm(module: nn.Module) -> nn.Module:
    with pytest.warns(FutureWarning, match="weight_norm"):
        return torch.nn.utils.weight_norm(module)


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        (nn.Linear(2, 3), LinearLayer),
        (nn.Conv1d(2, 3, 1), ConvLayer),
        (nn.Conv2d(2, 3, 1), ConvLayer),
        (nn.Conv3d(2, 3, 1), ConvLayer),
        (Renamed(2, 3), LinearLayer),
        (nn.Linear(2, 3, dtype=torch.bfloat16), LinearLayer),
    ],
    ids=["Linear", "Conv1d", "Conv2d", "Conv3d", "subclass", "bfloat16"],
)
def test_supported_modules(module: nn.Module, kind: type[Layer]) -> None:
    (found,) = find_layers("some.name", module)
    assert isinstance(found, kind)
    assert found.name == "some.name"
    assert found.module is module
    assert found.kind == type(module).__name__


REASONS: dict[str, tuple[Any, str]] = {
    "parametrized-weight": (lambda: parametrized(nn.Linear(2, 3), "weight"), "parametrized"),
    "parametrized-bias": (lambda: parametrized(nn.Linear(2, 3), "bias"), "parametrized"),
    "parametrized-conv": (lambda: parametrized(nn.Conv2d(2, 3, 1), "weight"), "parametrized"),
    "weight-norm": (lambda: parametrizations.weight_norm(nn.Linear(2, 3)), "parametrized"),
    "spectral-norm": (lambda: parametrizations.spectral_norm(nn.Linear(2, 3)), "parametrized"),
    "old-weight-norm": (lambda: old_weight_norm(nn.Linear(2, 3)), "computed (weight norm"),
    "lazy-linear": (lambda: nn.LazyLinear(3), "lazy"),
    "lazy-conv": (lambda: nn.LazyConv2d(3, 1), "lazy"),
    "complex-linear": (lambda: nn.Linear(2, 3, dtype=torch.complex64), "complex"),
    "complex-conv": (lambda: nn.Conv1d(2, 3, 1, dtype=torch.complex64), "complex"),
    "own-forward": (lambda: Scaled(2, 3), "it overrides Linear.forward"),
    "own-conv-forward": (lambda: ScaledConv(2, 3, 1), "it overrides Conv2d.forward"),
    "sparse-embedding": (lambda: nn.Embedding(4, 3, sparse=True), "sparse"),
    "scaled-embedding": (lambda: nn.Embedding(4, 3, scale_grad_by_freq=True), "scale_grad_by_freq"),
    "embedding-bag": (lambda: nn.EmbeddingBag(4, 3), "EmbeddingBag sums its rows"),
    "sync-norm": (
        lambda: nn.SyncBatchNorm(3),
        "SyncBatchNorm normalises over the samples of all ranks",
    ),
    "lstm": (lambda: nn.LSTM(2, 3), "LSTM computes all time steps in one kernel"),
    "gru-cell": (lambda: nn.GRUCell(2, 3), "GRUCell has two products in one kernel"),
    **{
        type(module).__name__: (lambda module=module: module, f"{type(module).__name__} is no")
        for module in (
            nn.ConvTranspose1d(2, 3, 1),
            nn.ConvTranspose2d(2, 3, 1),
            nn.ConvTranspose3d(2, 3, 1),
            nn.Bilinear(2, 2, 3),
            nn.PReLU(),
            nn.ReLU(),
            Doubled(),
        )
    },
}


@pytest.mark.parametrize(("make", "reason"), REASONS.values(), ids=REASONS.keys())
def test_unsupported_modules_have_a_reason(make: Any, reason: str) -> None:
    found = find_layers("name", make())
    assert isinstance(found, str)
    assert reason in found


def test_a_convolution_with_another_weight_has_a_reason() -> None:
    assert isinstance(find_layers("name", StandardisedConv(2, 3, 1)), str)


@pytest.mark.parametrize(
    ("lazy", "kind"),
    [(lambda: nn.LazyLinear(3), LinearLayer), (lambda: nn.LazyConv1d(3, 1), ConvLayer)],
)
def test_a_lazy_module_is_a_layer_after_its_first_forward(lazy: Any, kind: type[Layer]) -> None:
    module = lazy()
    module(torch.zeros(1, 2, 2))
    assert [type(found) for found in find_layers("name", module)] == [kind]


def test_removing_a_parametrization_makes_a_layer() -> None:
    module = parametrized(nn.Linear(2, 3), "weight")
    parametrize.remove_parametrizations(module, "weight")
    assert [type(found) for found in find_layers("name", module)] == [LinearLayer]
