"""The structures of SINGD against whole matrices, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kronfac.layers.rows import DenseRows
from kronfac.methods.singd.method import STRUCTURES, SINGDMethod
from kronfac.methods.singd.structures import Structure
from tests.references.singd import project

BLOCK, BATCH = 4, 2
#: Narrower than a block, and wider by something that is no multiple of it.
WIDTHS = [1, 3, 11]

every_structure = pytest.mark.parametrize("name", STRUCTURES)
every_width = pytest.mark.parametrize("width", WIDTHS)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def make(name: str, width: int) -> Structure:
    return SINGDMethod(structure=name, block_dim=BLOCK)._structure(width)  # type: ignore[arg-type]


def member(structure: Structure) -> Tensor:
    return normal(BATCH, *structure.shape)


def whole(structure: Structure, matrix: Tensor) -> Tensor:
    """A member as a matrix: what it makes of the identity."""
    return structure.product(torch.eye(structure.width, dtype=matrix.dtype), matrix)


def projected(name: str, matrices: Tensor) -> Tensor:
    return torch.stack([project(name, one, BLOCK) for one in matrices])


def close(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-12)


@every_structure
@every_width
def test_products_of_members_are_members(name: str, width: int) -> None:
    structure = make(name, width)
    left, right = member(structure), member(structure)
    close(
        whole(structure, structure.times(left, right)),
        whole(structure, left) @ whole(structure, right),
    )


@every_structure
@every_width
def test_rows_are_multiplied(name: str, width: int) -> None:
    structure = make(name, width)
    matrix, x = member(structure), normal(BATCH, 5, width)
    close(structure.product(x, matrix), x @ whole(structure, matrix))
    close(structure.product_transposed(x, matrix), x @ whole(structure, matrix).mT)
    twice = whole(structure, matrix) @ whole(structure, matrix).mT
    close(structure.apply(x, matrix), x @ twice)


@every_structure
@every_width
def test_the_identity_changes_nothing(name: str, width: int) -> None:
    structure = make(name, width)
    one = structure.identity(normal(1))
    close(whole(structure, one), torch.eye(width, dtype=torch.float64))


@every_structure
@every_width
def test_curvature_is_what_the_structure_lets_through(name: str, width: int) -> None:
    structure = make(name, width)
    root, rows = member(structure), DenseRows(normal(BATCH, 3, 2, width))
    a, matrix = rows.dense().flatten(1, 2), whole(structure, root)
    found = structure.curvature(structure.observe(rows, root), root)
    close(whole(structure, found), projected(name, matrix.mT @ a.mT @ a @ matrix))
    close(whole(structure, structure.inner(root)), projected(name, matrix.mT @ matrix))


@every_structure
def test_rows_with_an_implied_column_of_ones(name: str) -> None:
    structure = make(name, 6)
    root = member(structure)[0]
    rows = DenseRows(normal(3, 2, 5), ones=True)
    plain = DenseRows(rows.dense())
    close(structure.observe(rows, root), structure.observe(plain, root))


@every_structure
@every_width
def test_traces(name: str, width: int) -> None:
    structure = make(name, width)
    matrix = member(structure)
    diagonal = whole(structure, matrix).diagonal(dim1=-2, dim2=-1)
    close(structure.mean_diagonal(matrix), diagonal.mean(-1))


@every_structure
@every_width
def test_the_bound_bounds_the_spectral_norm(name: str, width: int) -> None:
    structure = make(name, width)
    matrix = member(structure)
    norms = torch.linalg.matrix_norm(whole(structure, matrix), ord=2)
    assert (structure.bound(matrix) >= norms * (1 - 1e-12)).all()


@pytest.mark.parametrize("name", ["dense", "lower-triangular"])
def test_no_symmetric_matrix_is_lost(name: str) -> None:
    """`Π(M) + Π(M)ᵀ = 2M`, to first order the same change of `K Kᵀ`."""
    structure = make(name, 6)
    rows = DenseRows(normal(4, 1, 6))
    root = structure.identity(normal(1))
    found = whole(structure, structure.curvature(structure.observe(rows, root), root))
    close(found + found.mT, 2 * rows.covariance())


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("dense", 11 * 11),
        ("lower-triangular", 11 * 12 // 2),
        ("block-diagonal", 4 * 4 + 4 * 4 + 3 * 3),
        ("hierarchical", 2 * 2 + 2 * 9 + 7 + 2 * 7 + 2 * 2),
        ("toeplitz", 11),
        ("diagonal", 11),
    ],
)
def test_only_what_is_not_fixed_is_kept(name: str, numbers: int) -> None:
    assert make(name, 11).identity(normal(1)).numel() == numbers
