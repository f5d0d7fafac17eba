"""Geometry of a convolution's patches, and the direct way to collect them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kronfac.linalg import devices
from kronfac.linalg.covariance import gram


@dataclass(frozen=True)
class Window:
    """How a kernel moves over an input that is already padded, except for ``padding`` zeros.

    Every field has one entry per spatial dimension; ``padding`` holds ``(before, after)`` pairs.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    groups: int = 1

    @property
    def taps(self) -> int:
        """Number of kernel positions, ``Π k``."""
        return math.prod(self.kernel)

    def output_size(self, size: Sequence[int]) -> tuple[int, ...]:
        """Number of positions of the kernel along each spatial dimension."""
        return tuple(
            (n + before + after - d * (k - 1) - 1) // s + 1
            for n, (before, after), d, k, s in zip(
                size, self.padding, self.dilation, self.kernel, self.stride, strict=True
            )
        )

    @property
    def unit_stride(self) -> bool:
        """Whether the kernel visits every position."""
        return all(s == 1 for s in self.stride)

    @property
    def pointwise(self) -> bool:
        """Whether each patch is one position, and each position a patch."""
        return self.taps == 1 and self.unit_stride and not any(map(any, self.padding))

    def tap_slices(self, size: Sequence[int]) -> Iterator[tuple[slice, ...]]:
        """For each tap, in row-major order, the input elements it touches, without the padding."""
        out = self.output_size(size)

        def touched(dim: int, tap: int) -> slice:
            start = tap * self.dilation[dim] - self.padding[dim][0]
            stop = start + self.stride[dim] * (out[dim] - 1) + 1
            if start < 0:
                start += -(start // self.stride[dim]) * self.stride[dim]
            return slice(start, max(start, min(stop, size[dim])), self.stride[dim])

        def walk(dim: int, chosen: tuple[slice, ...]) -> Iterator[tuple[slice, ...]]:
            if dim == len(self.kernel):
                yield chosen
                return
            for tap in range(self.kernel[dim]):
                yield from walk(dim + 1, (*chosen, touched(dim, tap)))

        return walk(0, ())


def zero_pad(x: Tensor, padding: Sequence[tuple[int, int]]) -> Tensor:
    """Pad the trailing dimensions with zeros, ``(before, after)`` each."""
    if not any(before or after for before, after in padding):
        return x
    flat = [amount for pair in reversed(padding) for amount in pair]
    return F.pad(x, flat)


def patches(x: Tensor, window: Window) -> Tensor:
    """Collect all patches: ``[N, g·C, *spatial] -> [*b, N, S, taps·C]``.

    Features are ordered as in a ``channels_last`` weight: taps first, channels inside. This is the
    direct form (``taps`` copies of the input), used where the rows themselves are needed and where
    patches share nothing.
    """
    samples, channels = x.shape[:2]
    # [N, *out, *kernel, g·C] -> [N, *out, *kernel, g, C] -> [g, N, S, taps·C]
    view = _unfolded(x, window).unflatten(-1, (window.groups, -1)).movedim(-2, 0)
    positions = math.prod(window.output_size(x.shape[2:]))
    width = window.taps * (channels // window.groups)
    rows: Tensor = view.reshape(window.groups, samples, positions, width)
    return rows if window.groups > 1 else rows[0]


def patches_at(x: Tensor, window: Window, positions: Tensor) -> Tensor:
    """The patches at some positions ``[N, P]`` of each sample only: ``[*b, N, P, taps·C]``."""
    samples = torch.arange(x.shape[0], device=x.device)[:, None]
    where = torch.unravel_index(positions, window.output_size(x.shape[2:]))
    view = _unfolded(x, window)[(samples, *where)]  # [N, P, *kernel, g·C]
    rows: Tensor = view.unflatten(-1, (window.groups, -1)).movedim(-2, 0).flatten(3)
    return rows if window.groups > 1 else rows[0]


def _unfolded(x: Tensor, window: Window) -> Tensor:
    """All patches as a view of the padded input, ``[N, *out, *kernel, g·C]``."""
    view = zero_pad(x, window.padding)
    for dim in range(len(window.kernel)):
        reach = window.dilation[dim] * (window.kernel[dim] - 1) + 1
        view = view.unfold(2 + dim, reach, window.stride[dim])
        view = view[..., :: window.dilation[dim]]
    return view.movedim(1, -1)


def patch_gram(x: Tensor, window: Window, max_elements: int | None = None) -> Tensor:
    """Return ``Σ a aᵀ`` over all patches by collecting them, a few samples at a time.

    On a CPU so few that they stay in its caches; elsewhere each few are a kernel more.
    """
    if max_elements is None:
        max_elements = 1 << (25 if devices.wants_few_kernels(x.device) else 22)
    out = math.prod(window.output_size(x.shape[2:]))
    per_sample = max(1, out * x.shape[1] * window.taps)
    chunk = max(1, max_elements // per_sample)
    total: Tensor | None = None
    for part in x.split(chunk):
        product = gram(patches(part, window).flatten(-3, -2))
        total = product if total is None else total.add_(product)
    assert total is not None
    return total


def patch_sums(x: Tensor, window: Window) -> Tensor:
    """Sum each sample's patches over positions: ``[N, g·C, *spatial] -> [*b, N, taps·C]``."""
    dims = tuple(range(2, x.dim()))
    sums = [
        x[(slice(None), slice(None), *where)].sum(dims) for where in window.tap_slices(x.shape[2:])
    ]
    return _by_group(sums, window)


def patch_total(x: Tensor, window: Window) -> Tensor:
    """Sum all patches over samples and positions: ``[N, g·C, *spatial] -> [*b, taps·C]``."""
    return patches(_sample_total(x), window).sum(-2).squeeze(-2)


def _sample_total(x: Tensor) -> Tensor:
    """Sum over samples: ``[1, g·C, *spatial]``.

    On a CPU a product is twice as fast as ``x.sum(0)``, and ten times if channels come last. An
    accelerator might round what it multiplies.
    """
    last = x.movedim(1, -1)
    if x.device.type == "cpu" and x.is_contiguous():
        return (x.new_ones(1, len(x)) @ x.flatten(1)).reshape(1, *x.shape[1:])
    if x.device.type == "cpu" and last.is_contiguous():
        total = x.new_ones(1, len(x)) @ last.flatten(1)
        return total.reshape(1, *last.shape[1:]).movedim(-1, 1)
    return x.sum(0, keepdim=True)


def patch_squares(x: Tensor, window: Window) -> Tensor:
    """Sum of squares of each patch feature, the diagonal of ``Σ a aᵀ``: ``[*b, taps·C]``."""
    return patch_total(x.square(), window)


def _by_group(sums: list[Tensor], window: Window) -> Tensor:
    """Stack per-tap ``[N, g·C]`` sums into ``[*b, N, taps·C]``."""
    stacked: Tensor = torch.stack(sums, dim=1).unflatten(2, (window.groups, -1))
    return stacked.permute(2, 0, 1, 3).flatten(2) if window.groups > 1 else stacked.flatten(1)
