"""Each solver against the dense inverse, and the ladder that it climbs when it fails."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kronfac.linalg.solve import cholesky_inverse, eigen, newton_schulz_inverse

FLOOR = 0.1


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def positive(size: int, *batch: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Symmetric, with eigenvalues of at least FLOOR."""
    rows = torch.randn(*batch, 2 * size, size, dtype=torch.float64)
    product = rows.mT @ rows / (2 * size) + FLOOR * torch.eye(size, dtype=torch.float64)
    return product.to(dtype)


def with_spectrum(values: Tensor) -> Tensor:
    basis, _ = torch.linalg.qr(torch.randn(len(values), len(values), dtype=torch.float64))
    matrix = basis @ values.double().diag() @ basis.T
    return (matrix + matrix.T) / 2


def eigen_inverse(matrix: Tensor) -> Tensor | None:
    solved = eigen(matrix)
    if solved is None:
        return None
    vectors, values = solved
    return vectors @ (vectors.mT / values[..., None])


def newton_schulz(matrix: Tensor) -> Tensor | None:
    return newton_schulz_inverse(matrix, FLOOR)


SOLVERS: dict[str, Callable[[Tensor], Tensor | None]] = {
    "eigen": eigen_inverse,
    "cholesky": cholesky_inverse,
    "newton-schulz": newton_schulz,
}
every_solver = pytest.mark.parametrize("solve", SOLVERS.values(), ids=SOLVERS.keys())


# --- against the dense inverse ---------------------------------------------------------------


@every_solver
@pytest.mark.parametrize("size", [1, 2, 7, 40])
def test_inverse(solve: Callable[[Tensor], Any], size: int) -> None:
    matrix = positive(size)
    torch.testing.assert_close(solve(matrix), torch.linalg.inv(matrix), rtol=1e-9, atol=1e-9)


@every_solver
def test_inverse_of_a_batch(solve: Callable[[Tensor], Any]) -> None:
    matrix = positive(4, 3) * torch.tensor([1.0, 10.0, 1000.0])[:, None, None]
    torch.testing.assert_close(solve(matrix), torch.linalg.inv(matrix), rtol=1e-9, atol=1e-9)


@every_solver
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_precision_is_that_of_the_matrix(
    solve: Callable[[Tensor], Any], dtype: torch.dtype
) -> None:
    assert solve(positive(5, dtype=dtype)).dtype == dtype


@every_solver
def test_the_matrix_is_not_written_to(solve: Callable[[Tensor], Any]) -> None:
    matrix = positive(5)
    before = matrix.clone()
    solve(matrix)
    assert torch.equal(matrix, before)


@every_solver
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_matrix_that_is_not_finite_has_no_solution(
    solve: Callable[[Tensor], Any], value: float
) -> None:
    matrix = positive(4, 2)
    matrix[1, 2, 2] = value
    assert solve(matrix) is None


@pytest.mark.parametrize("solve", [cholesky_inverse, newton_schulz])
def test_an_indefinite_matrix_has_no_inverse_here(solve: Callable[[Tensor], Any]) -> None:
    assert solve(with_spectrum(torch.tensor([1.0, 2.0, -3.0]))) is None


# --- eigen -----------------------------------------------------------------------------------


def test_eigenvectors_and_values_give_the_matrix_back() -> None:
    matrix = positive(6, 2)
    vectors, values = eigen(matrix) or pytest.fail("no solution")
    torch.testing.assert_close(vectors @ (values[..., None] * vectors.mT), matrix)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_eigenvalues_of_a_singular_matrix_are_not_negative(dtype: torch.dtype, rank: int) -> None:
    rows = torch.randn(rank, 20, dtype=dtype)
    _, values = eigen(rows.T @ rows) or pytest.fail("no solution")
    assert values.min() >= 0
    assert int((values > 1e-4).sum()) == rank


# --- the ladder ------------------------------------------------------------------------------


def jittered(matrix: Tensor) -> Tensor:
    identity = torch.eye(len(matrix), dtype=matrix.dtype)
    return matrix + identity * (1e-6 * matrix.diagonal().mean())


