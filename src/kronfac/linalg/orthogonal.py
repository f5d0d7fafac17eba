"""The nearest orthogonal matrix, by matrix products only."""

from __future__ import annotations

import math
from collections.abc import Sequence

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
    return nearest_orthogonal_all([matrices])[0]


def nearest_orthogonal_all(stacks: Sequence[Tensor]) -> list[Tensor]:
    """The same for several stacks ``[*b, m, n]`` of one device and precision, in fewer operations."""
    flat = [stack.reshape(-1, *stack.shape[-2:]) for stack in stacks]
    # Two divisions, because the squares of the largest and smallest floats overflow or underflow.
    flat = _divided(_divided(flat, math.inf), 2)
    return [_polar(x).reshape(stack.shape) for x, stack in zip(flat, stacks, strict=True)]


def _divided(stacks: Sequence[Tensor], order: float) -> list[Tensor]:
    """Matrices divided by their norms; zeros stay zeros."""
    norms = torch.stack(torch._foreach_norm([x for stack in stacks for x in stack], order))
    norms = norms.clamp_(min=torch.finfo(norms.dtype).tiny).split([len(x) for x in stacks])
    return [x / norm[:, None, None] for x, norm in zip(stacks, norms, strict=True)]


def _polar(x: Tensor) -> Tensor:
    """``U Vᵀ`` of matrices ``[k, m, n]`` of norm 1."""
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = _small_products(x) if _is_wide(*x.shape[-2:]) else _large_products(x)
    return x.mT if tall else x


def _large_products(x: Tensor) -> Tensor:
    """Each step on the matrix itself, ``[*b, m, n]``."""
    first, third, fifth = _COEFFICIENTS
    shape, x = x.shape, x.reshape(-1, *x.shape[-2:])
    for _ in range(_STEPS):
        square = torch.bmm(x, x.mT)
        step = torch.baddbmm(square, square, square, beta=third, alpha=fifth)
        x = torch.baddbmm(x, step, x, beta=first)
    return x.reshape(shape)


def _small_products(x: Tensor) -> Tensor:
    """The same polynomial in ``S = X Xᵀ``, with which all steps commute: ``X`` is used only twice.

    A step is ``a + R`` with ``R = bS + cS²``. The product of all steps so far, ``T ← (a + R)T``, and
    the next ``S ← (a + R)S(a + R)`` lie side by side, so that one product begins both.
    """
    first, third, fifth = _COEFFICIENTS
    shape, width = x.shape, x.shape[-2]
    x = x.reshape(-1, *shape[-2:])
    square = torch.bmm(x, x.mT)
    rest = torch.baddbmm(square, square, square, beta=third, alpha=fifth)
    step = rest.clone()
    step.diagonal(dim1=-2, dim2=-1).add_(first)
    both = torch.cat([step, torch.bmm(step, square)], dim=-1)
    for left in reversed(range(_STEPS - 1)):
        total, half = both.split(width, dim=-1)
        square = torch.baddbmm(half, half, rest, beta=first)
        rest = torch.baddbmm(square, square, square, beta=third, alpha=fifth)
        if left:
            half.copy_(square)
        else:  # there is no next square
            both = total
        both = torch.baddbmm(both, rest, both, beta=first)
    return torch.bmm(both, x).reshape(shape)


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
