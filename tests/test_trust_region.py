"""``rescale="trust-region"``: ACKTR's α = min(α_max, √(2δ/(gᵀF⁻¹g)))."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import kronfac
from tests.training import (
    applied,
    assert_close,
    assert_same,
    batch,
    cnn,
    factors,
    frozen_kfac,
    images,
    kfac,
    layers,
    mlp,
    parameters,
    step,
)

pytestmark = pytest.mark.usefixtures("double_precision")

DAMPING = 0.1


def moved(model: nn.Module, optimizer: kronfac.KFAC, data: Any) -> dict[str, Tensor]:
    """How one step changes each parameter."""
    before = parameters(model)
    step(model, optimizer, data)
    return {name: value - before[name] for name, value in parameters(model).items()}


def trusted(model: nn.Module, rate: float = 100.0, **options: Any) -> kronfac.KFAC:
    """One whose rate is so large that the trust region decides."""
    base = SGD(model.parameters(), lr=rate)
    return kfac(model, base, rescale="trust-region", damping=DAMPING, **options)


def matrix_of(change: dict[str, Tensor], name: str) -> Tensor:
    """A layer's weight and bias as its factors order them: for images taps first, channels inside."""
    weight, bias = change[f"{name}.weight"], change[f"{name}.bias"]
    return torch.cat([weight.movedim(1, -1).flatten(1), bias[:, None]], dim=1)


def predicted(
    optimizer: kronfac.KFAC, change: dict[str, Tensor], damping: float, split: bool = False
) -> float:
    """``½ sᵀ(F + γI)s`` with ``F = G ⊗ A`` of each layer written out; ``split`` damps both factors."""
    total = 0.0
    for name in layers(optimizer):
        A, G = factors(optimizer, "A")[name], factors(optimizer, "G")[name]
        s = matrix_of(change, name).flatten()
        if split:
            pi = float((A.trace() / len(A)) / (G.trace() / len(G))) ** 0.5
            F = torch.kron(
                G + damping**0.5 / pi * torch.eye(len(G)), A + damping**0.5 * pi * torch.eye(len(A))
            )
        else:
            F = torch.kron(G, A) + damping * torch.eye(len(s))
        total += 0.5 * float(s @ F @ s)
    return total


# --- the bound -------------------------------------------------------------------------------


@pytest.mark.parametrize("radius", [1e-6, 1e-2])
@pytest.mark.parametrize("make", [mlp, cnn])
def test_an_active_bound_is_met_in_the_damped_curvature(make: Any, radius: float) -> None:
    model = make()
    optimizer = trusted(model, trust_radius=radius)
    change = moved(model, optimizer, batch() if make is mlp else images())
    assert predicted(optimizer, change, DAMPING) == pytest.approx(radius, rel=1e-9)
    assert predicted(optimizer, change, 0.0) < radius


def test_damping_of_both_factors_is_that_of_the_prediction() -> None:
    model = mlp()
    optimizer = trusted(model, solver="cholesky", trust_radius=1e-3)
    change = moved(model, optimizer, batch())
    assert predicted(optimizer, change, DAMPING, split=True) == pytest.approx(1e-3, rel=1e-9)
    assert predicted(optimizer, change, 0.0) < 1e-3


def test_momentum_before_preconditioning_is_bounded_as_well() -> None:
    model = mlp()
    optimizer = trusted(model, momentum=0.9, trust_radius=1e-3)
    for number in range(3):
        change = moved(model, optimizer, batch(number))
        assert predicted(optimizer, change, DAMPING) == pytest.approx(1e-3, rel=1e-9)


def test_short_steps_are_left_as_solved() -> None:
    model, twin = mlp(), mlp()
    optimizer = trusted(model, rate=1e-3, trust_radius=1.0)
    change = moved(model, optimizer, batch())
    assert_close(change, moved(twin, kfac(twin, SGD(twin.parameters(), lr=1e-3)), batch()))
    assert predicted(optimizer, change, DAMPING) < 1.0


