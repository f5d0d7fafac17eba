"""Covariance of convolution patches by sliding windows, in as few kernels as possible.

What :mod:`kronfac.linalg.sliding` adds up block by block is one product here. All products of shifted
images, of the whole one and of its borders, are put side by side, ``E: [K, C·C]``. Every block
``A[u, v]`` is a sum of some of them with signs, so that ``A = S E`` with a small matrix ``S`` of 0, 1
and -1, which depends on shapes alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from kronfac.linalg.patches import Window, zero_pad
from kronfac.linalg.precision import full_precision
from kronfac.linalg.strips import Interval, Strip, longest_dim, strips_of

#: A shift between two taps, and the border strip on which it is taken; ``None`` for the whole image.
_Key = tuple[tuple[int, ...], Strip | None]

#: How many numbers of a batch are padded at once.
_MOST_ELEMENTS = 1 << 25


@full_precision
def selected_covariance(x: Tensor, window: Window) -> Tensor:
    """Return ``Σ a aᵀ`` over all patches, ``[*b, taps·C, taps·C]``; the stride must be one."""
    size, taps = tuple(x.shape[2:]), window.taps
    products = _whole_image(x, window)
    for strips in strips_of(size, window):
        products += _on_strips(x, strips, window)
    shifted = torch.cat(products)  # [K, g, C, C]
    blocks = _selection(size, window, x.dtype, x.device) @ shifted.flatten(1)
    blocks = blocks.reshape(taps, taps, *shifted.shape[1:]).permute(2, 0, 3, 1, 4)
    width = taps * shifted.shape[-1]
    merged = blocks.reshape(window.groups, width, width)
    return merged if window.groups > 1 else merged[0]


def _half(window: Window) -> list[Interval]:
    """Shifts of the whole image: in the longest dimension forward only, since ``D[-δ] = D[δ]ᵀ``."""
    ranges = [(1 - k, k - 1) for k in window.kernel]
    ranges[longest_dim(window)] = (0, window.kernel[longest_dim(window)] - 1)
    return ranges


def _whole_image(x: Tensor, window: Window) -> list[Tensor]:
    """``D[δ]`` for all shifts, ``[k, g, C, C]`` each, in the order of :func:`_keys`."""
    total: Tensor | None = None
    for batch in x.split(max(1, _MOST_ELEMENTS // max(1, x[0].numel()))):
        found = _shifted(batch, batch, [(0, 0)] * len(window.kernel), _half(window), window)
        total = found if total is None else total.add_(found)
    assert total is not None
    offsets = total.movedim((0, 1, 2), (-3, -2, -1))
    backward = offsets.narrow(longest_dim(window), 1, window.kernel[longest_dim(window)] - 1)
    flat = [part.flatten(0, len(window.kernel) - 1) for part in (offsets, backward)]
    return [flat[0], flat[1].mT]


def _on_strips(x: Tensor, strips: Sequence[Strip], window: Window) -> list[Tensor]:
    """The same on border strips of one form, one after another."""
    strip = strips[0]
    slabs = [x[(slice(None), slice(None), *(slice(*span) for span in s.slab))] for s in strips]
    there = torch.cat(slabs, dim=1) if len(slabs) > 1 else slabs[0]
    here = there[(slice(None), slice(None), *strip.inside)]
    pairs = zip(strip.inside, there.shape[2:], strict=True)
    margins = [(one.start, size - one.stop) for one, size in pairs]
    found = _shifted(here, there, margins, strip.ranges, window, len(strips))
    dims = len(window.kernel)
    parts = found.unflatten(0, (len(strips), window.groups)).unbind()
    return [part.movedim((0, 1, 2), (-3, -2, -1)).flatten(0, dims - 1) for part in parts]


def _shifted(
    here: Tensor,
    there: Tensor,
    margins: Sequence[Interval],
    ranges: Sequence[Interval],
    window: Window,
    copies: int = 1,
) -> Tensor:
    """``Σ_q here[q] there[q + δ]ᵀ`` for shifts ``δ`` in the ranges, ``[g, C, C, *shifts]``.

    It is the weight gradient of a convolution with one tap for each shift. ``margins`` say how many
    positions ``there`` has before the first and after the last of ``here``.
    """
    groups, dims = copies * window.groups, len(window.kernel)
    pads = [
        (-low * d - before, high * d - after)
        for (low, high), d, (before, after) in zip(ranges, window.dilation, margins, strict=True)
    ]
    even = [min(pair) for pair in pads]
    there = zero_pad(there, [(b - e, a - e) for (b, a), e in zip(pads, even, strict=True)])
    channels = here.shape[1] // groups
    result: list[Tensor] = torch.ops.aten.convolution_backward(
        here,
        there,
        here.new_empty(here.shape[1], channels, *(high - low + 1 for low, high in ranges)),
        None,
        [1] * dims,
        even,
        list(window.dilation),
        False,
        [0] * dims,
        groups,
        [False, True, False],
    )
    found: Tensor = result[1].unflatten(0, (groups, channels))
    return found


def _keys(size: tuple[int, ...], window: Window) -> list[_Key]:
    """What the products are, in their order."""
    half, most = _half(window), longest_dim(window)
    forward = list(itertools.product(*(range(low, high + 1) for low, high in half)))
    backward = [tuple(-one for one in offset) for offset in forward if offset[most] > 0]
    keys: list[_Key] = [(offset, None) for offset in forward + backward]
    for strip in itertools.chain.from_iterable(strips_of(size, window)):
        offsets = itertools.product(*(range(low, high + 1) for low, high in strip.ranges))
        keys += [(offset, strip) for offset in offsets]
    return keys


@lru_cache(maxsize=64)
def _selection(
    size: tuple[int, ...], window: Window, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """``S``: which products make up the block of each pair of taps, ``[taps², K]``."""
    keys = _keys(size, window)
    taps = list(itertools.product(*(range(k) for k in window.kernel)))
    number = {tap: index for index, tap in enumerate(taps)}
    rows = [[0.0] * len(keys) for _ in range(math.prod(window.kernel) ** 2)]
    for column, (offset, strip) in enumerate(keys):
        for u in taps:
            v = tuple(one + step for one, step in zip(u, offset, strict=True))
            misses = strip is None or all(u[dim] == tap for dim, tap in strip.taps.items())
            if misses and v in number:
                sign = 1 if strip is None else strip.sign
                rows[number[u] * len(taps) + number[v]][column] = float(sign)
    return torch.tensor(rows, dtype=dtype, device=device)
