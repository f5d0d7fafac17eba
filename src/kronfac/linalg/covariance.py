"""Second moments of rows: ``Σ r rᵀ`` without forming what symmetry already knows."""

from __future__ import annotations

import torch
from torch import Tensor

# Below this width, or with few rows, one GEMM beats three half-sized ones (measured on AVX-512).
_SPLIT_WIDTH = 256


def gram(rows: Tensor) -> Tensor:
    """Return ``rowsᵀ rows``: ``[*b, R, d] -> [*b, d, d]``.

    Wide matrices are split in halves and only three of the four blocks are multiplied; the fourth
    is a transpose.
    """
    width = rows.shape[-1]
    if not _split_pays(*rows.shape[-2:]):
        return rows.mT @ rows
    half = width // 2
    left, right = rows[..., :half], rows[..., half:]
    out = rows.new_empty(*rows.shape[:-2], width, width)
    out[..., :half, :half] = gram(left)
    out[..., half:, half:] = gram(right)
    cross = left.mT @ right
    out[..., :half, half:] = cross
    out[..., half:, :half] = cross.mT
    return out


def gram_flops(rows: int, width: int) -> int:
    """FLOPs of :func:`gram` for one matrix of this size."""
    if not _split_pays(rows, width):
        return 2 * rows * width**2
    half = width // 2
    cross = 2 * rows * half * (width - half)
    return gram_flops(rows, half) + gram_flops(rows, width - half) + cross


def _split_pays(rows: int, width: int) -> bool:
    return width >= _SPLIT_WIDTH and 2 * rows >= width


def channel_gram(x: Tensor, groups: int = 1) -> Tensor:
    """Return ``Σ x xᵀ`` over samples and positions: ``[N, g·C, *spatial] -> [*b, C, C]``.

    ``*b`` is ``(groups,)`` when there are several groups and empty otherwise. The product follows
    the memory layout of ``x``, so that neither layout pays for a transposed copy of a large map.
    """
    samples, channels = x.shape[:2]
    positions = x.shape[2:].numel()
    width = channels // groups
    channels_first = x.is_contiguous()
    if channels_first and width <= positions:
        maps = x.reshape(samples, groups, width, positions)
        total = (maps @ maps.mT).sum(0)
        return total if groups > 1 else total[0]
    return gram(channel_rows(x, groups))


def channel_rows(x: Tensor, groups: int = 1) -> Tensor:
    """Return positions as rows: ``[N, g·C, *spatial] -> [*b, N·S, C]``."""
    flat = x.movedim(1, -1).reshape(-1, x.shape[1])
    if groups == 1:
        return flat
    grouped: Tensor = flat.unflatten(1, (groups, -1))
    return grouped.transpose(0, 1)


def bordered(covariance: Tensor, total: Tensor, count: float) -> Tensor:
    """Append the row and column that a constant feature of ones would have produced.

    ``covariance`` is ``[*b, d, d]``, ``total`` the sum of the rows ``[*b, d]``, ``count`` their
    number; the result is ``[*b, d + 1, d + 1]``.
    """
    width = covariance.shape[-1]
    out = covariance.new_empty(*covariance.shape[:-2], width + 1, width + 1)
    out[..., :width, :width] = covariance
    out[..., :width, width] = total
    out[..., width, :width] = total
    out[..., width, width] = count
    return out


def with_ones(rows: Tensor) -> Tensor:
    """Append a feature that is one in every row: ``[..., d] -> [..., d + 1]``."""
    return torch.cat([rows, rows.new_ones(*rows.shape[:-1], 1)], dim=-1)
