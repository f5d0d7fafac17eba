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


def nearest_kronecker(matrix: Tensor, shapes: Shapes) -> tuple[Tensor, Tensor]:
    """The factors ``B`` and ``C`` for which ``‖matrix − B ⊗ C‖`` is smallest, of equal norms.

    With the blocks of the matrix as rows, ``B ⊗ C`` has rank one: the first singular vectors solve it.
    """
    check_shapes(shapes, *matrix.shape)
    left, values, right = torch.linalg.svd(_rearranged(matrix, shapes), full_matrices=False)
    scale = values[0].sqrt()
    first, second = shapes
    b, c = left[:, 0] * scale, right[0] * scale
    return b.reshape(first).to(matrix.dtype), c.reshape(second).to(matrix.dtype)


def relative_error(matrix: Tensor, shapes: Shapes) -> Tensor:
    """``‖matrix − B ⊗ C‖/‖matrix‖`` of the nearest product."""
    values = torch.linalg.svdvals(_rearranged(matrix, shapes))
    total = values.square().sum()
    rest = (total - values[0].square()).clamp(min=0)
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
