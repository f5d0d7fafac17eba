"""The nearest orthogonal matrix, against the singular value decomposition."""

import pytest
import torch
from torch import Tensor

from kronfac.linalg.orthogonal import nearest_orthogonal

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
