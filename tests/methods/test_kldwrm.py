"""KLD-WRM: K-FAC without a wake, the minimum of a wake with one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import kronfac
from tests.distributed.equivalence import double_precision
from tests.distributed.models import KINDS
from tests.methods.gradient_only import make_model
from tests.references.kldwrm import KLDWRM as Reference
from tests.training import assert_same, parameters

RHO, GAMMA = 0.8, 0.1
#: Options under which a step is as solved, from statistics of every batch.
PLAIN: dict[str, Any] = {"damping": GAMMA, "factor_every": 1, "refresh_every": 1, "rescale": None}
#: Learning rates that rise and fall.
RATES = (0.05, 0.1, 0.2, 0.1, 0.02, 0.04)

each_variant = pytest.mark.parametrize("variant", ["so", "q"])


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    torch.manual_seed(0)
    with double_precision():
        yield


def set_rate(optimizer: Any, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


# --- without a wake --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mlp", "cnn", "transformer"])
def test_without_memory_it_is_kfac_bit_for_bit(kind: str) -> None:
    found = []
    common = {"factor_every": 1, "refresh_every": 2, "momentum": 0.9, "rescale": "kl-clip"}
    for method, options in ((kronfac.KLDWRM, {"rho": 0.0}), (kronfac.KFAC, {"decay": 0.0})):
        model = KINDS[kind].model()
        optimizer = method(model, SGD(model.parameters(), lr=0.01), **common, **options)
        for number in range(5):
            optimizer.zero_grad()
            x, y = KINDS[kind].batch(number, 12)
            scores = model(x).flatten(0, -2)
            nn.functional.cross_entropy(scores, y.flatten()).backward()
            optimizer.step()
        found.append(parameters(model))
    assert_same(*found)


def test_a_quadratic_model_without_memory_shortens_steps() -> None:
    """``(F/η + F)⁻¹g`` is K-FAC's step at the rate ``η/(1+η)``."""
    found = []
    for rate, method, options in (
        (0.5, kronfac.KLDWRM, {"rho": 0.0, "variant": "q"}),
        (0.5 / 1.5, kronfac.KFAC, {"decay": 0.0}),
    ):
        model, x = make_model("linear")
        optimizer = method(model, SGD(model.parameters(), lr=rate), **PLAIN, **options)
        for number in range(3):
            optimizer.zero_grad()
            (model(x + number) - 1).square().sum(1).mean().backward()
            optimizer.step()
        found.append(parameters(model))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-13)


# --- the wake --------------------------------------------------------------------------------


class Toy:
    """``½‖Wx - y‖²`` of one linear layer, whose Fisher ``I ⊗ mean(x xᵀ)`` is a Kronecker product."""

    def __init__(self) -> None:
        self.x, self.y = torch.randn(6, 8, 3), torch.randn(6, 8, 2)

    def curvature(self, k: int) -> Tensor:
        """``F_k + γI`` for the parameters row by row."""
        inputs = self.x[k].T @ self.x[k] / len(self.x[k])
        return torch.kron(torch.eye(2), inputs) + GAMMA * torch.eye(6)

    def gradient(self, k: int, theta: Tensor) -> Tensor:
        residual = self.x[k] @ theta.reshape(2, 3).T - self.y[k]
        return (residual.T @ self.x[k] / len(self.x[k])).flatten()

    def minimum(self, k: int, path: list[Tensor], variant: str) -> Tensor:
        """Where the model of step k with its whole wake, from all past iterates, has no slope:

        ``g_k + B_k (θ-θ_k) + λ_k Σ_i ρ^(k-i) (F_i + γI) (θ-θ_i) = 0``.
        """
        weights = [RHO ** (k - i) for i in range(k + 1)]
        wake = [w * self.curvature(i) for i, w in enumerate(weights)]
        lam = 1 / (RATES[k] * sum(weights))
        mean = sum(wake) / sum(weights)
        B = mean if variant == "q" else torch.zeros_like(mean)
        right = lam * sum(F @ theta for F, theta in zip(wake, path, strict=True))
        return torch.linalg.solve(
            lam * sum(wake) + B, right + B @ path[k] - self.gradient(k, path[k])
        )


