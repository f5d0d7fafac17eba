"""Second moments of the input rows of several layers at once, where they have equal shapes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kronfac.layers.rows import DenseRows, PatchRows, Rows
from kronfac.linalg import devices
from kronfac.linalg.covariance import bordered_gram, gram
from kronfac.linalg.sliding import last_channels, patch_covariance

#: How many numbers are copied, or computed, side by side at most.
_MOST_ELEMENTS = 1 << 26


def source_of(rows: Rows) -> Tensor | None:
    """The tensor that rows are made of, if they can be taken together with others."""
    if type(rows) is DenseRows:
        return rows.rows
    if type(rows) is PatchRows and not rows.ones:
        return rows.x
    return None


def form_of(rows: Rows) -> Hashable:
    """What rows have in common that are taken together."""
    tensor = source_of(rows)
    assert tensor is not None
    kind = rows.window if isinstance(rows, PatchRows) else rows.ones
    return kind, tensor.shape, tensor.dtype, tensor.device


def covariances(rows: Sequence[Rows], narrow: bool = False) -> list[Tensor]:
    """``Σ r rᵀ`` of rows of one form; those that are computed together share memory."""
    found: list[Tensor] = []
    size = _most_at_once(rows[0])
    for start in range(0, len(rows), size):
        some = rows[start : start + size]
        if len(some) == 1:
            found.append(some[0].covariance(narrow))
        elif isinstance(some[0], PatchRows):
            found += _of_patches([one for one in some if isinstance(one, PatchRows)], narrow)
        else:
            found += _of_dense([one for one in some if isinstance(one, DenseRows)], narrow)
    return found


def _most_at_once(rows: Rows) -> int:
    tensor = source_of(rows)
    assert tensor is not None
    if isinstance(rows, PatchRows):
        groups = rows.window.groups
        result = groups * (tensor.shape[1] // groups * rows.window.taps) ** 2
    else:
        result = tensor.shape[-1] ** 2
    return max(1, _MOST_ELEMENTS // max(1, tensor.numel(), result))


def _of_dense(rows: Sequence[DenseRows], narrow: bool) -> list[Tensor]:
    flat = torch.stack([one.rows.flatten(-3, -2) for one in rows])
    return list((bordered_gram if rows[0].ones else gram)(flat, narrow).unbind())


def _of_patches(rows: Sequence[PatchRows], narrow: bool) -> list[Tensor]:
    """Each layer is as many groups of one convolution as it has itself."""
    window = rows[0].window
    groups = len(rows) * window.groups
    if window.taps == 1 and not any(map(any, window.padding)):
        chosen = tuple(slice(None, None, stride) for stride in window.stride)
        maps = [one.x[(slice(None), slice(None), *chosen)].transpose(0, 1) for one in rows]
        channels = torch.stack(maps).reshape(groups, maps[0].shape[0] // window.groups, -1)
        found = gram(channels.mT, narrow)
    else:
        found = patch_covariance(_side_by_side(rows), replace(window, groups=groups))
    return list(found.unflatten(0, (len(rows), -1)).unbind() if window.groups > 1 else found)


def _side_by_side(rows: Sequence[PatchRows]) -> Tensor:
    """The channels of several layers' images, on processors in the order that sliding windows take."""
    first, channels = rows[0].x, rows[0].x.shape[1]
    if first.dim() == 3 or devices.wants_few_kernels(first.device):
        return torch.cat([one.x for one in rows], dim=1)
    shape = first.shape[0], *first.shape[2:], len(rows) * channels
    images = last_channels(first, shape, "images")
    for number, one in enumerate(rows):
        images.narrow(1, number * channels, channels).copy_(one.x)
    return images
