"""Decompositions that are retried when they fail.

Each solver tries the matrix as given, then with jitter on the diagonal, then in float64. ``None`` means
that all attempts failed. Solvers run on refresh steps only and may synchronize with the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kronfac.linalg.precision import full_precision

_JITTER = 1e-6
#: Number of columns of a symmetric product that are multiplied at once.
_STRIP_WIDTH = 256


def eigen(matrix: Tensor) -> tuple[Tensor, Tensor] | None:
    """Eigenvectors ``Q`` and eigenvalues ``v >= 0`` of symmetric matrices ``[*b, d, d]``."""

    def attempt(candidate: Tensor) -> tuple[Tensor, ...] | None:
        try:
            values, vectors = torch.linalg.eigh(candidate)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # torch.linalg.LinAlgError is one; drivers raise others
            return None
        return vectors, values.clamp_(min=0)

    solved = _retried(matrix, attempt)
    return None if solved is None else (solved[0], solved[1])


def eigen_batch(matrices: Tensor) -> tuple[Tensor, Tensor] | None:
    """The same for matrices that are finite, at the first attempt and without a look at the result.

    Vectors and values may be what is not finite; ``None`` if the driver has given up.
    """
    try:
        values, vectors = torch.linalg.eigh(matrices)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return None
    return vectors.contiguous(), values.clamp_(min=0)


def eigen_2x2(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The same for many 2 × 2 matrices, by one rotation each, without a host sync."""
    a, b, c = matrix[..., 0, 0], matrix[..., 0, 1], matrix[..., 1, 1]
    middle, half = (a + c) / 2, (a - c) / 2
    radius = torch.hypot(half, b)
    angle = torch.atan2(b, half) / 2
    cos, sin = angle.cos(), angle.sin()
    vectors = torch.stack([torch.stack([-sin, cos], -1), torch.stack([cos, sin], -1)], -2)
    return vectors, torch.stack([middle - radius, middle + radius], -1).clamp_(min=0)


def cholesky_inverse(matrix: Tensor) -> Tensor | None:
    """Inverse of positive definite matrices ``[*b, d, d]`` by Cholesky."""

    def attempt(candidate: Tensor) -> tuple[Tensor, ...] | None:
        factor, info = torch.linalg.cholesky_ex(candidate)
        if bool((info != 0).any()):
            return None
        return (torch.cholesky_inverse(factor),)

    solved = _retried(matrix, attempt)
    return None if solved is None else solved[0]


def cholesky_inverse_batch(matrices: Tensor) -> Tensor:
    """The same at the first attempt and without a look at the result: NaN where there is none."""
    factor, info = torch.linalg.cholesky_ex(matrices)
    inverse = torch.cholesky_inverse(factor).contiguous()
    return torch.where((info == 0)[..., None, None], inverse, torch.nan)


def cholesky_inverse_share(matrix: Tensor, index: int, of: int) -> Tensor | None:
    """Summand ``index`` of ``of`` whose sum is the inverse of ``[*b, d, d]``, each symmetric.

    With ``M = L Lᵀ`` and ``W = L⁻¹`` the inverse is ``Σ wᵀw`` over the rows ``w`` of ``W``. A summand
    takes a range of rows. All of them factorise ``M``, so all of them succeed at the same attempt.
    """

    def attempt(candidate: Tensor) -> tuple[Tensor, ...] | None:
        factor, info = torch.linalg.cholesky_ex(candidate)
        return None if bool((info != 0).any()) else (factor,)

    factored = _first(matrix, attempt)
    if factored is None:
        return None
    start, stop = share_rows(matrix.shape[-1], index, of)
    share = _inverse_from_rows(factored[0], start, stop).to(matrix.dtype)
    return share if _finite(share) else None


def share_rows(width: int, index: int, of: int) -> tuple[int, int]:
    """Rows of ``W`` that a summand takes. Row ``i`` costs ``i²``; all ranges have equal cost."""
    return round(width * (index / of) ** (1 / 3)), round(width * ((index + 1) / of) ** (1 / 3))


