"""Which Kronecker products a matrix may be, and the nearest of them (Van Loan & Pitsianis 1993)."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

#: ``((m1, n1), (m2, n2))``: the shapes of a left and a right factor of an ``m1·m2 × n1·n2`` matrix.
Shapes = tuple[tuple[int, int], tuple[int, int]]


def num_parameters(shapes: Shapes) -> int:
    """Entries of both factors."""
    return sum(math.prod(one) for one in shapes)


def all_shapes(rows: int, columns: int) -> Iterator[Shapes]:
    """Every way to divide a matrix."""
    for m in _divisors(rows):
        for n in _divisors(columns):
            yield (m, n), (rows // m, columns // n)


def full_rank(shapes: Shapes) -> int:
    """The rank of a product whose factors have full rank."""
    return math.prod(min(one) for one in shapes)


def default_shapes(rows: int, columns: int) -> Shapes:
    """The factors with the fewest entries whose product may have full rank, the most alike of them."""
    most = min(rows, columns)
    found = [one for one in all_shapes(rows, columns) if full_rank(one) == most]
    return min(found, key=lambda one: (num_parameters(one), _unlikeness(one)))


def check_shapes(shapes: Shapes, rows: int, columns: int) -> None:
    """Raise unless a product of these shapes is a matrix of this size."""
    (m1, n1), (m2, n2) = shapes
    if min(m1, n1, m2, n2) < 1 or (m1 * m2, n1 * n2) != (rows, columns):
        raise ValueError(
            f"shapes={shapes!r} make a {m1 * m2} × {n1 * n2} matrix, and {rows} × {columns} is needed; "
            "give ((m1, n1), (m2, n2)) with m1·m2 rows and n1·n2 columns, or leave it out."
        )


def most_terms(shapes: Shapes) -> int:
    """So many products of these shapes add up to any matrix."""
    return min(math.prod(one) for one in shapes)


def check_terms(terms: int, shapes: Shapes) -> None:
    """Raise unless a sum of so many products of these shapes has no superfluous ones."""
    most = most_terms(shapes)
    if isinstance(terms, bool) or not isinstance(terms, int) or not 1 <= terms <= most:
        raise ValueError(
            f"terms={terms!r} is not a number of products of shapes {shapes!r}; give a whole number from "
            f"1 to {most}, whose sum is already any matrix."
        )


def nearest_kronecker(matrix: Tensor, shapes: Shapes) -> tuple[Tensor, Tensor]:
    """The factors ``B`` and ``C`` for which ``‖matrix − B ⊗ C‖`` is smallest, of equal norms.

    With the blocks of the matrix as rows, ``B ⊗ C`` has rank one: the first singular vectors solve it.
    """
    left, right = nearest_kronecker_sum(matrix, shapes, 1)
    return left[0], right[0]


def nearest_kronecker_sum(matrix: Tensor, shapes: Shapes, terms: int) -> tuple[Tensor, Tensor]:
    """The factors ``[terms, m1, n1]`` and ``[terms, m2, n2]`` of the nearest sum ``Σ B_t ⊗ C_t``.

    The products are orthogonal to each other, and the largest is first.
    """
    check_shapes(shapes, *matrix.shape)
    check_terms(terms, shapes)
    left, values, right = torch.linalg.svd(_rearranged(matrix, shapes), full_matrices=False)
    scale = values[:terms, None].sqrt()
    first, second = shapes
    b, c = left.mT[:terms] * scale, right[:terms] * scale
    sizes = (terms, *first), (terms, *second)
    return b.reshape(sizes[0]).to(matrix.dtype), c.reshape(sizes[1]).to(matrix.dtype)


def relative_error(matrix: Tensor, shapes: Shapes, terms: int = 1) -> Tensor:
    """``‖matrix − Σ B_t ⊗ C_t‖/‖matrix‖`` of the nearest sum of products."""
    squares = torch.linalg.svdvals(_rearranged(matrix, shapes)).square()
    total, rest = squares.sum(), squares[terms:].sum()
    share: Tensor = rest / torch.where(total > 0, total, 1.0)
    return share.sqrt()


def _rearranged(matrix: Tensor, shapes: Shapes) -> Tensor:
    """Entries by place in the left factor (rows) and in the right one (columns)."""
    (m1, n1), (m2, n2) = shapes
    parts = matrix.detach().to(torch.promote_types(matrix.dtype, torch.float32))
    return parts.reshape(m1, m2, n1, n2).permute(0, 2, 1, 3).reshape(m1 * n1, m2 * n2)


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]


def _unlikeness(shapes: Shapes) -> float:
    first, second = (math.prod(one) for one in shapes)
    return abs(math.log(first / second))
