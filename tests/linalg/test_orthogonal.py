"""The nearest orthogonal matrix, against the singular value decomposition."""

import math

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from kronfac.linalg import narrow, orthogonal
from kronfac.linalg.orthogonal import (
    COEFFICIENTS,
    FARTHEST,
    MARGIN,
    NEAREST,
    SMALLEST,
    nearest_orthogonal,
    orthogonal_flops,
)

SHAPES = [(5, 5), (4, 9), (9, 4), (1, 6), (6, 1), (1, 1)]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def with_values(rows: int, columns: int, values: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix with these singular values, and the nearest orthogonal one."""
    left, _, right = torch.linalg.svd(random(rows, columns), full_matrices=False)
    return left * values @ right, left @ right


def polynomial(x: Tensor, coefficients: tuple[float, float, float]) -> Tensor:
    first, third, fifth = coefficients
    return first * x + third * x**3 + fifth * x**5


def best_quintic(low: float, high: float) -> tuple[float, float, float]:
    """The odd quintic nearest to 1 on an interval: its error is largest at four points, signs in turn."""
    points = [low, (3 * low + high) / 4, (low + 3 * high) / 4, high]
    for _ in range(30):
        x = torch.tensor(points, dtype=torch.float64)
        signs = torch.tensor([1, -1, 1, -1], dtype=torch.float64)
        system = torch.stack([x, x**3, x**5, signs], 1)
        first, third, fifth, _ = torch.linalg.solve(system, torch.ones_like(x)).tolist()
        root = math.sqrt(9 * third**2 - 20 * first * fifth)  # where the derivative is zero
        inner, outer = sorted((-3 * third + sign * root) / (10 * fifth) for sign in (-1, 1))
        points = [low, math.sqrt(inner), math.sqrt(outer), high]
    return first, third, fifth


def test_each_step_is_the_best_polynomial_where_the_one_before_leads() -> None:
    low, high = SMALLEST, 1.0
    for coefficients in COEFFICIENTS:
        assert coefficients == pytest.approx(best_quintic(low, MARGIN * high), abs=1e-4)
        reached = polynomial(torch.linspace(low, MARGIN * high, 100_001).double(), coefficients)
        low, high = float(reached.min()), float(reached.max())
    assert NEAREST <= low < NEAREST + 2e-4
    assert FARTHEST - 2e-4 < high <= FARTHEST


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_singular_vectors_stay_and_values_come_near_one(shape: tuple[int, int]) -> None:
    matrix = random(*shape)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    found = left.T @ nearest_orthogonal(matrix) @ right.T
    assert torch.allclose(found, torch.diag(found.diagonal()), atol=1e-9)
    assert (values > SMALLEST * values.norm()).all()
    assert ((found.diagonal() > NEAREST) & (found.diagonal() < FARTHEST)).all()


@pytest.mark.parametrize("shape", [(24, 24), (24, 200), (200, 24), (1, 514, 512)], ids=str)
def test_all_but_the_smallest_values_end_in_the_bounds(shape: tuple[int, ...]) -> None:
    values = torch.logspace(0, -1.3, min(shape[-2:])).double()
    assert (values >= SMALLEST * values.pow(8).sum() ** 0.125).all()
    matrix, exact = with_values(*shape[-2:], values)
    found = nearest_orthogonal(matrix.float().expand(shape)).double().reshape(exact.shape)
    ended = torch.linalg.svdvals(found)
    assert float(ended.max()) <= FARTHEST + 1e-3
    assert float(ended.min()) >= NEAREST - 1e-3
    assert cosine(found, exact) > 0.99


@pytest.mark.parametrize("scale", [1e-300, 1e-20, 1e20, 1e300])
def test_scale_does_not_matter(scale: float) -> None:
    matrix = random(4, 6)
    assert torch.allclose(nearest_orthogonal(matrix * scale), nearest_orthogonal(matrix))


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e30, 1e38])
def test_single_precision_survives_extreme_scales(scale: float) -> None:
    matrix = random(4, 6).float()
    found = nearest_orthogonal(matrix / matrix.abs().max() * scale)
    assert torch.allclose(found, nearest_orthogonal(matrix), atol=1e-3)


def test_zeros_stay_zeros() -> None:
    assert torch.equal(nearest_orthogonal(torch.zeros(3, 4)), torch.zeros(3, 4))


def test_a_batch_is_its_parts() -> None:
    batch = torch.stack([random(3, 5), 1e-3 * random(3, 5, seed=1), torch.zeros(3, 5).double()])
    parts = torch.stack([nearest_orthogonal(one) for one in batch])
    assert torch.allclose(nearest_orthogonal(batch), parts)


@pytest.mark.parametrize(
    "shape", [(4, 6), (6, 4), (5, 5), (2, 3, 7), (3, 12), (2, 30, 3), (512, 513), (1100, 512)]
)
def test_its_operations_are_counted(shape: tuple[int, ...]) -> None:
    with FlopCounterMode(display=False) as counter:
        nearest_orthogonal(random(*shape).float())
    assert counter.get_total_flops() == orthogonal_flops(*shape)


def test_square_matrices_take_three_steps_of_three_products() -> None:
    assert orthogonal_flops(2, 128, 128) == 2 * 3 * 3 * 2 * 128**3


@pytest.mark.parametrize("ratio", [1.0, 2.0, 8.0])
@pytest.mark.parametrize("smallest", [1.0, 1e-2, 1e-4])
def test_small_products_give_what_large_ones_give(
    ratio: float, smallest: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, columns = 24, int(24 * ratio)
    matrix, _ = with_values(rows, columns, torch.logspace(0, math.log10(smallest), rows).double())
    found = []
    for stages, dtype in (((3,), torch.float32), ((1, 1, 1), torch.float64)):
        monkeypatch.setattr(orthogonal, "_stages", lambda *_, taken=stages: taken)
        found.append(nearest_orthogonal(matrix.to(dtype)))
    assert float((found[0] - found[1]).norm() / found[1].norm()) < 2e-3


# --- in bfloat16 ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(128, 130), (130, 128), (128, 520), (520, 128)], ids=str)
@pytest.mark.parametrize("smallest", [0.3, 1e-2, 1e-3])
def test_narrow_products_keep_the_bounds_and_the_direction(
    shape: tuple[int, int], smallest: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(narrow, "supported", lambda device: True)
    values = torch.logspace(0, math.log10(smallest), 128).double()
    matrix, exact = with_values(*shape, values)
    found = nearest_orthogonal(matrix.float(), narrow=True).double()
    wide = nearest_orthogonal(matrix.float()).double()
    assert found.dtype == torch.float64
    assert not torch.equal(found, wide)
    assert float(torch.linalg.svdvals(found).max()) < 1.2
    kept = values >= SMALLEST * values.pow(8).sum() ** 0.125
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    assert (left.T @ found @ right.T).diagonal()[kept].min() > 0.8
    assert cosine(found, exact) > cosine(wide, exact) - 0.006


def cosine(one: Tensor, other: Tensor) -> float:
    return float((one * other).sum() / (one.norm() * other.norm()))


def test_narrow_products_are_for_large_float32_matrices_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(narrow, "supported", lambda device: True)
    for matrix in (random(130, 130), random(40, 500).float()):
        assert torch.equal(nearest_orthogonal(matrix, narrow=True), nearest_orthogonal(matrix))


@pytest.mark.parametrize("shape", [(160, 160), (128, 400)], ids=str)
def test_narrow_products_do_not_fill_what_the_batch_left_empty(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(narrow, "supported", lambda device: True)
    values = (torch.arange(min(shape)) < 16).double()  # of 16 samples
    matrix, _ = with_values(*shape, values)  # its own nearest orthogonal matrix
    found = nearest_orthogonal(matrix.float(), narrow=True).double()
    assert cosine(found, matrix) > 0.98