def test_each_group_counts_with_its_own_rate() -> None:
    model = mlp()
    others = [p for module in model[1:] for p in module.parameters()]
    base = SGD([{"params": model[0].parameters(), "lr": 50.0}, {"params": others, "lr": 10.0}])
    optimizer = kfac(model, base, rescale="trust-region", trust_radius=1e-3)
    change = moved(model, optimizer, batch())
    assert predicted(optimizer, change, DAMPING) == pytest.approx(1e-3, rel=1e-9)


def fisher_of(model: nn.Linear, x: Tensor) -> Tensor:
    """The Fisher matrix of unit-variance Gaussian outputs, ``(1/N) Σ JᵀJ``, by plain autograd."""
    rows = []
    for row in x:
        for output in model(row):
            grads = torch.autograd.grad(output, [*model.parameters()], retain_graph=True)
            rows.append(torch.cat([grad.flatten() for grad in grads]))
    return torch.stack(rows).T @ torch.stack(rows) / len(x)


@pytest.mark.parametrize(("damping", "reaches_it"), [(1e-10, True), (0.1, False)])
def test_the_models_own_divergence_is_within_the_radius(damping: float, reaches_it: bool) -> None:
    """K-FAC is exact for a linear model with Gaussian outputs, and so is the quadratic form."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    x, y = torch.randn(7, 3), torch.randn(7, 2)
    fisher, before, radius = fisher_of(model, x), parameters(model), 0.01
    base = SGD(model.parameters(), lr=100.0)
    options: dict[str, Any] = {"rescale": "trust-region", "trust_radius": radius}
    optimizer = kfac(model, base, fisher="exact", **options, damping=damping)
    outputs = model(x)
    optimizer.observe(outputs, likelihood="gaussian")
    ((outputs - y).square().sum() / (2 * len(x))).backward()
    optimizer.step()
    change = torch.cat([(p - before[n]).flatten() for n, p in parameters(model).items()])
    dense = 0.5 * float(change @ fisher @ change)
    divergence = float((model(x) - outputs).detach().square().sum() / (2 * len(x)))
    assert divergence == pytest.approx(dense, rel=1e-9)
    if reaches_it:
        assert divergence == pytest.approx(radius, rel=1e-6)
    else:
        assert 0 < divergence < radius


# --- the rule --------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [1e-3, 0.1, 10.0])
def test_the_rate_is_the_largest_that_is_allowed(rate: float) -> None:
    radius = 1e-4
    model = mlp()
    before, solved = applied(model, frozen_kfac(model, damping=DAMPING), batch())
    product = sum(float((before[name] * solved[name]).sum()) for name in before)
    alpha = min(rate, (2 * radius / product) ** 0.5)
    model = mlp()
    change = moved(model, trusted(model, rate=rate, trust_radius=radius), batch())
    assert_close(change, {name: -alpha * value for name, value in solved.items()})


def test_it_is_a_kl_clip_at_twice_the_radius() -> None:
    model, twin = mlp(), mlp()
    step(model, kfac(model, rescale="trust-region", trust_radius=1e-5), batch())
    step(twin, kfac(twin, rescale="kl-clip", kl_clip=2e-5), batch())
    assert_same(parameters(model), parameters(twin))


def test_a_rate_of_zero_leaves_steps_as_solved() -> None:
    solved = applied(model := mlp(), frozen_kfac(model), batch())[1]
    model = mlp()
    optimizer = frozen_kfac(model, rescale="trust-region", trust_radius=1e-12)
    assert_same(applied(model, optimizer, batch())[1], solved)


def test_a_negative_sum_bounds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from kronfac.methods.kfac.block import KFACBlock

    monkeypatch.setattr(KFACBlock, "precondition", lambda _, solution, gradient, damping: -gradient)
    model = mlp()
    before, after = applied(model, trusted(model, trust_radius=1e-12), batch())
    assert_same(after, {name: -value for name, value in before.items()})


def test_stats_say_how_often_the_bound_was_active() -> None:
    model = mlp()
    optimizer = trusted(model, trust_radius=1e-9)
    step(model, optimizer, batch(0))
    optimizer.param_groups[0]["lr"] = 0.0
    step(model, optimizer, batch(1))
    stats = optimizer.stats()
    assert (stats["trust_region_active"], stats["trust_region_steps"]) == (1, 2)
    assert stats["kl_clip_steps"] == 0
