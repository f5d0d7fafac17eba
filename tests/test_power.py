"""`power`: a fractional power of the damped curvature, against dense matrices in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

import kronfac
from kronfac import KFAC

GAMMA = 0.03
N = 7


def dense_power(matrix: Tensor, power: float) -> Tensor:
    """A symmetric matrix to a power."""
    values, vectors = torch.linalg.eigh(matrix)
    return vectors * values.pow(power) @ vectors.mT


def change(model: nn.Module, x: Tensor, y: Tensor, **options) -> list[Tensor]:
    """How one step with rate 1 changes each parameter."""
    optimizer = KFAC(model, SGD(model.parameters(), lr=1.0), damping=GAMMA, rescale=None, **options)
    before = [p.detach().clone() for p in model.parameters()]
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    return [p.detach() - old for p, old in zip(model.parameters(), before, strict=True)]


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(N, 4, dtype=torch.float64), torch.randint(3, (N,))


@pytest.mark.parametrize("power", [0.25, 0.5, 0.75, 1.0])
def test_a_linear_layers_step_is_a_power_of_its_curvature(batch, power):
    x, y = batch
    model = nn.Linear(4, 3, bias=False, dtype=torch.float64)
    outputs = model(x)
    [g] = torch.autograd.grad(F.cross_entropy(outputs, y), outputs)
    curvature = torch.kron(N * g.mT @ g, x.mT @ x / N)
    damped = curvature + GAMMA * torch.eye(12, dtype=torch.float64)
    expected = -dense_power(damped, -power) @ (g.mT @ x).flatten()
    [actual] = change(model, x, y, power=power)
    torch.testing.assert_close(actual.flatten(), expected, rtol=1e-9, atol=1e-9)


def test_a_norms_step_is_a_power_of_its_curvature(batch):
    x, y = batch
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 3)).double()
    norm = model[0]
    rows = []
    for n in range(N):
        loss = F.cross_entropy(model(x[n : n + 1]), y[n : n + 1])
        rows.append(torch.stack(torch.autograd.grad(loss, (norm.weight, norm.bias)), -1))
    per_sample = torch.stack(rows)  # [N, C, 2]
    steps = change(model, x, y, power=0.5)
    gradient = per_sample.mean(0)
    for channel in range(4):
        mine = per_sample[:, channel]
        damped = mine.mT @ mine / N + GAMMA * torch.eye(2, dtype=torch.float64)
        expected = -dense_power(damped, -0.5) @ gradient[channel]
        actual = torch.stack([steps[0][channel], steps[1][channel]])
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def test_wide_layers_are_decomposed_too_when_a_power_is_wanted(monkeypatch):
    monkeypatch.setattr("kronfac.methods.kfac.block.EIGEN_MAX_WIDTH", 2)
    model = nn.Linear(4, 3)
    assert "cholesky" in KFAC(model, SGD(model.parameters(), lr=1.0)).summary()
    assert "eigen" in KFAC(model, SGD(model.parameters(), lr=1.0), power=0.5).summary()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"power": 0}, r"power=0 must be a number in \(0, 1\]"),
        ({"power": 2.0}, r"power=2.0 must be a number in \(0, 1\]"),
        ({"power": 0.5, "solver": "cholesky"}, r"power=0.5 needs eigenvalues.*solver='eigen'"),
        ({"power": 0.5, "rescale": "quadratic"}, r"power=0.5 does not minimise"),
    ],
)
def test_what_cannot_be_is_refused(options, sentence):
    model = nn.Linear(4, 3)
    with pytest.raises(ValueError, match=sentence):
        kronfac.KFAC(model, SGD(model.parameters(), lr=1.0), **options)
