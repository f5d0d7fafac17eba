"""Linear systems by conjugate gradients: products with the matrix, and nothing else of it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def conjugate_gradients(
    product: Callable[[Tensor], Tensor], right: Tensor, start: Tensor, iterations: int
) -> Tensor:
    """Solve ``B x = right`` for unknowns ``[*b, m, n]``, with a system of its own for each of ``*b``.

    ``B`` is positive definite. After as many iterations as it has distinct eigenvalues the solution is
    exact up to rounding. Residuals are kept and made orthogonal again: without that, rounding grows a
    millionfold as soon as the largest eigenvalue is found, and ranks that add up in another order would
    end elsewhere. A system that has converged stays as it is while others go on, and one that overflows
    keeps its start; nothing is read back from the device.

    Args:
        product: ``x ↦ B x``.
        right: the right-hand sides.
        start: where to start from; without iterations this is the result.
        iterations: how many, one product each, and one more before the first.
    """
    *batch, rows, columns = right.shape
    iterations = min(iterations, rows * columns)
    if not iterations:
        return start
    x = start
    residual = direction = right - product(x)
    error = _inner(residual, residual)
    least = torch.finfo(right.dtype).eps ** 2 * _inner(right, right)
    kept = right.new_zeros(*batch, iterations, rows * columns)
    for number in range(iterations):
        kept[..., number, :] = (residual * _ratio(error.sqrt(), error, error > 0)).flatten(-2)
        image = product(direction)
        curvature = _inner(direction, image)
        goes = (error > least) & (curvature > 0)
        length = _ratio(error, curvature, goes)
        x = x + length * direction
        residual = _orthogonal(residual - length * image, kept[..., : number + 1, :], goes)
        before, error = error, _inner(residual, residual)
        direction = residual + _ratio(error, before, goes) * direction
    finite = torch.isfinite(x).all(-1, keepdim=True).all(-2, keepdim=True)
    return torch.where(finite, x, start)


def _orthogonal(x: Tensor, kept: Tensor, where: Tensor) -> Tensor:
    """Take out of ``x: [*b, m, n]`` what is along unit vectors ``[*b, k, m·n]``, in some systems."""
    flat = x.flatten(-2).unsqueeze(-2)
    along = flat @ kept.mT @ kept
    return x - torch.where(where, along.reshape(x.shape), 0)


def _inner(left: Tensor, right: Tensor) -> Tensor:
    """``⟨left, right⟩`` of each system, ``[*b, 1, 1]``."""
    return (left * right).sum((-2, -1), keepdim=True)


def _ratio(numerator: Tensor, denominator: Tensor, where: Tensor) -> Tensor:
    """A ratio, and 0 elsewhere."""
    return torch.where(where, numerator / torch.where(where, denominator, 1), 0)
