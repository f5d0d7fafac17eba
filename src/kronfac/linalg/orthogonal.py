"""The nearest orthogonal matrix, by matrix products only.

Three steps ``X ← aX + bSX + cS²X`` with ``S = XXᵀ``, each the odd quintic whose largest distance from 1
is least on the interval in which the singular values are (Polar Express, Amsel et al. 2025). Before them
the matrix is divided by ``‖S²‖_F^¼``, a bound of its largest singular value that costs no product more.
For ``r`` equal singular values it is ``r^⅛`` too large; the Frobenius norm is ``r^½`` too large, which
takes another step or two to make up for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kronfac.linalg.covariance import gram, gram_flops
from kronfac.linalg.narrow import is_faster

#: Singular values from this share of the bound on come close to 1. Smaller ones end short of it: they
#: are mostly noise, and so would be a step that made them as large as the others.
SMALLEST = 0.02
#: How far above each interval a step still works: rounding, above all to bfloat16, may lead there.
MARGIN = 1.05
#: ``a``, ``b`` and ``c`` of each step.
COEFFICIENTS = (
    (7.377008, -19.221343, 12.816813),
    (3.137908, -2.149506, 0.404351),
    (2.216755, -1.490971, 0.346676),
)
#: Where singular values end that were between :data:`SMALLEST` and 1.
NEAREST, FARTHEST = 0.8757, 1.1243
_STEPS = len(COEFFICIENTS)
#: Single matrices from this width on are squared by the strips of a triangle.
_STRIPED = 512

Step = tuple[float, float, float]


def nearest_orthogonal(matrices: Tensor, narrow: bool = False) -> Tensor:
    """``U Vᵀ`` of ``U S Vᵀ``, approximately: singular values become close to 1, singular vectors stay.

    Args:
        matrices: ``[*b, m, n]`` of any scale; zeros stay zeros.
        narrow: whether float32 matrices may be multiplied in bfloat16, where that is faster.
    """
    return nearest_orthogonal_all([matrices], narrow)[0]


def nearest_orthogonal_all(stacks: Sequence[Tensor], narrow: bool = False) -> list[Tensor]:
    """The same for several stacks ``[*b, m, n]`` of one device and precision, in fewer operations."""
    flat = [stack.reshape(-1, *stack.shape[-2:]) for stack in stacks]
    # The squares of the largest and smallest floats overflow or underflow.
    flat = _multiply(flat, _largest(flat).reciprocal_(), [torch.empty_like(x) for x in flat])
    dtypes = [_dtype(x, narrow) for x in flat]
    squares = [_square(x.to(dtype)) for x, dtype in zip(flat, dtypes, strict=True)]
    fourths = [_square(square) for square in squares]
    # ‖S²‖_F^¼ bounds the largest singular value.
    bounds = _norms(fourths).pow_(-0.25)
    second = bounds * bounds
    for matrices, factors in ((flat, bounds), (squares, second), (fourths, second * second)):
        _multiply(matrices, factors, matrices)
    found = []
    for stack, dtype in zip(stacks, dtypes, strict=True):  # what has been used takes no memory
        polar = _polar(flat.pop(0), squares.pop(0), fourths.pop(0), dtype)
        found.append(polar.to(stack.dtype).reshape(stack.shape))
    return found


def _dtype(x: Tensor, narrow: bool) -> torch.dtype:
    """The precision of products of matrices ``[k, m, n]``."""
    width = min(x.shape[-2:])
    return torch.bfloat16 if narrow and is_faster(x, width, width, width) else x.dtype


def _largest(stacks: Sequence[Tensor]) -> Tensor:
    """Largest entries of all matrices one after the other, at least the smallest float."""
    if stacks[0].device.type != "cpu":
        return _norms(stacks, math.inf)
    # Twenty times as fast as a CPU's norm of that order.
    found = torch.cat([stack.abs().amax((-2, -1)) for stack in stacks])
    return found.clamp_(min=torch.finfo(found.dtype).tiny)


def _norms(stacks: Sequence[Tensor], order: float = 2.0) -> Tensor:
    """Norms of all matrices one after the other, at least the smallest float."""
    dtype = torch.promote_types(stacks[0].dtype, torch.float32)
    matrices = [x for stack in stacks for x in stack]
    norms = torch.stack(torch._foreach_norm(matrices, order, dtype=dtype))
    return norms.clamp_(min=torch.finfo(dtype).tiny)


def _multiply(stacks: Sequence[Tensor], factors: Tensor, out: Sequence[Tensor]) -> list[Tensor]:
    """Each matrix times its factor, in the precision of the matrices, in memory that is given."""
    parts = factors.split([len(stack) for stack in stacks])
    return [
        torch.mul(x, one[:, None, None], out=to)
        for x, one, to in zip(stacks, parts, out, strict=True)
    ]


def _polar(x: Tensor, square: Tensor, fourth: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``U Vᵀ`` of matrices ``[k, m, n]`` whose singular values are below 1, given ``S`` and ``S²``."""
    m, n = x.shape[-2:]
    taken = 0
    for count in _stages(min(m, n), max(m, n), dtype != x.dtype):
        if taken:
            # Only now: what rounding adds to singular values that were zero has less far to grow.
            x = x.to(dtype)
            square, fourth = _square(x), None
        step, first = _combined(square, fourth, COEFFICIENTS[taken : taken + count])
        del square, fourth  # before there is another matrix
        x = _times(step, x, first)
        taken += count
    return x