def cholesky_fails(matrix: Tensor) -> bool:
    return int(torch.linalg.cholesky_ex(matrix).info) != 0


def low_rank(rank: int, size: int) -> Tensor:
    rows = torch.randn(rank, size)
    return rows.T @ rows


def test_jitter_saves_a_singular_matrix() -> None:
    matrix = low_rank(4, 64)
    assert cholesky_fails(matrix)
    assert not cholesky_fails(jittered(matrix))
    inverse = cholesky_inverse(matrix)
    expected = torch.cholesky_inverse(torch.linalg.cholesky(jittered(matrix)))
    torch.testing.assert_close(inverse, expected)


def test_double_precision_saves_what_jitter_does_not() -> None:
    matrix = low_rank(4, 256)
    assert cholesky_fails(jittered(matrix))
    assert not cholesky_fails(jittered(matrix).double())
    inverse = cholesky_inverse(matrix)
    expected = torch.linalg.inv(jittered(matrix).double()).float()
    torch.testing.assert_close(inverse, expected, rtol=1e-3, atol=1e-3 * float(expected.max()))


def test_eigen_climbs_when_the_driver_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix, plain = positive(5, dtype=torch.float32), torch.linalg.eigh

    def single_precision_fails(candidate: Tensor) -> Any:
        if candidate.dtype == torch.float32:
            raise torch.linalg.LinAlgError("did not converge")
        return plain(candidate)

    monkeypatch.setattr(torch.linalg, "eigh", single_precision_fails)
    vectors, values = eigen(matrix) or pytest.fail("no solution")
    assert vectors.dtype == values.dtype == torch.float32
    torch.testing.assert_close(
        vectors @ (values[:, None] * vectors.T), matrix, rtol=1e-4, atol=1e-4
    )


def test_eigen_gives_up_when_every_rung_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(candidate: Tensor) -> Any:
        raise torch.linalg.LinAlgError("did not converge")

    monkeypatch.setattr(torch.linalg, "eigh", fails)
    assert eigen(positive(5)) is None


# --- Newton-Schulz ---------------------------------------------------------------------------


def residual(matrix: Tensor, inverse: Tensor) -> float:
    identity = torch.eye(len(matrix), dtype=torch.float64)
    error = identity - matrix.double() @ inverse.double()
    return float(error.norm()) / math.sqrt(len(matrix))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("exponent", range(0, 17, 2))
def test_newton_schulz_is_within_tolerance_or_none(dtype: torch.dtype, exponent: int) -> None:
    matrix = with_spectrum(torch.logspace(-exponent, 0, 12)).to(dtype)
    inverse = newton_schulz_inverse(matrix, 10.0**-exponent, tolerance=1e-2)
    if inverse is None:
        return
    rounding = torch.finfo(dtype).eps * float(matrix.norm() * inverse.norm())
    candidates = (matrix, jittered(matrix))  # the ladder may have inverted the second
    assert min(residual(one, inverse) for one in candidates) <= 1e-2 + rounding


@pytest.mark.parametrize(("dtype", "exponent"), [(torch.float32, 4), (torch.float64, 10)])
def test_newton_schulz_solves_what_its_precision_can(dtype: torch.dtype, exponent: int) -> None:
    matrix = with_spectrum(torch.logspace(-exponent, 0, 12)).to(dtype)
    assert newton_schulz_inverse(matrix, 10.0**-exponent) is not None


def test_newton_schulz_takes_a_floor_per_matrix() -> None:
    floors = torch.tensor([1e-3, 1.0, 100.0], dtype=torch.float64)
    matrix = positive(4, 3) * floors[:, None, None] * 10
    inverse = newton_schulz_inverse(matrix, floors)
    torch.testing.assert_close(inverse, torch.linalg.inv(matrix), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("floor", [0.0, 1e-320])
def test_newton_schulz_without_a_floor_has_no_solution(floor: float) -> None:
    assert newton_schulz_inverse(positive(4), floor) is None


def test_newton_schulz_answers_to_its_tolerance() -> None:
    assert newton_schulz_inverse(positive(6), FLOOR, tolerance=0.0) is None