@each_variant
def test_steps_minimise_the_model_with_its_wake(variant: str) -> None:
    toy, model = Toy(), nn.Linear(3, 2, bias=False)
    options = {"rho": RHO, "variant": variant, "fisher": "exact"}
    optimizer = kronfac.KLDWRM(model, SGD(model.parameters(), lr=1.0), **PLAIN, **options)
    path = [model.weight.detach().flatten().clone()]
    for k, rate in enumerate(RATES):
        set_rate(optimizer, rate)
        optimizer.zero_grad()
        outputs = model(toy.x[k])
        optimizer.observe(outputs, likelihood="gaussian")
        (outputs - toy.y[k]).square().sum(1).div(2).mean().backward()
        optimizer.step()
        expected = toy.minimum(k, path, variant)
        path.append(model.weight.detach().flatten().clone())
        torch.testing.assert_close(path[-1], expected, rtol=1e-10, atol=1e-12)


@each_variant
@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_it_equals_the_reference(kind: str, variant: str) -> None:
    (model, x), (slow, _) = make_model(kind), make_model(kind)
    base = SGD(model.parameters(), lr=1.0)
    fast = kronfac.KLDWRM(model, base, rho=RHO, variant=variant, **PLAIN)
    reference = Reference(slow, variant, RHO, GAMMA)
    for number, rate in enumerate(RATES):
        inputs = x + number / 4
        for one in (model, slow):
            one.zero_grad()
            (one(inputs) - 1).square().sum(1).mean().backward()
        set_rate(fast, rate)
        fast.step()
        reference.step(inputs, rate)
        torch.testing.assert_close(parameters(model), parameters(slow), rtol=1e-8, atol=1e-10)


# --- learning rates of zero ------------------------------------------------------------------


@each_variant
def test_a_learning_rate_of_zero_begins_a_new_wake(variant: str) -> None:
    """It moves nothing, so the step after it is as K-FAC's, with the average of all batches."""
    found = []
    for rho, method, decay in ((RHO, kronfac.KLDWRM, None), (None, kronfac.KFAC, RHO)):
        model, x = make_model("linear")
        own = {"rho": rho, "variant": variant} if rho else {"decay": decay}
        optimizer = method(model, SGD(model.parameters(), lr=0.0), **PLAIN, **own)
        for number, rate in enumerate((0.0, 0.0, 0.1)):
            divided = rate / (1 + rate) if variant == "q" and rho is None else rate
            set_rate(optimizer, divided)
            optimizer.zero_grad()
            (model(x + number) - 1).square().sum(1).mean().backward()
            optimizer.step()
        found.append(parameters(model))
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)


def test_a_learning_rate_may_be_a_tensor() -> None:
    found = []
    for make_rate in (float, torch.tensor):
        model, x = make_model("linear")
        optimizer = kronfac.KLDWRM(model, SGD(model.parameters(), lr=make_rate(0.1)), **PLAIN)
        for number, rate in enumerate((0.1, 0.0, 0.2)):
            set_rate(optimizer, make_rate(rate))
            optimizer.zero_grad()
            (model(x + number) - 1).square().sum(1).mean().backward()
            optimizer.step()
        found.append(parameters(model))
    torch.testing.assert_close(*found)


# --- options ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variant": "qe"}, "variant='qe' is not supported"),
        ({"variant": "exact"}, "variant='exact' is not supported; choose one of 'so', 'q'"),
        ({"rho": 1.0}, "rho=1.0 must be a number in"),
        ({"sharing": "sum"}, "sharing='sum' is not supported"),
        ({"solver": "lu"}, "solver='lu' is not supported"),
        ({"max_dim": 0}, "max_dim=0 must be a whole number"),
        ({"fisher": "forward"}, "fisher='forward'"),
        ({"rescale": "quadratic"}, "rescale='quadratic' chooses the learning rate"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=message):
        kronfac.KLDWRM(model, SGD(model.parameters(), lr=0.1), **options)
