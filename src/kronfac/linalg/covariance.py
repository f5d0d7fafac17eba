"""Second moments of rows: ``Σ r rᵀ``, where symmetry saves nearly half of the products.

What is rounded to bfloat16, where that is allowed and pays, are rows without their mean, which is added
in full: ``Σ r rᵀ = Σ (r - m)(r - m)ᵀ + R·m mᵀ``. Inputs of a layer are mostly positive, and what rounding
takes from products of their means would be more than most eigenvalues.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kronfac.linalg import devices
from kronfac.linalg.narrow import is_faster
from kronfac.linalg.precision import full_precision
from kronfac.linalg.scratch import scratch

# Narrower strips, or more of them, would cost more in kernel calls than they save in products.
_STRIP_WIDTH, _MAX_STRIPS = 128, 4
#: Products with fewer operations than this are one kernel on devices other than processors.
_ONE_KERNEL = 2**34
#: Second moments with fewer multiplications than this are not rounded: taking means costs more.
_LEAST_ROUNDED = 2**24
#: Numbers that stay in a processor's caches.
_CACHED = 2**18


@full_precision
def gram(rows: Tensor, narrow: bool = False) -> Tensor:
    """Return ``rowsᵀ rows``: ``[*b, R, d] -> [*b, d, d]``.

    ``narrow`` allows products in bfloat16 where that is faster: see :func:`rounds`.
    """
    if narrow and rounds(rows):
        return _rounded_gram(rows, rows.sum(-2))
    if len(_strips(rows.shape[-2], rows.shape[-1], rows.device)) == 1:
        return rows.mT @ rows
    width = rows.shape[-1]
    out = rows.new_empty(*rows.shape[:-2], width, width)
    _gram_into(out, rows)
    return out


@full_precision
def bordered_gram(rows: Tensor, narrow: bool = False) -> Tensor:
    """The same for rows that end with a one: ``[*b, R, d] -> [*b, d + 1, d + 1]``."""
    count, width = rows.shape[-2:]
    out = rows.new_empty(*rows.shape[:-2], width + 1, width + 1)
    total = torch.sum(rows, -2, out=out[..., -1, :-1])
    if narrow and rounds(rows):
        out[..., :width, :width] = _rounded_gram(rows, total)
    else:
        _gram_into(out[..., :width, :width], rows)
    _fill_border(out, count)
    return out


def rounds(rows: Tensor) -> bool:
    """Whether a second moment of these rows, ``[*b, R, d]``, is faster in bfloat16.

    Entries of the covariance then have a relative error of about 2⁻⁹, and eigenvalues change by about a
    hundredth of their mean at most.
    """
    count, width = rows.shape[-2:]
    return count * width**2 >= _LEAST_ROUNDED and is_faster(rows, width, count, width)


def _rounded_gram(rows: Tensor, total: Tensor) -> Tensor:
    """Products of centred rows in bfloat16, and of their mean in full; ``total`` is their sum."""
    count, width = rows.shape[-2:]
    mean = total / count
    out = rows.new_empty(*rows.shape[:-2], width, width)
    _gram_into(out, _centred(rows, mean.unsqueeze(-2)))
    return out.addcmul_(mean.unsqueeze(-1), mean.unsqueeze(-2), value=count)


def _centred(rows: Tensor, mean: Tensor) -> Tensor:
    """Rows without their mean in bfloat16, in memory of its own order: products are slow at strides."""
    if type(rows) is not Tensor or rows.device.type != "cpu":
        centred = rows.new_empty(rows.shape, dtype=torch.bfloat16)
        return torch.sub(rows, mean, out=centred)
    # A processor takes differences of all rows before it rounds the first: here, of those in its caches.
    centred = scratch(rows.shape, torch.bfloat16)
    at_once = max(1, _CACHED * rows.shape[-2] // max(1, rows.numel()))
    for some, to in zip(rows.split(at_once, -2), centred.split(at_once, -2), strict=True):
        to.copy_(torch.sub(some, mean, out=scratch(some.shape, rows.dtype)))
    return centred


def _gram_into(out: Tensor, rows: Tensor) -> None:
    """Compute strips of the upper triangle only, and mirror them."""
    for start, stop in _strips(rows.shape[-2], rows.shape[-1], rows.device):
        left, right = rows[..., start:stop].mT, rows[..., start:]
        if rows.dim() in (2, 3) and rows.dtype == out.dtype:
            multiply = torch.mm if rows.dim() == 2 else torch.bmm
            multiply(left, right, out=out[..., start:stop, start:])
        else:
            out[..., start:stop, start:] = left @ right
        if stop < rows.shape[-1]:
            out[..., stop:, start:stop] = out[..., start:stop, stop:].mT


def gram_flops(rows: int, width: int) -> int:
    """FLOPs of :func:`gram` for one matrix of this size."""
    return sum(2 * rows * (stop - start) * (width - start) for start, stop in _strips(rows, width))


def _strips(rows: int, width: int, device: torch.device | None = None) -> list[tuple[int, int]]:
    """Ranges of columns; a single range where there are few rows to multiply."""
    count = min(width // _STRIP_WIDTH, _MAX_STRIPS) if 2 * rows >= width else 1
    if (
        device is not None
        and devices.wants_few_kernels(device)
        and 2 * rows * width**2 < _ONE_KERNEL
    ):
        count = 1
    size = -(-width // max(count, 1))
    return [(start, min(start + size, width)) for start in range(0, width, size)]


def has_maps(x: Tensor) -> bool:
    """Whether channels of ``[N, C, *spatial]`` lie one after the other in each sample."""
    return x.shape[0] > 0 and x[0].is_contiguous()


@full_precision
def channel_gram(x: Tensor, groups: int = 1, narrow: bool = False) -> Tensor:
    """Return ``Σ x xᵀ`` over samples and positions: ``[N, g·C, *spatial] -> [*b, C, C]``.

    ``*b`` is ``(groups,)`` when there are several groups and empty otherwise. The product follows
    the memory layout of ``x``: neither layout needs a transposed copy of a large map.
    """
    samples, channels = x.shape[:2]
    positions = x.shape[2:].numel()
    width = channels // groups
    if groups == 1 and x.transpose(0, 1).is_contiguous() and samples > 1:
        return gram(x.transpose(0, 1).reshape(channels, -1).mT, narrow)
    if has_maps(x) and width <= positions:
        maps = x.reshape(samples, groups, width, positions)  # a view, however far samples are apart
        total = (maps @ maps.mT).sum(0)
        return total if groups > 1 else total[0]
    return gram(channel_rows(x, groups), narrow)


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
    out[..., -1, :-1] = total
    _fill_border(out, count)
    return out


def _fill_border(out: Tensor, count: float) -> None:
    """Mirror the last row, and fill the corner."""
    out[..., :-1, -1] = out[..., -1, :-1]
    out[..., -1, -1].fill_(count)


def with_ones(rows: Tensor) -> Tensor:
    """Append a feature that is one in every row: ``[..., d] -> [..., d + 1]``."""
    return torch.cat([rows, rows.new_ones(*rows.shape[:-1], 1)], dim=-1)
