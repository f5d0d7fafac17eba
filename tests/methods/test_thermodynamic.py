"""K-FAC with `solver="thermodynamic"`: exact in the limit, and what errors do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import kronfac
from kronfac import Thermodynamic
from kronfac.linalg.thermodynamic import mean_squared_error
from kronfac.methods.kfac.thermodynamic import CovarianceBlock, LinearSystemsBlock
from kronfac.protocol.block import Given
from tests import oracles
from tests.methods.test_kfac_block import FORMS, GAMMA, dense, make_block, make_means, normal
from tests.references.thermodynamic import solve_systems

#: A device without errors of any kind.
IDEAL = Thermodynamic(method=2, temperature=0.0)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def block_of(
    device: Thermodynamic, shape: tuple[int, ...], max_dim: int = 10, output_factor: bool = True
) -> CovarianceBlock:
    made = CovarianceBlock if device.method == 1 else LinearSystemsBlock
    return made(
        shape,
        torch.float64,
        device=device,
        max_dim=max_dim,
        output_factor=output_factor,
        per_sample=False,
    )


def solved(block: CovarianceBlock, means: dict[str, Tensor], seed: int = 0) -> dict[str, Tensor]:
    solution = block.refresh(Given(means, GAMMA, seed=seed))
    assert solution is not None
    return solution


# --- in the limit it is K-FAC -----------------------------------------------------------------


@pytest.mark.parametrize(("sides", "max_dim", "output_factor"), FORMS.values(), ids=FORMS.keys())
@pytest.mark.parametrize("groups", [(), (2,)], ids=["plain", "grouped"])
def test_without_errors_it_is_the_cholesky_solver(
    sides: tuple[int, int], max_dim: int, output_factor: bool, groups: tuple[int, ...]
) -> None:
    shape = (*groups, *sides)
    exact = make_block(shape, "cholesky", max_dim, output_factor)
    means, V = make_means(exact), normal(*shape)
    block = block_of(IDEAL, shape, max_dim, output_factor)
    assert isinstance(block, LinearSystemsBlock)
    expected = exact.precondition(exact.refresh(Given(means, GAMMA)) or {}, V, GAMMA)
    solution = solved(block, means)
    found = block.read_out(solution, V, torch.Generator())
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(block.precondition(solution, V, GAMMA), expected)


@pytest.mark.parametrize("samples", [1_000, 100_000])
def test_inverses_come_as_close_as_their_formula_says(samples: int) -> None:
    exact = make_block((3, 4), "cholesky")
    means = make_means(exact)
    block = block_of(Thermodynamic(samples=samples, spacing=20.0), (3, 4))
    found, expected = solved(block, means), exact.refresh(Given(means, GAMMA)) or {}
    for side in ("A", "G"):
        inverse = expected[f"{side}.inverse"]
        typical = mean_squared_error(1 / torch.linalg.eigvalsh(inverse), samples).sqrt()
        error = (found[f"{side}.inverse"] - inverse).norm()
        assert typical / 4 < error < 3 * typical


def test_many_bits_change_nothing() -> None:
    means = make_means(make_block((3, 4), "cholesky"))
    ideal, fine, coarse = (
        solved(block_of(Thermodynamic(samples=200, bits=bits), (3, 4)), means)["A.inverse"]
        for bits in (None, 40, 4)
    )
    torch.testing.assert_close(fine, ideal, rtol=1e-8, atol=1e-9)
    assert (coarse - ideal).norm() > 1e-3 * ideal.norm()


def test_systems_with_converters_are_those_of_the_slow_reference() -> None:
    device = Thermodynamic(method=2, temperature=0.0, bits=10)
    block, exact = block_of(device, (3, 4)), make_block((3, 4), "cholesky")
    means, V = make_means(exact), normal(3, 4)
    assert isinstance(block, LinearSystemsBlock)
    inverses = exact.refresh(Given(means, GAMMA)) or {}
    A, G = (torch.linalg.inv(inverses[f"{side}.inverse"]) for side in ("A", "G"))
    found = block.read_out(solved(block, means), V, torch.Generator())
    torch.testing.assert_close(found, solve_systems(A, G, V, 10), rtol=1e-8, atol=1e-10)


def test_a_step_of_the_optimizer_is_that_of_cholesky() -> None:
    """From the model to its parameters, with as much as a step has: momentum, norms, convolutions."""
    found = []
    for solver in ("cholesky", IDEAL):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(2, 4, 3, groups=2),
            nn.BatchNorm2d(4),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(16, 3),
        ).double()
        base = SGD(model.parameters(), lr=0.1)
        optimizer: Any = kronfac.KFAC(
            model, base, solver=solver, momentum=0.9, factor_every=1, refresh_every=2
        )
        for number in range(4):
            x = torch.randn(9, 2, 4, 4, generator=torch.Generator().manual_seed(number)).double()
            optimizer.zero_grad()
            model(x).square().sum(1).mean().backward()
            optimizer.step()
        found.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    torch.testing.assert_close(*found, rtol=1e-7, atol=1e-9)


# --- damping, random numbers, bad values -------------------------------------------------------


def test_uploads_with_few_bits_stay_definite() -> None:
    """With 2 bits an entry is -1, 0 or 1 times the largest, which is hardly ever definite."""
    block = block_of(Thermodynamic(samples=50, bits=2, converters="inputs"), (6, 8))
    means = make_means(make_block((6, 8), "cholesky"))
    for value in solved(block, means).values():
        assert bool(torch.isfinite(value).all())
        assert float(torch.linalg.eigvalsh(value).min()) > -1e-12


def test_layers_parts_and_steps_have_their_own_numbers() -> None:
    block = block_of(Thermodynamic(samples=10), (3, 3))
    same = torch.eye(3, dtype=torch.float64)
    one, again, other = (solved(block, {"A": same, "G": same}, seed) for seed in (1, 1, 2))
    assert torch.equal(one["A.inverse"], again["A.inverse"])
    assert not torch.equal(one["A.inverse"], other["A.inverse"])
    assert not torch.equal(one["A.inverse"], one["G.inverse"])


@pytest.mark.parametrize("method", [1, 2])
def test_statistics_beyond_all_bounds_are_not_solved(method: Any) -> None:
    block = block_of(Thermodynamic(method=method, samples=5), (2, 2))
    bad = torch.full((2, 2), float("nan"), dtype=torch.float64)
    assert block.refresh(Given({"A": bad, "G": bad}, GAMMA)) is None


@pytest.mark.parametrize("method", [1, 2])
def test_dead_factors_pass_the_gradient(method: Any) -> None:
    """With relative damping and no curvature M is the identity."""
    block = block_of(Thermodynamic(method=method), (3, 3))
    zero = torch.zeros(3, 3, dtype=torch.float64)
    solution = block.refresh(Given({"A": zero, "G": zero}, 0.1, relative=True))
    assert solution is not None
    torch.testing.assert_close(solution["A.inverse"], torch.eye(3, dtype=torch.float64))


def test_the_solver_by_its_name_is_its_defaults() -> None:
    model = nn.Linear(3, 2)
    base = SGD(model.parameters(), lr=0.1)
    named = kronfac.KFAC(model, base, solver="thermodynamic")
    assert named._preconditioner.method.device == Thermodynamic()  # type: ignore[attr-defined]
    assert "thermodynamic" in str(named)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"method": 3}, "method=3 is not supported; choose one of 1, 2"),
        ({"samples": 0}, "samples=0 must be a whole number"),
        ({"spacing": 0.0}, "spacing=0.0 must be a positive"),
        ({"burn_in": -1.0}, "burn_in=-1.0 must be a positive"),
        ({"bits": 1}, "bits=1 leaves no level but zero"),
        ({"bits": 2.5}, "bits=2.5 must be a whole number"),
        ({"noise": -0.1}, "noise=-0.1 must be"),
        ({"temperature": -0.1}, "temperature=-0.1 must be"),
        ({"converters": "none"}, "converters='none' is not supported"),
    ],
)
def test_options_are_checked(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Thermodynamic(**options)


def test_only_one_exponent_goes_with_it() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match="needs eigenvalues"):
        kronfac.KFAC(model, SGD(model.parameters(), lr=0.1), solver=Thermodynamic(), power=0.5)


def test_the_reference_of_damping() -> None:
    """π is Cholesky's: one dense formula for both."""
    block = make_block((3, 4), "cholesky")
    means, V = make_means(block), normal(3, 4)
    A, G = dense(block, means, "A"), dense(block, means, "G")
    assert A is not None
    ideal = block_of(IDEAL, (3, 4))
    found = ideal.precondition(solved(ideal, means), V, GAMMA)
    torch.testing.assert_close(found, oracles.cholesky_step(A, G, V, GAMMA))
