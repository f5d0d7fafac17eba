"""The nearest orthogonal matrix, by matrix products only."""

from __future__ import annotations

import math

import torch
from torch import Tensor

#: Keller Jordan's quintic: small singular values grow by 3.4 per step, and all end between 0.68 and 1.13.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_STEPS = 5


def nearest_orthogonal(matrices: Tensor) -> Tensor:
    """``U Vᵀ`` of ``U S Vᵀ``, approximately: singular values become close to 1, singular vectors stay.

    Args:
        matrices: ``[*b, m, n]`` of any scale; zeros stay zeros. Singular values below a thousandth of the
            Frobenius norm end short of 1.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    x: Tensor = matrices.mT if tall else matrices
    # Two divisions, because the squares of the largest and smallest floats overflow or underflow.
    x = x / x.abs().amax(dim=(-2, -1), keepdim=True).clamp_min(_tiny(x))
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(_tiny(x))
    x = _small_products(x) if _is_wide(*x.shape[-2:]) else _large_products(x)
    return x.mT if tall else x


def _large_products(x: Tensor) -> Tensor:
    """Each step on the matrix itself."""
    first, third, fifth = _COEFFICIENTS
    for _ in range(_STEPS):
        square = x @ x.mT
        x = first * x + (third * square + fifth * (square @ square)) @ x
    return x


def _small_products(x: Tensor) -> Tensor:
    """The same polynomial in ``S = X Xᵀ``, with which all steps commute: ``X`` is used only twice."""
    first, third, fifth = _COEFFICIENTS
    shape, x = x.shape, x.reshape(-1, *x.shape[-2:])
    square = x @ x.mT
    total = None
    for number in range(_STEPS):
        step = torch.baddbmm(square, square, square, beta=third, alpha=fifth)
        step.diagonal(dim1=-2, dim2=-1).add_(first)
        total = step if total is None else step @ total
        if number < _STEPS - 1:
            half = step @ square
            square = half @ step
    assert total is not None
    return (total @ x).reshape(shape)


def _is_wide(m: int, n: int) -> bool:
    """Whether small products take fewer operations, for ``m <= n``."""
    return _wide_flops(m, n) < _square_flops(m, n)


def _square_flops(m: int, n: int) -> int:
    return _STEPS * (4 * m**2 * n + 2 * m**3)


def _wide_flops(m: int, n: int) -> int:
    return 4 * m**2 * n + (8 * _STEPS - 6) * m**3


def orthogonal_flops(*shape: int) -> int:
    """Operations of :func:`nearest_orthogonal` for matrices of a shape ``*b, m, n``."""
    *batch, m, n = shape
    shorter, longer = min(m, n), max(m, n)
    flops = _wide_flops if _is_wide(shorter, longer) else _square_flops
    return math.prod(batch) * flops(shorter, longer)


def _tiny(x: Tensor) -> float:
    return torch.finfo(x.dtype).tiny
