"""Covariance of convolution patches by sliding windows, which skips most products.

Two taps ``u`` and ``v`` of a stride-1 kernel see the same image, shifted by ``δ = v - u``. With
zeros outside the image,

    A[u, v] = Σ_{q ∈ W(u)} x[q] x[q + δ]ᵀ = D[δ] - (terms with q outside W(u)),

where ``W(u)`` is the part of the image that tap ``u`` visits and ``D[δ] = Σ_q x[q] x[q + δ]ᵀ`` runs
over the whole image. ``D`` has one ``C × C`` block per *offset*: for a 3×3 kernel 13 instead of the
81 of unfold + GEMM, and it is exactly the weight gradient of a convolution of the image with itself,
which every backend computes without unfolding anything. What lies outside ``W(u)`` is a border strip
as thin as the padding, subtracted by inclusion and exclusion over the spatial dimensions.

Features are ordered as in a ``channels_last`` weight, taps first and channels inside, so every block
is a contiguous copy. With a larger stride, taps share little, and patches are collected instead.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from kronfac.linalg import devices
from kronfac.linalg.covariance import gram_flops
from kronfac.linalg.patches import Window, patch_gram, zero_pad
from kronfac.linalg.precision import full_precision
from kronfac.linalg.scratch import scratch_like
from kronfac.linalg.selection import selected_covariance
from kronfac.linalg.strips import Interval, Strip, longest_dim, strips_of

#: Work is done in chunks, to keep copies small: most elements of a batch, most elements of its
#: products (of the image, of its borders), fewest channels.
_MOST_ELEMENTS = 1 << 20
_MOST_PRODUCTS = 1 << 20
_MOST_STRIP_PRODUCTS = 1 << 18
_LEAST_PORTION = 32

_CHANNELS_LAST = {
    1: torch.contiguous_format,
    2: torch.channels_last,
    3: torch.channels_last_3d,
}


def patch_covariance(x: Tensor, window: Window) -> Tensor:
    """Return ``Σ a aᵀ`` over all patches: ``[N, g·C, *spatial] -> [*b, taps·C, taps·C]``.

    Exact to rounding. The algorithm is chosen from the shapes and the kind of device alone.
    """
    few = devices.wants_few_kernels(x.device)
    if not _sliding_pays(tuple(x.shape), window, few):
        return patch_gram(x, window)
    return (selected_covariance if few else sliding_covariance)(x, window)


@full_precision
def sliding_covariance(x: Tensor, window: Window) -> Tensor:
    """Return what :func:`patch_covariance` returns, by sliding; the stride must be one."""
    size = tuple(x.shape[2:])
    dims, channels = len(size), x.shape[1] // window.groups
    x = _channels_last(x)
    blocks = x.new_empty(window.groups, *window.kernel, channels, *window.kernel, channels)
    _fill_whole_image(blocks, x, window)
    _mirror(blocks, window)
    for strips in strips_of(size, window):
        for offset, products in _strip_products(x, strips, window):
            for strip, product in zip(strips, products, strict=True):
                target = _blocks_at(blocks, offset, strip)
                target.add_(product[(..., *[None] * (target.dim() - 3))], alpha=strip.sign)
    merged = blocks.flatten(2 + dims).flatten(1, 1 + dims)
    return merged if window.groups > 1 else merged[0]


def covariance_flops(shape: Sequence[int], window: Window) -> int:
    """FLOPs of the algorithm that :func:`patch_covariance` takes for an input of this shape."""
    if _sliding_pays(tuple(shape), window):
        return _image_flops(shape, window) + _strip_flops(shape, window)
    positions = shape[0] * math.prod(window.output_size(shape[2:]))
    width = shape[1] // window.groups * window.taps
    return window.groups * gram_flops(positions, width)


def collecting_flops(shape: Sequence[int], window: Window) -> int:
    """FLOPs of collecting all patches and multiplying them (unfold + GEMM)."""
    positions = shape[0] * math.prod(window.output_size(shape[2:]))
    return 2 * positions * shape[1] ** 2 // window.groups * window.taps**2


def _image_flops(shape: Sequence[int], window: Window) -> int:
    longest = window.kernel[longest_dim(window)]
    offsets = longest * math.prod(2 * k - 1 for k in window.kernel) // (2 * longest - 1)
    return 2 * shape[0] * shape[1] ** 2 // window.groups * offsets * math.prod(shape[2:])


def _strip_flops(shape: Sequence[int], window: Window) -> int:
    strips = itertools.chain.from_iterable(strips_of(tuple(shape[2:]), window))
    products = sum(strip.products * strip.volume for strip in strips)
    return 2 * shape[0] * shape[1] ** 2 // window.groups * products


@lru_cache(maxsize=1024)
def _sliding_pays(shape: tuple[int, ...], window: Window, few_kernels: bool = False) -> bool:
    """Choose by a cost model that reads no times: every run and rank makes the same choice.

    The constants (nanoseconds) were fitted on a two-core AVX-512 machine. What matters is that many
    small products (kernels without padding on small maps) are expensive and copies are not free.
    """
    if window.taps == 1 or not window.unit_stride:
        return False
    flops = _image_flops(shape, window) + _strip_flops(shape, window)
    if flops >= collecting_flops(shape, window):
        return False
    if few_kernels:
        return _few_kernels_cost_more(shape, window)
    width = shape[1] // window.groups * window.taps
    strips = list(itertools.chain.from_iterable(strips_of(tuple(shape[2:]), window)))
    sliding = (
        400_000
        + _image_flops(shape, window) / 170
        + _strip_flops(shape, window) / 30
        + sum(60_000 + 30_000 * strip.products for strip in strips)
        + 3 * window.groups * width**2
    )
    elements = shape[0] * math.prod(window.output_size(shape[2:])) * shape[1] * window.taps
    speed = 210 * min(1.0, width / 128)
    return sliding < collecting_flops(shape, window) / speed + 1.2 * elements


#: What other devices are taken to be: nanoseconds to start a kernel, operations and bytes in each.
_LAUNCH, _FLOPS, _BYTES = 5_000, 10_000, 1_000


def _few_kernels_cost_more(shape: Sequence[int], window: Window) -> bool:
    """Whether all patches at once, in a few kernels, take longer than products of shifted images.

    No such device was measured: the constants are those of a common accelerator, to the nearest power
    of ten.
    """
    forms = strips_of(tuple(shape[2:]), window)
    kernels = 5 + 2 * len(forms)
    # The products of shifted images, and the blocks that are made of them, twice.
    blocks = window.groups * (shape[1] // window.groups * window.taps) ** 2
    flops = _image_flops(shape, window) + 2 * _strip_flops(shape, window)
    elements = shape[0] * math.prod(window.output_size(shape[2:])) * shape[1] * window.taps
    collecting = 4 * _LAUNCH + collecting_flops(shape, window) / _FLOPS + 8 * elements / _BYTES
    return kernels * _LAUNCH + flops / _FLOPS + 16 * blocks / _BYTES < collecting


def _fill_whole_image(blocks: Tensor, x: Tensor, window: Window) -> None:
    """Write ``D[v - u]``, ``D[δ] = Σ_q x[q] x[q + δ]ᵀ``, into the blocks with ``v >= u`` (longest dim).

    ``D`` is the weight gradient of a convolution whose input and output gradient are both the image
    and whose kernel has one tap per offset. The longest dimension needs offsets ``δ >= 0`` only, since
    ``D[-δ] = D[δ]ᵀ``. Batches and channels are processed in chunks, which bounds the copies.
    """
    longest, dims = longest_dim(window), len(window.kernel)
    ranges = [(1 - k, k - 1) for k in window.kernel]
    ranges[longest] = (0, window.kernel[longest] - 1)
    kernel = [high - low + 1 for low, high in ranges]
    reach = [d * (k - 1) for d, k in zip(window.dilation, window.kernel, strict=True)]
    after = [(0, reach[dim] if dim == longest else 0) for dim in range(dims)]
    reach[longest] = 0
    channels = x.shape[1] // window.groups
    portion = x.shape[1]
    if window.groups == 1:
        portion = max(_LEAST_PORTION, _MOST_PRODUCTS // (math.prod(kernel) * channels))
    for first in range(0, x.shape[1], portion):
        total: Tensor | None = None
        for batch in x.split(max(1, _MOST_ELEMENTS // x[0].numel())):
            part = batch.narrow(1, first, min(portion, x.shape[1] - first))
            result: list[Tensor] = torch.ops.aten.convolution_backward(
                part,
                _padded_after(batch, after),
                x.new_empty(part.shape[1], channels, *kernel),
                None,
                [1] * dims,
                reach,
                list(window.dilation),
                False,
                [0] * dims,
                window.groups,
                [False, True, False],
            )
            total = result[1] if total is None else total.add_(result[1])
        assert total is not None
        by_group: Tensor = total.unflatten(0, (window.groups, -1))
        products = by_group.permute(0, *range(3, 3 + dims), 1, 2)
        rows = blocks.narrow(1 + dims, first, products.shape[-2])
        for target, source in _pairs(rows, products, ranges, window):
            target.copy_(source)


def _channels_last(x: Tensor) -> Tensor:
    """The same image with its channels side by side, in memory that is used again unless it has them."""
    dims = x.dim() - 2
    if x.is_contiguous(memory_format=_CHANNELS_LAST[dims]):
        return x
    return last_channels(x, (x.shape[0], *x.shape[2:], x.shape[1]), "image").copy_(x)


def last_channels(like: Tensor, shape: Sequence[int], use: str) -> Tensor:
    """Memory for images ``[N, *spatial, C]``, seen as ``[N, C, *spatial]``."""
    return scratch_like(like, shape, use).movedim(-1, 1)


def _padded_after(batch: Tensor, after: Sequence[Interval]) -> Tensor:
    """Images with channels side by side, and zeros behind each dimension."""
    size = [n + zeros for n, (_, zeros) in zip(batch.shape[2:], after, strict=True)]
    padded = last_channels(batch, (batch.shape[0], *size, batch.shape[1]), "padded")
    inner = padded
    for dim, (n, (_, zeros)) in enumerate(zip(batch.shape[2:], after, strict=True), 2):
        inner.narrow(dim, n, zeros).zero_()
        inner = inner.narrow(dim, 0, n)
    inner.copy_(batch)
    return padded


def _pairs(
    blocks: Tensor,
    products: Tensor,
    ranges: Sequence[Interval],
    window: Window,
) -> Iterator[tuple[Tensor, Tensor]]:
    """For each tap ``u``, its blocks and the products that go there.

    ``blocks`` is ``[g, *kernel, C, *kernel, C]`` and ``products`` ``[g, *offsets, C, C]``, offsets as in
    the ranges. The block of ``(u, v)`` takes the product of ``v - u``, so for one ``u`` both are
    slices.
    """
    for u in itertools.product(*(range(k) for k in window.kernel)):
        to, of = [], []
        for tap, (low, high), k in zip(u, ranges, window.kernel, strict=True):
            first, last = max(0, tap + low), min(k - 1, tap + high)
            to.append(slice(first, last + 1))
            of.append(slice(first - tap - low, last - tap - low + 1))
        yield (
            _select(blocks, u)[(slice(None), slice(None), *to)],
            products[(slice(None), *of)].movedim(-2, 1),
        )


def _select(blocks: Tensor, tap: Sequence[int]) -> Tensor:
    """Rows of one tap: ``[g, *kernel, C, ...] -> [g, C, ...]``."""
    for index in tap:
        blocks = blocks.select(1, index)
    return blocks


def _mirror(blocks: Tensor, window: Window) -> None:
    """Fill the blocks with ``v < u`` in the longest dimension from their transposes."""
    longest, dims = longest_dim(window), len(window.kernel)
    order = [0, *range(1 + dims, 1 + 2 * dims), *range(1, 1 + dims)]
    for u in range(window.kernel[longest]):
        for v in range(u):
            upper = blocks.select(2 + dims + longest, u).select(1 + longest, v)
            lower = blocks.select(2 + dims + longest, v).select(1 + longest, u)
            lower.copy_(upper.permute(order))


def _strip_products(
    x: Tensor, strips: Sequence[Strip], window: Window
) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Yield offsets ``δ`` with ``Σ_{q ∈ box} x[q] x[q + δ]ᵀ`` of strips of one form, ``[n, g, C, C]``.

    Strips are thin. Their positions become rows of one matrix, with zeros between neighbours. Every
    offset is then a shift of rows, and several products are one plain GEMM.
    """
    strip, dims = strips[0], len(window.kernel)
    images = [x[(slice(None), slice(None), *(slice(*span) for span in s.slab))] for s in strips]
    margins = [
        (0, d * max(-low, high))
        for d, (low, high) in zip(window.dilation, strip.ranges, strict=True)
    ]
    there = zero_pad(torch.stack(images).movedim(2, -1), [*margins, (0, 0)]).contiguous()
    here = there
    if not strip.symmetric:
        where = (slice(None), slice(None), *strip.inside)
        here = torch.zeros_like(there)
        here[where] = there[where]
    strides = [there.stride(2 + dim) // there.stride(1 + dims) for dim in range(dims)]
    left, right = _grouped_rows(here, window.groups), _grouped_rows(there, window.groups)
    shifts = {
        offset: sum(o * d * n for o, d, n in zip(offset, window.dilation, strides, strict=True))
        for offset in itertools.product(*(range(low, high + 1) for low, high in strip.ranges))
        if not strip.symmetric or offset <= tuple(-one for one in offset)
    }
    rows, reach = left.shape[1], max(map(abs, shifts.values()))
    padded = zero_pad(right, [(reach, reach), (0, 0)])
    offsets = list(shifts)
    at_once = max(1, _MOST_STRIP_PRODUCTS // (left.shape[0] * right.shape[2] ** 2))
    for first in range(0, len(offsets), at_once):
        portion = offsets[first : first + at_once]
        shifted = [padded.narrow(1, reach + shifts[offset], rows) for offset in portion]
        products = left.mT @ (torch.cat(shifted, dim=2) if len(shifted) > 1 else shifted[0])
        products = products.reshape(len(strips), window.groups, *products.shape[1:])
        for offset, product in zip(portion, products.split(right.shape[2], dim=3), strict=True):
            yield offset, product
            if strip.symmetric and any(offset):
                yield tuple(-one for one in offset), product.mT


def _blocks_at(blocks: Tensor, offset: Sequence[int], strip: Strip) -> Tensor:
    """The blocks of all pairs ``(u, u + offset)`` from which a strip is subtracted.

    A view ``[g, C, C, ...]`` with one more dimension for each in which the strip is not thin: there the
    pairs lie on a diagonal of taps.
    """
    dims = len(offset)
    for dim, tap in sorted(strip.taps.items(), reverse=True):
        blocks = blocks.select(2 + dims + dim, tap + offset[dim])
    for dim, tap in sorted(strip.taps.items(), reverse=True):
        blocks = blocks.select(1 + dim, tap)
    free = [step for dim, step in enumerate(offset) if dim not in strip.taps]
    for index, step in reversed(list(enumerate(free))):
        blocks = blocks.diagonal(step, 1 + index, 3 + 2 * index)
    return blocks


def _grouped_rows(images: Tensor, groups: int) -> Tensor:
    """``[n, N, *spatial, g·C] -> [n·g, rows, C]``."""
    rows = images.reshape(images.shape[0], -1, groups, images.shape[-1] // groups)
    return rows.transpose(1, 2).flatten(0, 1)
