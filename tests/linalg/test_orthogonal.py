"""The nearest orthogonal matrix, against the singular value decomposition."""

import math

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from kronfac.linalg.orthogonal import (
    _large_products,
    _small_products,
    nearest_orthogonal,
    orthogonal_flops,
)

SHAPES = [(5, 5), (4, 9), (9, 4), (1, 6), (6, 1), (1, 1)]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_singular_vectors_stay_and_values_come_near_one(shape: tuple[int, int]) -> None:
    matrix = random(*shape)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    found = left.T @ nearest_orthogonal(matrix) @ right.T
    assert torch.allclose(found, torch.diag(found.diagonal()), atol=1e-9)
    assert (values > 1e-2 * values.norm()).all()
    assert ((found.diagonal() > 0.6) & (found.diagonal() < 1.3)).all()


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


@pytest.mark.parametrize("shape", [(4, 6), (6, 4), (5, 5), (2, 3, 7), (3, 12), (2, 30, 3)])
def test_its_operations_are_counted(shape: tuple[int, ...]) -> None:
    with FlopCounterMode(display=False) as counter:
        nearest_orthogonal(random(*shape))
    assert counter.get_total_flops() == orthogonal_flops(*shape)


@pytest.mark.parametrize("ratio", [1.0, 2.0, 8.0])
@pytest.mark.parametrize("smallest", [1.0, 1e-2, 1e-4])
def test_small_products_give_what_large_ones_give(ratio: float, smallest: float) -> None:
    rows, columns = 24, int(24 * ratio)
    left, _, right = torch.linalg.svd(random(rows, columns), full_matrices=False)
    matrix = left * torch.logspace(0, math.log10(smallest), rows).double() @ right
    matrix = (matrix / matrix.norm()).float()
    found, expected = _small_products(matrix), _large_products(matrix.double())
    assert float((found - expected).norm() / expected.norm()) < 2e-3
