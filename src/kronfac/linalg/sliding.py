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

import torch
from torch import Tensor

from kronfac.linalg.patches import Window, patch_gram, zero_pad

Interval = tuple[int, int]


def patch_covariance(x: Tensor, window: Window) -> Tensor:
    """Return ``Σ a aᵀ`` over all patches: ``[N, g·C, *spatial] -> [*b, C·taps, C·taps]``.

    Exact to rounding. The algorithm is chosen from the shapes alone.
    """
    if not _sliding_pays(x.shape, window):
        return patch_gram(x, window)
    dims = len(window.kernel)
    merged = _slide(x, window).flatten(2 + dims).flatten(1, 1 + dims)
    return merged if window.groups > 1 else merged[0]


def covariance_flops(shape: Sequence[int], window: Window) -> int:
    """FLOPs of the algorithm that :func:`patch_covariance` takes for an input of this shape."""
    if _sliding_pays(shape, window):
        return _sliding_flops(shape, window)
    return _collecting_flops(shape, window)


def _collecting_flops(shape: Sequence[int], window: Window) -> int:
    positions = shape[0] * math.prod(window.output_size(shape[2:]))
    return 2 * positions * shape[1] ** 2 // window.groups * window.taps**2


def _sliding_flops(shape: Sequence[int], window: Window) -> int:
    offsets = window.kernel[0] * math.prod(2 * k - 1 for k in window.kernel[1:])
    products = offsets * math.prod(shape[2:])
    products += sum(strip.offsets * strip.volume for strip in _strips(shape[2:], window))
    return 2 * shape[0] * shape[1] ** 2 // window.groups * products


def _sliding_pays(shape: Sequence[int], window: Window) -> bool:
    """Compare the two algorithms by a cost model in FLOPs; it reads shapes only."""
    if window.taps == 1 or not window.unit_stride:
        return False
    return _sliding_flops(shape, window) < _collecting_flops(shape, window)


def _slide(x: Tensor, window: Window) -> Tensor:
    """Return the blocks ``[g, *kernel, C, *kernel, C]`` for a stride of one."""
    size = x.shape[2:]
    dims = len(size)
    # The first dimension needs offsets >= 0 only: D[-δ] = D[δ]ᵀ.
    ranges = [(0, window.kernel[0] - 1)] + [(1 - k, k - 1) for k in window.kernel[1:]]
    half = _offset_products(x, [(0, n) for n in size], ranges, window)
    mirrored = half.narrow(1, 1, window.kernel[0] - 1).flip(list(range(1, 1 + dims)))
    blocks = _spread(torch.cat([mirrored.mT, half], dim=1), window, range(dims))
    for strip in _strips(size, window):
        strip.subtract(blocks, _offset_products(x, strip.box, strip.ranges, window), window)
    return blocks


class _Strip:
    """A border box whose products are in ``D`` but not in ``A[u, ·]`` for its fixed taps ``u``."""

    def __init__(
        self, box: list[Interval], ranges: list[Interval], taps: dict[int, int], sign: int
    ) -> None:
        self.box = box
        self.ranges = ranges
        self.taps = taps
        self.sign = sign

    @property
    def offsets(self) -> int:
        """Number of ``C × C`` products per position."""
        return math.prod(high - low + 1 for low, high in self.ranges)

    @property
    def volume(self) -> int:
        """Number of positions in the box."""
        return math.prod(stop - start for start, stop in self.box)

    def subtract(self, blocks: Tensor, products: Tensor, window: Window) -> None:
        """Take this strip's products off the blocks of its taps."""
        dims = len(window.kernel)
        free = [dim for dim in range(dims) if dim not in self.taps]
        spread = _spread(products, window, free)
        fixed = [range(low, high + 1) for low, high in (self.ranges[dim] for dim in self.taps)]
        for offsets in itertools.product(*fixed):
            target, source = blocks, spread
            # Select from the last dimension to the first, so that positions stay valid.
            for (dim, tap), offset in reversed(list(zip(self.taps.items(), offsets, strict=True))):
                target = target.select(2 + dims + dim, tap + offset)
                source = source.select(2 + dims + dim, offset - self.ranges[dim][0])
            for dim, tap in reversed(list(self.taps.items())):
                target = target.select(1 + dim, tap)
                source = source.select(1 + dim, 0)
            target.add_(source, alpha=self.sign)


