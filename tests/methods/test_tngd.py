"""Thermodynamic natural gradient descent: where it starts, where it ends, and what lies between."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

import kronfac
from kronfac.methods.tngd import TNGDBlock
from tests import oracles
from tests.distributed.equivalence import double_precision
from tests.references.tngd import SlowTNGD, integrate
from tests.training import assert_same, parameters, saved_and_loaded

GAMMA = 0.1
SHAPES = {"linear": (4,), "conv": (2, 4, 4), "norm": (4,), "embedding": ()}


@pytest.fixture(autouse=True)
def _double() -> Any:
    torch.manual_seed(0)
    with double_precision():
        yield


def net(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "linear":
        return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    if kind == "conv":
        return nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(27, 2))
    if kind == "norm":
        return nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    return nn.Sequential(nn.Embedding(7, 3), nn.Tanh(), nn.Linear(3, 2))


def batch(kind: str, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    if kind == "embedding":
        return torch.randint(5, (9,), generator=generator)
    return torch.randn(9, *SHAPES[kind], generator=generator)


def make(model: nn.Module, lr: float = 0.1, **options: Any) -> Any:
    fixed = {"damping": GAMMA, "factor_every": 1, "refresh_every": 1, "decay": 0.0, "rescale": None}
    return kronfac.TNGD(model, SGD(model.parameters(), lr=lr), **{**fixed, **options})


def take(model: nn.Module, optimizer: Any, x: Tensor) -> None:
    optimizer.zero_grad()
    (model(x) - 1).square().sum(1).mean().backward()
    optimizer.step()


def steps(kind: str, count: int = 3, method: Any = make, **options: Any) -> Tensor:
    model = net(kind)
    optimizer = method(model, **options)
    for number in range(count):
        take(model, optimizer, batch(kind, number))
    return nn.utils.parameters_to_vector(model.parameters()).detach()


# --- the slow reference -----------------------------------------------------------------------


def slow_steps(kind: str, count: int, lr: float, **options: Any) -> Tensor:
    model = net(kind)
    layers: list[Any] = [one for one in model if isinstance(one, nn.Linear | nn.Conv2d)]  # type: ignore[attr-defined]
    rules = [SlowTNGD(**options) for _ in layers]
    for number in range(count):
        changes = []
        for layer, rule in zip(layers, rules, strict=True):
            model.zero_grad()
            outputs, (call,) = oracles.run_layer(model, layer, batch(kind, number))
            loss = (outputs - 1).square().sum(1).mean()
            (g,) = torch.autograd.grad(loss, call.z, retain_graph=True)
            loss.backward()
            a, g = oracles.layer_rows(layer, call.x, g)
            A, G = oracles.kfac_factors(a, g, "batch")
            changes.append(rule(A, G, oracles.matrix_gradient(layer)))
        with torch.no_grad():
            for layer, change in zip(layers, changes, strict=True):
                layer.weight -= lr * change[:, :-1].reshape(layer.weight.shape)
                layer.bias -= lr * change[:, -1]
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize("kind", ["linear", "conv"])
@pytest.mark.parametrize("start", ["previous", "gradient"])
@pytest.mark.parametrize("time", [0.5, 20.0])
def test_it_is_the_slow_reference(kind: str, start: Any, time: float) -> None:
    fast = steps(kind, 4, time=time, start=start)
    slow = slow_steps(kind, 4, 0.1, time=time, gamma=GAMMA, warm=start == "previous")
    torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-11)


def test_the_closed_form_is_what_small_steps_lead_to() -> None:
    rows = torch.randn(9, 6)
    M, b, start = rows.T @ rows / 9 + 0.1 * torch.eye(6), torch.randn(6), torch.randn(6)
    rest = torch.linalg.solve(M, b)
    closed = rest + torch.matrix_exp(-M * 2.0) @ (start - rest)
    torch.testing.assert_close(integrate(M, b, start, 2.0, 20_000), closed, rtol=1e-3, atol=1e-4)


# --- both ends --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SHAPES)
def test_without_time_it_stays_at_the_gradient(kind: str) -> None:
    def plain(model: nn.Module) -> Any:
        return SGD(model.parameters(), lr=0.1)

    assert torch.equal(steps(kind, time=0.0, start="gradient"), steps(kind, method=plain))


def test_without_time_it_stays_at_the_first_estimate() -> None:
    model = net("linear")
    optimizer = make(model, time=0.0)
    found = []
    for number in range(3):
        take(model, optimizer, batch("linear", number))
        found.append(model[0].weight.grad.clone())  # type: ignore[index,union-attr,operator]
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("start", ["previous", "gradient"])
@pytest.mark.parametrize("time", [1e4, math.inf])
def test_with_time_it_is_the_natural_gradient(kind: str, start: Any, time: float) -> None:
    def natural(model: nn.Module) -> Any:
        fixed = {"factor_every": 1, "refresh_every": 1, "decay": 0.0, "rescale": None}
        base = SGD(model.parameters(), lr=0.1)
        return kronfac.KFAC(model, base, solver="eigen", damping=GAMMA, **fixed)

    found, expected = steps(kind, time=time, start=start), steps(kind, method=natural)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", ["linear", "norm"])
def test_half_a_time_twice_is_the_whole(kind: str) -> None:
    """With the same gradient and curvature, a warm start goes on where it was."""
    found = []
    for time, count in ((2.0, 1), (1.0, 2)):
        model = net(kind)
        optimizer = make(model, lr=0.0, time=time)
        for _ in range(count):
            take(model, optimizer, batch(kind, 0))
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))  # type: ignore[union-attr]
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


def test_tokens_that_never_came_pass_their_gradient() -> None:
    model = net("embedding")
    optimizer = make(model, time=1.0)
    take(model, optimizer, batch("embedding", 0))
    assert bool((model[0].weight.grad[5:] == 0).all())  # type: ignore[index,union-attr]


# --- noise ------------------------------------------------------------------------------------


@pytest.mark.parametrize("time", [0.3, math.inf])
def test_the_covariance_of_the_noise(time: float) -> None:
    """`κ₀ M⁻¹(1 - e^{-2Mt})`."""
    kappa, runs = 0.01, 40_000
    block = TNGDBlock(
        (2, 2), torch.float64, solver="eigen", max_dim=9, output_factor=True, per_sample=False
    )
    A, G = (x @ x.T for x in (torch.randn(2, 3), torch.randn(2, 3)))
    values, vectors = zip(*(torch.linalg.eigh(one) for one in (A, G)), strict=True)
    solution = {"A.values": values[0], "A.vectors": vectors[0]}
    solution |= {"G.values": values[1], "G.vectors": vectors[1]}
    zero, kicks = torch.zeros(runs, 2, 2), torch.randn(runs, 2, 2) * kappa**0.5
    found = block.relax(solution, GAMMA, zero, zero, time, kicks).flatten(1)
    M = torch.kron(G, A) + GAMMA * torch.eye(4)
    decay = torch.zeros_like(M) if math.isinf(time) else torch.matrix_exp(-2 * M * time)
    expected = kappa * torch.linalg.inv(M) @ (torch.eye(4) - decay)
    assert (found.T @ found / runs - expected).norm() < 0.03 * expected.norm()


def test_noise_differs_by_layer_and_step_and_resumes() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    optimizer = make(model, noise=1e-3, start="gradient")
    clean = make(twin := nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)))
    twin.load_state_dict(model.state_dict())
    x = torch.randn(9, 3)
    take(model, optimizer, x)
    take(twin, clean, x)
    errors = [(p.grad - q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True)]  # type: ignore[operator]
    assert all(bool(error.any()) for error in errors)
    assert not torch.allclose(errors[0], errors[1])
    other = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    other.load_state_dict(model.state_dict())
    resumed = make(other, noise=1e-3, start="gradient")
    resumed.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    take(model, optimizer, x)
    take(other, resumed, x)
    assert_same(parameters(model), parameters(other))


def test_a_gradient_that_is_not_finite_is_not_remembered() -> None:
    model = net("linear")
    optimizer = make(model, lr=0.0)
    take(model, optimizer, batch("linear", 0))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    take(model, optimizer, torch.full((9, 4), math.nan))
    model.load_state_dict(before)  # SGD takes 0 · NaN for a step
    take(model, optimizer, batch("linear", 1))
    assert all(bool(torch.isfinite(p.grad).all()) for p in model.parameters())  # type: ignore[arg-type]


# --- options ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"time": -1.0}, "time=-1.0 must be a number of at least 0"),
        ({"time": math.nan}, "time=nan must be"),
        ({"start": "zero"}, "start='zero' is not supported"),
        ({"noise": -1.0}, "noise=-1.0 must be"),
        ({"sharing": "none"}, "sharing='none' is not supported"),
        ({"fisher": "forward"}, "fisher='forward' observes no gradients"),
        ({"rescale": "quadratic"}, "rescale='quadratic' goes with steps that are solved"),
    ],
)
def test_options_are_checked(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make(net("linear"), **options)


@pytest.mark.parametrize("fisher", ["exact", "mc"])
def test_the_gauss_newton_matrix_is_a_choice(fisher: Any) -> None:
    model = net("linear")
    optimizer = make(model, fisher=fisher)
    for number in range(2):
        optimizer.zero_grad()
        outputs = model(batch("linear", number))
        optimizer.observe(outputs)
        F.cross_entropy(outputs, torch.zeros(9, dtype=torch.long)).backward()
        optimizer.step()
    assert optimizer.stats()["without_solution"] == []
