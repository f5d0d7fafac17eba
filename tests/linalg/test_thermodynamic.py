"""A simulated thermodynamic computer: its states, its converters, and the errors that it makes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kronfac.linalg import thermodynamic as device
from kronfac.linalg.thermodynamic import CHUNK
from tests.references.thermodynamic import round_entries, walk

IDEAL = {"bits": None, "noise": 0.0}
TIMING = {"spacing": 0.7, "burn_in": 2.0}


@pytest.fixture(autouse=True)
def _double() -> object:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def definite(*shape: int) -> Tensor:
    rows = torch.randn(*shape[:-2], 3 * shape[-1], shape[-1])
    return rows.mT @ rows / rows.shape[-2] + 0.2 * torch.eye(shape[-1])


def held(matrix: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors, values


# --- the process ------------------------------------------------------------------------------


def test_states_are_those_of_a_walk() -> None:
    M = definite(4, 4)
    count = CHUNK + 10
    found = torch.cat(list(device.states(*held(M), count, **TIMING, generator=seeded())))
    source = seeded()
    kicks = [torch.randn(size, 4, generator=source) for size in (CHUNK, 10)]
    torch.testing.assert_close(found, walk(M, torch.cat(kicks), **TIMING), rtol=1e-9, atol=1e-10)


def test_states_do_not_depend_on_the_eigenvectors_that_were_found() -> None:
    """All eigenvalues of 2I coincide: any basis will do."""
    other = torch.linalg.qr(torch.randn(3, 3))[0]
    values = torch.full((3,), 2.0)
    first, second = (
        torch.cat(list(device.states(vectors, values, 20, **TIMING, generator=seeded())))
        for vectors in (torch.eye(3), other)
    )
    torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-13)


def test_groups_walk_like_matrices_alone() -> None:
    M = definite(2, 3, 3)
    both = device.covariance_inverse(*held(M), 5000, **TIMING, **IDEAL, generator=seeded())
    for inverse, matrix in zip(both, M, strict=True):
        expected = torch.linalg.inv(matrix)
        assert (inverse - expected).norm() < 0.1 * expected.norm()
        assert torch.equal(inverse, inverse.mT)


@pytest.mark.parametrize("spacing", [20.0, 0.3], ids=["independent", "correlated"])
def test_the_error_of_an_inverse_is_that_of_its_formula(spacing: float) -> None:
    """`E‖Σ̂ - Σ‖² = (tr(Σ)² + tr(Σ²))/N`, and its form for states that remember each other."""
    M, N, runs = definite(4, 4), 200, 400
    vectors, values = held(M)
    inverses = device.covariance_inverse(
        vectors.expand(runs, 4, 4),
        values.expand(runs, 4),
        N,
        spacing=spacing,
        burn_in=30.0,
        **IDEAL,
        generator=seeded(),
    )
    sigma = torch.linalg.inv(M)
    squares = (inverses - sigma).square().sum((-2, -1))
    expected = device.mean_squared_error(values, N, spacing)
    assert abs(float(squares.mean() - expected)) < 4 * float(squares.std()) / runs**0.5
    if spacing == 20.0:
        plain = (sigma.trace() ** 2 + (sigma @ sigma).trace()) / N
        torch.testing.assert_close(expected, plain, rtol=1e-6, atol=0)
        torch.testing.assert_close(device.mean_squared_error(values, N), plain)


@pytest.mark.parametrize("duration", [3.0, 30.0])
def test_the_spread_of_a_time_average_is_that_of_a_long_walk(duration: float) -> None:
    """The mean of states that are close together is the integral over time."""
    M, parts, runs, kappa = definite(3, 3), 300, 600, 0.01
    inverse = torch.linalg.inv(M)
    spread = device.thermal_spread(inverse, duration, kappa)
    assert spread is not None
    vectors, values = held(M)
    walks = device.states(
        vectors.expand(runs, 3, 3),
        values.expand(runs, 3),
        parts,
        spacing=duration / parts,
        burn_in=30.0,
        generator=seeded(),
    )
    means = torch.cat(list(walks), -2).mean(-2)
    covariance = kappa * means.mT @ means / runs / values[0] ** 2
    assert (covariance - spread @ spread).norm() < 0.15 * covariance.norm()


def test_an_average_over_all_time_solves() -> None:
    M, b = definite(3, 3), torch.randn(3, 5)
    inverse = torch.linalg.inv(M)
    spread = device.thermal_spread(inverse, 1e30, 1.0)
    assert spread is not None
    found = device.time_average(
        inverse, spread, b, bits_in=None, bits_out=None, noise=0.0, generator=seeded()
    )
    torch.testing.assert_close(found, torch.linalg.solve(M, b), rtol=1e-9, atol=1e-10)


# --- converters -------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 3, 8, 16])
def test_rounding_is_off_by_half_a_step_at_most(bits: int) -> None:
    x = torch.randn(40, 50)
    step = x.abs().max() / (2 ** (bits - 1) - 1)
    found = device.quantise(x, bits)
    assert float((found - x).abs().max()) <= float(step) / 2 * (1 + 1e-12)
    assert len(found.unique()) <= 2**bits - 1
    torch.testing.assert_close(found, round_entries(x, bits), rtol=1e-12, atol=0)


def test_the_variance_of_rounding() -> None:
    x = torch.rand(1000, 200) * 2 - 1
    step = float(x.abs().max()) / 31
    error = device.quantise(x, 6) - x
    assert float(error.square().mean()) == pytest.approx(step**2 / 12, rel=0.02)


def test_zeros_and_the_largest_entries_stay() -> None:
    x = torch.tensor([[0.0, -0.3], [0.3, 0.1]])
    found = device.quantise(x, 3)
    assert torch.equal(found[x == 0], x[x == 0])
    torch.testing.assert_close(found[x.abs() == 0.3], x[x.abs() == 0.3])
    assert torch.equal(device.quantise(torch.zeros(2, 2), 3), torch.zeros(2, 2))


@pytest.mark.parametrize(("bits", "noise"), [(2, 0.0), (3, 0.0), (None, 0.3), (3, 0.1)])
def test_what_is_uploaded_is_definite_and_no_further_off(bits: int | None, noise: float) -> None:
    rows = torch.randn(4, 12)
    M = rows.T @ rows + 0.01 * torch.eye(12)
    uploaded = device.upload(M, torch.tensor(0.01), bits=bits, noise=noise, generator=seeded())
    assert uploaded is not None
    vectors, values = uploaded
    assert float(values.min()) >= 0.01
    found = (vectors * values) @ vectors.mT
    errors = torch.randn(12, 12, generator=seeded()).tril()
    errors = errors + errors.tril(-1).T
    raw = device.quantise(M, bits) + noise * M.abs().max() * errors
    assert (found - M).norm() <= (raw - M).norm() * (1 + 1e-9)


def test_ideal_uploads_change_nothing() -> None:
    M = definite(4, 4)
    uploaded = device.upload(M, torch.tensor(0.01), bits=None, noise=0.0, generator=seeded())
    assert uploaded is not None
    vectors, values = uploaded
    torch.testing.assert_close((vectors * values) @ vectors.mT, M, rtol=1e-10, atol=1e-12)


def test_errors_of_readings_are_seen_in_the_inverse() -> None:
    """Independent errors of variance s² add s² to the covariance."""
    M = 2 * torch.eye(3)
    readings = {"bits": None, "noise": 0.2, **TIMING}
    found = device.covariance_inverse(*held(M), CHUNK, **readings, generator=seeded())
    (states,) = device.states(*held(M), CHUNK, **TIMING, generator=seeded())
    s = 0.2 * states.abs().max()
    expected = (states.mT @ states / CHUNK + s**2 * torch.eye(3)) / 2
    assert (found - expected).norm() < 0.1 * expected.norm()
