"""iEF: its update, and the Gauss-Newton step that it is for one output and squared loss."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

import kronfac
from tests.distributed.equivalence import double_precision
from tests.references import ief
from tests.references.per_sample import (
    RATE,
    assert_follows,
    batch,
    descend,
    flat,
    layers,
    net,
    sample_gradients,
    sample_losses,
)

LAMBDA = 0.1


@pytest.fixture(autouse=True)
def _double() -> Any:
    torch.manual_seed(0)
    with double_precision():
        yield


def make(model: nn.Module, base: Any = None, **options: Any) -> Any:
    chosen = {"damping": LAMBDA, "rescale": None, **options}
    return kronfac.IEF(model, base or SGD(model.parameters(), lr=0.0), **chosen)


def gradient(layer: Any) -> Tensor:
    return flat(layer, lambda p: p.grad.clone())


def assert_equal(actual: Tensor, expected: Tensor, rtol: float = 1e-9) -> None:
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=1e-11)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("kind", ["linear", "sequence", "conv", "grouped"])
def test_steps_are_those_of_the_paper(kind: str, parts: int) -> None:
    def reference(model: nn.Module, x: Tensor, y: Tensor, number: int) -> None:
        ief.step(model, x, y, LAMBDA)

    assert_follows(make, reference, kind, parts=parts)


# --- identities ------------------------------------------------------------------------------


def regression() -> tuple[nn.Linear, Tensor, Tensor, Tensor]:
    """One output, more parameters than samples; with the residuals ``r``."""
    model = nn.Linear(9, 1)
    x, y = torch.randn(5, 9), torch.randn(5, 1)
    return model, x, y, (model(x) - y).detach().squeeze(1)


def step_of(model: nn.Module, x: Tensor, y: Tensor, damping: Any) -> Tensor:
    model = copy.deepcopy(model)
    optimizer = make(model, damping=damping)
    outputs = model(x)
    optimizer.observe(outputs)
    ((outputs - y).square().sum(1) / 2).mean().backward()
    optimizer.step()
    return gradient(model)


def test_scalar_regression_tends_to_gauss_newton() -> None:
    model, x, y, r = regression()
    J = torch.cat([x, torch.ones(5, 1)], 1)
    gauss_newton = torch.linalg.pinv(J) @ r
    errors = []
    for damping in (1e-1, 1e-3, 1e-5, 1e-12):
        error = (step_of(model, x, y, damping) - gauss_newton).norm() / gauss_newton.norm()
        errors.append(float(error))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-8


def test_each_sample_falls_by_its_own_share() -> None:
    """``U Δ = s`` without damping, where the empirical Fisher has ``U Δ = 1``."""
    model, x, y, r = regression()
    U = r[:, None] * torch.cat([x, torch.ones(5, 1)], 1)
    assert_equal(U @ step_of(model, x, y, 1e-13), r.square(), rtol=1e-6)


def test_equal_shares_are_the_natural_gradient() -> None:
    """With ``s = 1`` iEF and the empirical Fisher are the same, ``λ = Nγ`` apart from a factor N."""
    U, gamma = torch.randn(5, 8), 0.3
    fisher = U.T @ U / 5 + gamma * torch.eye(8)
    expected = torch.linalg.solve(fisher, U.mean(0))
    assert_equal(ief.direction(U, torch.ones(5), 5 * gamma), expected)


def test_weights_do_not_depend_on_the_scale_of_the_loss() -> None:
    """Relative damping follows the loss, and with it the step: outputs are taken to have curvature 1."""
    found = []
    for scale in (1.0, 1e4):
        torch.manual_seed(0)
        model, x, y, _ = regression()
        optimizer = make(model, damping=kronfac.Relative(0.1))
        outputs = model(x)
        optimizer.observe(outputs)
        (scale * (outputs - y).square().sum(1) / 2).mean().backward()
        optimizer.step()
        found.append(gradient(model))
    assert_equal(found[1], 1e4 * found[0])


# --- momentum, and steps between refreshes ---------------------------------------------------


def shares(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    outputs = model(x)
    losses = F.cross_entropy(outputs, y, reduction="sum")
    return torch.autograd.grad(losses, outputs)[0].square().sum(1)


def test_momentum_takes_the_mean_weight() -> None:
    """``Δ = N c̄ m + Uᵀ(c - c̄)`` with the buffer m."""
    model, shape = net("linear")
    optimizer = make(model, momentum=0.9)
    buffers: dict[Any, Tensor] = {}
    for number in range(3):
        x, y = batch(shape, number)
        expected = {}
        for layer in layers(model):
            U = sample_gradients(layer, sample_losses(model, x, y))
            c = torch.linalg.solve(U @ U.T + LAMBDA * torch.eye(6), shares(model, x, y))
            buffers[layer] = 0.9 * buffers.get(layer, 0) + U.mean(0)
            common = c.mean().clamp(min=0)
            expected[layer] = 6 * common * buffers[layer] + U.T @ (c - common)
        descend(optimizer, x, y)
        for layer, direction in expected.items():
            assert_equal(gradient(layer), direction)


def test_between_refreshes_the_gradient_takes_the_mean_weight() -> None:
    model, shape = net("linear")
    optimizer = make(model, factor_every=2, refresh_every=2)
    x, y = batch(shape, 0)
    scales = []
    for layer in layers(model):
        U = sample_gradients(layer, sample_losses(model, x, y))
        c = torch.linalg.solve(U @ U.T + LAMBDA * torch.eye(6), shares(model, x, y))
        scales.append(6 * c.mean().clamp(min=0))
    descend(optimizer, x, y)
    x, y = batch(shape, 1)
    F.cross_entropy(model(x), y).backward()
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    before = [gradient(layer) for layer in layers(model)]
    optimizer.step()
    for layer, scale, V in zip(layers(model), scales, before, strict=True):
        assert_equal(gradient(layer), scale * V)


# --- what it needs ---------------------------------------------------------------------------


def test_it_asks_for_the_outputs() -> None:
    model, shape = net("linear")
    optimizer = make(model, SGD(model.parameters(), lr=RATE))
    assert optimizer.needs_observe
    x, y = batch(shape, 0)
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(RuntimeError, match=r"IEF needs the model's outputs .* optimizer\.observe"):
        optimizer.step()


@pytest.mark.parametrize("fisher", ["mc", "exact", "forward"])
def test_other_gradients_than_the_loss_s_are_refused(fisher: str) -> None:
    with pytest.raises(ValueError, match=f"IEF .* fisher='{fisher}' does not observe"):
        make(net("linear")[0], fisher=fisher)