def _strips(size: Sequence[int], window: Window) -> Iterator[_Strip]:
    """Enumerate the corrections of inclusion and exclusion over all subsets of dimensions."""
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


def _offset_products(
    x: Tensor, box: Sequence[Interval], ranges: Sequence[Interval], window: Window
) -> Tensor:
    """Return ``Σ_{q ∈ box} x[q] x[q + δ]ᵀ`` for every offset ``δ`` (in taps) of the ranges.

    The result is ``[g, *offsets, C, C]``. It is the weight gradient of a convolution whose input is
    the image, whose output gradient is the box and whose kernel has one tap per offset.
    """
    size = x.shape[2:]
    here = x[(slice(None), slice(None), *(slice(start, stop) for start, stop in box))]
    seen, uneven, even = [], [], []
    for (start, stop), (low, high), n, d in zip(box, ranges, size, window.dilation, strict=True):
        first, last = start + low * d, stop + high * d
        seen.append(slice(max(first, 0), min(last, n)))
        before, after = max(-first, 0), max(last - n, 0)
        even.append(min(before, after))
        uneven.append((before - even[-1], after - even[-1]))
    there = zero_pad(x[(slice(None), slice(None), *seen)], uneven)
    kernel = [high - low + 1 for low, high in ranges]
    products = _weight_gradient(there, here, kernel, even, window, stride=[1] * len(kernel))
    dims = len(kernel)
    by_group: Tensor = products.unflatten(0, (window.groups, -1))
    return by_group.permute(0, *range(3, 3 + dims), 1, 2).contiguous()


def _weight_gradient(
    image: Tensor,
    gradient: Tensor,
    kernel: Sequence[int],
    padding: Sequence[int],
    window: Window,
    stride: Sequence[int],
) -> Tensor:
    """Weight gradient of a convolution: ``[g·C, C, *kernel]``."""
    channels = image.shape[1]
    like = image.new_empty(channels, channels // window.groups, *kernel)
    result = torch.ops.aten.convolution_backward(
        gradient,
        image,
        like,
        None,
        list(stride),
        list(padding),
        list(window.dilation),
        False,
        [0] * len(kernel),
        window.groups,
        [False, True, False],
    )
    weight: Tensor = result[1]
    return weight


def _spread(products: Tensor, window: Window, dims: Sequence[int]) -> Tensor:
    """Turn offsets into pairs of taps along ``dims``: the block of ``(u, v)`` is that of ``v - u``.

    ``[g, *offsets, C, C] -> [g, *kernel, C, *kernel, C]``; dimensions that are not in ``dims`` keep
    size one on the left and their offsets on the right. With ``u`` counted backwards, ``v - u``
    becomes a sum, so that a strided view does it (a Hankel matrix) and one flip restores the order.
    """
    count = len(window.kernel)
    groups, channels = products.shape[0], products.shape[-1]
    strides = products.stride()
    left_shape, left_stride, right_shape, right_stride = [], [], [], []
    for dim in range(count):
        inside = dim in dims
        left_shape.append(window.kernel[dim] if inside else 1)
        right_shape.append(window.kernel[dim] if inside else products.shape[1 + dim])
        left_stride.append(strides[1 + dim] if inside else 0)
        right_stride.append(strides[1 + dim])
    view = products.as_strided(
        (groups, *left_shape, channels, *right_shape, channels),
        (strides[0], *left_stride, strides[-2], *right_stride, strides[-1]),
    )
    return view.flip([1 + dim for dim in dims]) if dims else view
