"""Convolution geometries: a list to read and a hypothesis strategy to search."""

import itertools

import hypothesis.strategies as st
import torch
import torch.nn.functional as F
from torch import Tensor

from kronfac.linalg.patches import Window

Geometry = tuple[tuple[int, ...], Window]


def window(
    kernel: tuple[int, ...],
    stride: int | tuple[int, ...] = 1,
    dilation: int | tuple[int, ...] = 1,
    padding: int | tuple[tuple[int, int], ...] = 0,
    groups: int = 1,
) -> Window:
    """A window whose numbers stand for every dimension."""
    dims = len(kernel)
    return Window(
        kernel=kernel,
        stride=(stride,) * dims if isinstance(stride, int) else stride,
        dilation=(dilation,) * dims if isinstance(dilation, int) else dilation,
        padding=((padding, padding),) * dims if isinstance(padding, int) else padding,
        groups=groups,
    )


GEOMETRIES: dict[str, Geometry] = {
    "1d": ((2, 3, 7), window((3,))),
    "1d-pointwise": ((2, 3, 7), window((1,))),
    "1d-pointwise-padded": ((2, 3, 7), window((1,), padding=2)),
    "1d-same": ((2, 3, 7), window((3,), padding=1)),
    "1d-same-even": ((2, 3, 7), window((4,), padding=((1, 2),))),
    "1d-wide-padding": ((2, 3, 4), window((3,), padding=5)),
    "1d-dilated": ((2, 3, 9), window((3,), dilation=3, padding=2)),
    "1d-strided": ((2, 3, 9), window((3,), stride=2, padding=1)),
    "1d-disjoint": ((2, 3, 9), window((2,), stride=4)),
    "1d-groups": ((2, 4, 7), window((3,), padding=1, groups=2)),
    "1d-kernel-is-the-image": ((2, 3, 5), window((5,))),
    "1d-kernel-beyond-the-image": ((2, 3, 3), window((7,), padding=3)),
    "2d": ((2, 3, 5, 6), window((3, 3))),
    "2d-pointwise": ((2, 3, 4, 3), window((1, 1))),
    "2d-padded": ((2, 3, 5, 6), window((3, 3), padding=1)),
    "2d-asymmetric": ((2, 3, 5, 6), window((2, 4), padding=((0, 1), (1, 2)))),
    "2d-one-sided": ((2, 3, 5, 6), window((3, 3), padding=((2, 0), (0, 2)))),
    "2d-row": ((2, 3, 4, 6), window((1, 5), padding=((0, 0), (2, 2)))),
    "2d-column": ((2, 3, 6, 4), window((5, 1), padding=((2, 2), (0, 0)))),
    "2d-dilated": ((2, 3, 7, 6), window((3, 2), dilation=(2, 3), padding=2)),
    "2d-strided": ((2, 3, 7, 6), window((3, 3), stride=2, padding=1)),
    "2d-uneven-stride": ((2, 3, 7, 6), window((3, 3), stride=(1, 2), padding=1)),
    "2d-patch-embedding": ((2, 3, 6, 6), window((3, 3), stride=3)),
    "2d-groups": ((2, 4, 5, 4), window((3, 3), padding=1, groups=2)),
    "2d-depthwise": ((2, 4, 5, 4), window((3, 3), padding=1, groups=4)),
    "2d-tiny-image": ((2, 3, 1, 1), window((3, 3), padding=1)),
    "2d-thin-image": ((2, 3, 1, 6), window((3, 3), padding=1)),
    "2d-7x7": ((1, 2, 8, 8), window((7, 7), padding=3)),
    "2d-dilation-beyond-the-image": ((2, 2, 3, 3), window((3, 3), dilation=4, padding=4)),
    "3d": ((1, 2, 4, 3, 4), window((2, 3, 2))),
    "3d-padded": ((1, 2, 3, 4, 3), window((3, 3, 3), padding=1)),
    "3d-strided": ((1, 2, 4, 4, 4), window((2, 2, 2), stride=(1, 2, 1))),
    "3d-groups": ((1, 4, 3, 3, 3), window((3, 1, 3), padding=1, groups=2)),
}


@st.composite
def geometries(draw: st.DrawFn, unit_stride: bool = False) -> Geometry:
    """Any small convolution that torch would accept."""
    dims = draw(st.integers(1, 3))
    most = {1: 9, 2: 6, 3: 4}[dims]
    groups = draw(st.integers(1, 3))
    channels = groups * draw(st.integers(1, 2))
    size, kernel, stride, dilation, padding = [], [], [], [], []
    for _ in range(dims):
        size.append(draw(st.integers(1, most)))
        kernel.append(draw(st.integers(1, {1: 5, 2: 4, 3: 3}[dims])))
        dilation.append(draw(st.integers(1, 3)))
        stride.append(1 if unit_stride else draw(st.integers(1, 3)))
        missing = dilation[-1] * (kernel[-1] - 1) + 1 - size[-1]
        before = draw(st.integers(0, 4))
        after = draw(st.integers(max(0, missing - before), max(0, missing - before) + 3))
        padding.append((before, after))
    shape = (draw(st.integers(1, 2)), channels, *size)
    return shape, Window(tuple(kernel), tuple(stride), tuple(dilation), tuple(padding), groups)


def make_input(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Tensor:
    """The same numbers for the same shape."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)


def obvious_patches(x: Tensor, window: Window) -> Tensor:
    """One slice of the padded input per position, in float64: `[g, N, S, taps·C]`."""
    x = F.pad(x.double(), [p for pair in reversed(window.padding) for p in pair])
    rows = []
    for position in itertools.product(*map(range, _positions(x, window))):
        where = [slice(None), slice(None)]
        for p, k, s, d in zip(position, window.kernel, window.stride, window.dilation, strict=True):
            where.append(slice(p * s, p * s + d * (k - 1) + 1, d))
        patch = x[tuple(where)].unflatten(1, (window.groups, -1))  # [N, g, C, *kernel]
        rows.append(patch.movedim(2, -1).flatten(2))
    return torch.stack(rows, dim=2).transpose(0, 1)


def _positions(padded: Tensor, window: Window) -> list[int]:
    """How often the kernel fits, counted one by one."""
    counts = []
    for dim, (k, s, d) in enumerate(
        zip(window.kernel, window.stride, window.dilation, strict=True), start=2
    ):
        starts = range(0, padded.shape[dim], s)
        counts.append(sum(start + d * (k - 1) < padded.shape[dim] for start in starts))
    return counts


def by_group(tensor: Tensor, window: Window) -> Tensor:
    """Give the library's result the leading dimension that the reference always has."""
    return tensor if window.groups > 1 else tensor.unsqueeze(0)