def _combined(
    square: Tensor, fourth: Tensor | None, steps: tuple[Step, ...]
) -> tuple[Tensor, float]:
    """``P`` and ``a`` of ``aX + PX``: one step, or several as a polynomial in ``S``; all commute."""
    if len(steps) == 1:
        first, third, fifth = steps[0]
        return _polynomial(square, fourth, third, fifth), first
    total: Tensor | None = None
    for number, (first, third, fifth) in enumerate(steps, 1):
        step = _polynomial(square, fourth, third, fifth)
        step.diagonal(dim1=-2, dim2=-1).add_(first)
        total = step if total is None else step @ total
        if number < len(steps):
            square, fourth = (step @ square) @ step, None
    assert total is not None
    return total, 0.0


def _polynomial(square: Tensor, fourth: Tensor | None, third: float, fifth: float) -> Tensor:
    """``bS + cS²``."""
    if fourth is None and _is_striped(len(square), square.shape[-1], square.device.type):
        fourth = _square(square)
    if fourth is None:
        return torch.baddbmm(square, square, square, beta=third, alpha=fifth)
    return (third * square).add_(fourth, alpha=fifth)


def _times(step: Tensor, x: Tensor, first: float) -> Tensor:
    """``aX + PX``, or ``aX + XP`` for tall matrices: never transposed, since bfloat16 is slow at that."""
    step = step.to(x.dtype)
    left, right = (x, step) if x.shape[-2] > x.shape[-1] else (step, x)
    return torch.baddbmm(x, left, right, beta=first) if first else torch.bmm(left, right)


def _square(x: Tensor) -> Tensor:
    """``XXᵀ``, or ``XᵀX`` if that is smaller; large ones from a triangle."""
    rows = x if x.shape[-2] > x.shape[-1] else x.mT
    if _is_striped(x.shape[0], rows.shape[-1], x.device.type):
        return gram(rows[0])[None]
    return rows.mT @ rows


def _is_striped(batch: int, width: int, device: str = "cpu") -> bool:
    """Whether a triangle saves time: on CPUs. Accelerators lose more to many small products."""
    return device == "cpu" and batch == 1 and width >= _STRIPED


def _stages(m: int, n: int, narrow: bool) -> tuple[int, ...]:
    """How many steps to take at once, for ``m <= n``.

    In float32 all of them if that takes fewer operations, else one by one. In bfloat16 errors of a
    polynomial in ``S`` add up in small singular values: after two steps it starts again.
    """
    if _wide_flops(m, n) >= _STEPS * (4 * m**2 * n + 2 * m**3):
        return (1,) * _STEPS
    return (_STEPS // 2, _STEPS - _STEPS // 2) if narrow else (_STEPS,)


def _wide_flops(m: int, n: int) -> int:
    return 4 * m**2 * n + (8 * _STEPS - 6) * m**3


def orthogonal_flops(*shape: int) -> int:
    """Operations of :func:`nearest_orthogonal` for matrices of a shape ``*b, m, n``, in float32."""
    *batch, rows, columns = shape
    count, m, n = math.prod(batch), min(rows, columns), max(rows, columns)
    if not _is_striped(count, m):
        large = _STEPS * (4 * m**2 * n + 2 * m**3)
        return count * (large if len(_stages(m, n, False)) > 1 else _wide_flops(m, n))
    squares = gram_flops(n, m), gram_flops(m, m)
    if len(_stages(m, n, False)) > 1:
        return _STEPS * (sum(squares) + 2 * m**2 * n)
    products = 2 * m**2 * n + 6 * (_STEPS - 1) * m**3
    return squares[0] + _STEPS * squares[1] + products