@full_precision
def _inverse_from_rows(factor: Tensor, start: int, stop: int) -> Tensor:
    """``Σ wᵀw`` over the rows of ``W = L⁻¹`` from ``start`` to ``stop``."""
    result = factor.new_zeros(factor.shape)
    if start == stop:
        return result
    if start == 0:  # the leading block of L is inverted on its own
        result[..., :stop, :stop] = torch.cholesky_inverse(factor[..., :stop, :stop]).mT
        return result
    # L = [[L₁, 0], [B, L₂]] has W₂ = [-L₂⁻¹ B L₁⁻¹, L₂⁻¹] for its lower rows.
    corner = factor[..., start:stop, start:stop]
    identity = torch.eye(stop - start, dtype=factor.dtype, device=factor.device)
    right = torch.linalg.solve_triangular(corner, identity.expand(corner.shape), upper=False)
    left = torch.linalg.solve_triangular(
        factor[..., :start, :start],
        right @ factor[..., start:stop, :start],
        upper=False,
        left=False,
    )
    rows = torch.cat([left.neg_(), right], -1)
    for first in range(0, stop, _STRIP_WIDTH):
        last = min(first + _STRIP_WIDTH, stop)
        strip = rows[..., first:last].mT @ rows[..., first:]
        square, rest = strip.split([last - first, stop - last], -1)
        result[..., first:last, first:last] = (square + square.mT) / 2
        result[..., first:last, last:stop] = rest
        result[..., last:stop, first:last] = rest.mT
    return result


def newton_schulz_inverse(
    matrix: Tensor, floor: Tensor | float, tolerance: float = 1e-2
) -> Tensor | None:
    """Inverse of positive definite matrices ``[*b, d, d]`` by matrix products only.

    ``floor`` is a lower bound of the eigenvalues (the damping). With the largest row sum as the upper
    bound, ``X₀ = 2/(upper + floor)`` and ``X ← X(2 - MX)`` squares the error each time; the number of
    iterations follows from the condition number. ``tolerance`` bounds ``‖I - MX‖_F/√d``.
    """
    width = matrix.shape[-1]
    identity = torch.eye(width, dtype=matrix.dtype, device=matrix.device)

    def attempt(candidate: Tensor) -> tuple[Tensor, ...] | None:
        upper = candidate.abs().sum(-1).amax(-1)
        inverse = identity * (2 / (upper + floor))[..., None, None]
        condition = float((upper / floor).max())
        if not math.isfinite(condition):
            return None
        for _ in range(math.ceil(math.log2(max(condition, 2.0))) + 4):
            inverse = 2 * inverse - inverse @ (candidate @ inverse)
            inverse = (inverse + inverse.mT) / 2
        residual = (identity - candidate @ inverse).flatten(-2).norm(dim=-1) / math.sqrt(width)
        return (inverse,) if float(residual.max()) <= tolerance else None

    solved = _retried(matrix, attempt)
    return None if solved is None else solved[0]


def _retried(
    matrix: Tensor, attempt: Callable[[Tensor], tuple[Tensor, ...] | None]
) -> tuple[Tensor, ...] | None:
    """Retry until the result is finite; return it in the matrix's own precision."""
    solved = _first(matrix, attempt)
    # Row-major, as tensors are after loading: the layout must not change results.
    return solved and tuple(part.to(matrix.dtype).contiguous() for part in solved)


@full_precision
def _first(
    matrix: Tensor, attempt: Callable[[Tensor], tuple[Tensor, ...] | None]
) -> tuple[Tensor, ...] | None:
    """The first finite result, in the precision of its attempt."""
    if not _finite(matrix):
        return None
    for candidate in _attempts(matrix):
        solved = attempt(candidate)
        if solved is not None and all(_finite(part) for part in solved):
            return solved
    return None


def _finite(tensor: Tensor) -> bool:
    """Whether all is finite. A finite sum proves it at a twentieth of the cost, but may overflow."""
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())


def _attempts(matrix: Tensor) -> Iterator[Tensor]:
    """The attempts: the matrix as given, with jitter, and with jitter in float64."""
    yield matrix
    scale = matrix.diagonal(dim1=-2, dim2=-1).abs().mean(-1)[..., None, None]
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    jittered = matrix + identity * (_JITTER * scale)
    yield jittered
    yield jittered.double()
