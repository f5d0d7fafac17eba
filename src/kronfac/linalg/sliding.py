"""Covariance of convolution patches by sliding windows: most products are never computed.

Two taps ``u`` and ``v`` of a stride-1 kernel see the same picture, shifted by ``δ = v - u``. With
zeros outside the image,

    A[u, v] = Σ_{q ∈ W(u)} x[q] x[q + δ]ᵀ = D[δ] - (terms with q outside W(u)),

where ``W(u)`` is the part of the image that tap ``u`` visits and ``D[δ] = Σ_q x[q] x[q + δ]ᵀ`` runs
over the whole image. ``D`` has one ``C × C`` block per *offset*: for a 3×3 kernel 13 instead of the
81 of unfold + GEMM, and it is exactly the weight gradient of a convolution of the image with itself,
which every backend computes without unfolding anything. What lies outside ``W(u)`` is a border strip
as thin as the padding, taken off by inclusion and exclusion over the spatial dimensions.

Features are ordered as in a ``channels_last`` weight, taps first and channels inside: then every block
is a contiguous copy. With a stride there is little to share between taps, and patches are collected.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kronfac.linalg.patches import Window, patch_gram, zero_pad

Interval = tuple[int, int]

#: Work goes in portions that keep its copies small: elements of a batch, elements of its products,
#: and channels at least.
_MOST_ELEMENTS = 1 << 18
_MOST_PRODUCTS = 1 << 18
_LEAST_PORTION = 32

_CHANNELS_LAST = {
    1: torch.contiguous_format,
    2: torch.channels_last,
    3: torch.channels_last_3d,
}


def patch_covariance(x: Tensor, window: Window) -> Tensor:
    """Return ``Σ a aᵀ`` over all patches: ``[N, g·C, *spatial] -> [*b, taps·C, taps·C]``.

    Exact to rounding. The algorithm is chosen from the shapes alone.
    """
    return (sliding_covariance if _sliding_pays(x.shape, window) else patch_gram)(x, window)


def sliding_covariance(x: Tensor, window: Window) -> Tensor:
    """Return what :func:`patch_covariance` returns, by sliding; the stride must be one."""
    size = tuple(x.shape[2:])
    dims, channels = len(size), x.shape[1] // window.groups
    x = x.contiguous(memory_format=_CHANNELS_LAST[dims])
    blocks = x.new_empty(window.groups, *window.kernel, channels, *window.kernel, channels)
    _fill_whole_image(blocks, x, window)
    _mirror(blocks, window)
    for strip in _strips(size, window):
        for offset, product in _strip_products(x, strip, window):
            for block in _blocks_at(blocks, offset, strip, window):
                block.add_(product, alpha=strip.sign)
    merged = blocks.flatten(2 + dims).flatten(1, 1 + dims)
    return merged if window.groups > 1 else merged[0]


def covariance_flops(shape: Sequence[int], window: Window) -> int:
    """FLOPs of the algorithm that :func:`patch_covariance` takes for an input of this shape."""
    if _sliding_pays(shape, window):
        return _image_flops(shape, window) + _strip_flops(shape, window)
    return collecting_flops(shape, window)


def collecting_flops(shape: Sequence[int], window: Window) -> int:
    """FLOPs of collecting all patches and multiplying them (unfold + GEMM)."""
    positions = shape[0] * math.prod(window.output_size(shape[2:]))
    return 2 * positions * shape[1] ** 2 // window.groups * window.taps**2


def _image_flops(shape: Sequence[int], window: Window) -> int:
    longest = window.kernel[_longest(window)]
    offsets = longest * math.prod(2 * k - 1 for k in window.kernel) // (2 * longest - 1)
    return 2 * shape[0] * shape[1] ** 2 // window.groups * offsets * math.prod(shape[2:])


def _strip_flops(shape: Sequence[int], window: Window) -> int:
    products = sum(one.products * one.volume for one in _strips(tuple(shape[2:]), window))
    return 2 * shape[0] * shape[1] ** 2 // window.groups * products


def _sliding_pays(shape: Sequence[int], window: Window) -> bool:
    """Choose by a cost model that reads shapes only, so that every run and rank chooses alike.

    The constants (nanoseconds) were fitted on a two-core AVX-512 machine; what matters is that many
    small products (kernels without padding on small maps) are dear and copies are not free.
    """
    if window.taps == 1 or not window.unit_stride:
        return False
    flops = _image_flops(shape, window) + _strip_flops(shape, window)
    if flops >= collecting_flops(shape, window):
        return False
    width = shape[1] // window.groups * window.taps
    strips = _strips(tuple(shape[2:]), window)
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


@dataclass(frozen=True)
class _Strip:
    """A border box whose products are in ``D`` but not in ``A[u, ·]`` for its fixed taps.

    ``ranges`` are the offsets, per dimension, that lead from the box back into the image; ``taps`` maps
    the dimensions in which the box is thin to the tap of ``u`` that never visits it.
    """

    box: list[Interval]
    ranges: list[Interval]
    taps: dict[int, int]
    sign: int

    @property
    def symmetric(self) -> bool:
        """Whether the box meets only itself, so that opposite offsets are transposes."""
        return all(self.ranges[dim] == (0, 0) for dim in self.taps)

    @property
    def products(self) -> int:
        """Number of ``C × C`` products per position."""
        offsets = math.prod(high - low + 1 for low, high in self.ranges)
        return (offsets + 1) // 2 if self.symmetric else offsets

    @property
    def volume(self) -> int:
        """Number of positions in the box."""
        return math.prod(stop - start for start, stop in self.box)


@lru_cache(maxsize=256)
def _strips(size: tuple[int, ...], window: Window) -> tuple[_Strip, ...]:
    """List the corrections of inclusion and exclusion over all subsets of dimensions."""
    return tuple(_enumerate_strips(size, window))


def _enumerate_strips(size: tuple[int, ...], window: Window) -> Iterator[_Strip]:
    dims = range(len(size))
    for count in range(1, len(size) + 1):
        for chosen in itertools.combinations(dims, count):
            options = [list(_missed(dim, size[dim], window)) for dim in chosen]
            for combination in itertools.product(*options):
                box = [(0, n) for n in size]
                ranges = [(1 - k, k - 1) for k in window.kernel]
                taps = {}
                for dim, (tap, interval, offsets) in zip(chosen, combination, strict=True):
                    box[dim], ranges[dim], taps[dim] = interval, offsets, tap
                yield _Strip(box, ranges, taps, (-1) ** count)


def _missed(dim: int, size: int, window: Window) -> Iterator[tuple[int, Interval, Interval]]:
    """For each tap: the intervals it never visits and the offsets that lead back into the image."""
    kernel, dilation = window.kernel[dim], window.dilation[dim]
    before, after = window.padding[dim]
    out = size + before + after - dilation * (kernel - 1)
    for tap in range(kernel):
        start = tap * dilation - before
        for low, high in ((0, min(start, size)), (max(start + out, 0), size)):
            if low >= high:
                continue
            # x[q + offset·dilation] must lie inside the image for some q of the interval.
            least = max(-tap, -((high - 1) // dilation))
            most = min(kernel - 1 - tap, (size - 1 - low) // dilation)
            if least <= most:
                yield tap, (low, high), (least, most)


def _fill_whole_image(blocks: Tensor, x: Tensor, window: Window) -> None:
    """Write ``D[v - u]``, ``D[δ] = Σ_q x[q] x[q + δ]ᵀ``, into the blocks with ``v >= u`` (longest dim).

    ``D`` is the weight gradient of a convolution whose input and output gradient are both the image
    and whose kernel has one tap per offset. The longest dimension needs offsets ``δ >= 0`` only, since
    ``D[-δ] = D[δ]ᵀ``. Batches and channels go in portions, which bounds the copies.
    """
    longest, dims = _longest(window), len(window.kernel)
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
                zero_pad(batch, after),
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


def _pairs(
    blocks: Tensor,
    products: Tensor,
    ranges: Sequence[Interval],
    window: Window,
) -> Iterator[tuple[Tensor, Tensor]]:
    """For each tap ``u``, its blocks and the products that belong there.

    ``blocks`` is ``[g, *kernel, C, *kernel, C]`` and ``products`` ``[g, *offsets, C, C]``, offsets as in
    the ranges. The block of ``(u, v)`` takes the product of ``v - u``, so that for one ``u`` both are
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
    longest, dims = _longest(window), len(window.kernel)
    order = [0, *range(1 + dims, 1 + 2 * dims), *range(1, 1 + dims)]
    for u in range(window.kernel[longest]):
        for v in range(u):
            upper = blocks.select(2 + dims + longest, u).select(1 + longest, v)
            lower = blocks.select(2 + dims + longest, v).select(1 + longest, u)
            lower.copy_(upper.permute(order))


def _strip_products(
    x: Tensor, strip: _Strip, window: Window
) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Yield each offset ``δ`` of a strip with ``Σ_{q ∈ box} x[q] x[q + δ]ᵀ``, ``[g, C, C]``.

    The strip is thin: its positions become rows of one matrix, with zeros between neighbours so that
    every offset is a shift of rows, and each product is a plain GEMM.
    """
    dims = len(window.kernel)
    slab, margins = [], []
    for (start, stop), (low, high), d, n in zip(
        strip.box, strip.ranges, window.dilation, x.shape[2:], strict=True
    ):
        slab.append((max(0, start + low * d), min(n, stop + high * d)))
        margins.append((0, d * max(-low, high)))
    images = x[(slice(None), slice(None), *(slice(*span) for span in slab))].movedim(1, -1)
    there = zero_pad(images, [*margins, (0, 0)]).contiguous()
    here = there
    if not strip.symmetric:
        inside = tuple(
            slice(start - first, stop - first)
            for (start, stop), (first, _) in zip(strip.box, slab, strict=True)
        )
        here = torch.zeros_like(there)
        here[(slice(None), *inside)] = there[(slice(None), *inside)]
    strides = [there.stride(1 + dim) // there.stride(dims) for dim in range(dims)]
    left, right = _grouped_rows(here, window.groups), _grouped_rows(there, window.groups)
    rows = left.shape[1]
    for offset in itertools.product(*(range(low, high + 1) for low, high in strip.ranges)):
        opposite = tuple(-one for one in offset)
        if strip.symmetric and opposite < offset:
            continue  # already given as a transpose
        shift = sum(
            one * d * step for one, d, step in zip(offset, window.dilation, strides, strict=True)
        )
        ahead, behind = max(shift, 0), max(-shift, 0)
        product = left[:, behind : rows - ahead].mT @ right[:, ahead : rows - behind]
        yield offset, product
        if strip.symmetric and opposite != offset:
            yield opposite, product.mT


def _blocks_at(
    blocks: Tensor, offset: Sequence[int], strip: _Strip, window: Window
) -> Iterator[Tensor]:
    """The blocks ``[g, C, C]`` of all pairs ``(u, u + offset)`` that a strip must be taken off."""
    choices = [
        [strip.taps[dim]] if dim in strip.taps else range(max(0, -step), min(k, k - step))
        for dim, (step, k) in enumerate(zip(offset, window.kernel, strict=True))
    ]
    for u in itertools.product(*choices):
        rows = _select(blocks, u)
        for tap, step in zip(u, offset, strict=True):
            rows = rows.select(2, tap + step)
        yield rows


def _grouped_rows(images: Tensor, groups: int) -> Tensor:
    """``[N, *spatial, g·C] -> [g, rows, C]``."""
    rows = images.reshape(-1, groups, images.shape[-1] // groups)
    return rows.transpose(0, 1)


def _longest(window: Window) -> int:
    """The dimension in which the kernel is longest: there symmetry saves most."""
    return max(range(len(window.kernel)), key=lambda dim: window.kernel[dim])
